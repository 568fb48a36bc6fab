"""Templates: errors name file and line, ejected ones win, and no template can misplace a value."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from launcher.render import eject, quote, shipped
from launcher.render.context import check_shell_template
from launcher.render.environment import kind_of, render_template
from launcher.render.quote import RenderError
from launcher.render.render import render_image
from launcher.spec.job import Secret
from tests.render.examples import clusters, target
from tests.render.run import notes, render_run

NAME = "slurm/own.sbatch.j2"
PAYLOADS = (
    "a[$(touch PWNED)]",
    "a[$(touch PWNED)]=1",
    "$(touch PWNED)",
    "'; touch PWNED; '",
    "([$(touch PWNED)]=1)",
    "\ntouch PWNED\n",
)
JINJA = jinja2.Environment(
    comment_start_string="{# ", trim_blocks=True, lstrip_blocks=True, finalize=quote.sh
)


def render(folder: Path, text: str, name: str = NAME, **values: object) -> str:
    path = folder / "templates" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return render_template(name, values, folder)


def test_an_undefined_name_is_an_error_with_file_line_and_suggestion(tmp_path: Path) -> None:
    with pytest.raises(RenderError) as error:
        render(tmp_path, "one\ntwo {{ job }}\nthree {{ jobb }}\n", job="x")
    assert str(error.value) == "templates/slurm/own.sbatch.j2:3: 'jobb' is undefined; did you mean 'job'?"


@pytest.mark.parametrize("line", ["# {{ jobb }}", "#SBATCH --job-name={{ jobb }}", 'echo "{{ jobb }}"'])
def test_an_undefined_name_wins_over_how_it_should_be_quoted(tmp_path: Path, line: str) -> None:
    with pytest.raises(RenderError) as error:
        render(tmp_path, f"{{% for x in job %}}\n# {{{{ x | comment }}}}\n{{% endfor %}}\n{line}\n", job="x")
    assert str(error.value) == "templates/slurm/own.sbatch.j2:4: 'jobb' is undefined; did you mean 'job'?"
    for text in (line.replace("jobb", "jobb | default('x')"), line.replace("jobb", "job")):
        with pytest.raises(RenderError, match=r":1: a value in"):
            render(tmp_path, text + "\n", job="x")


def test_an_undefined_name_in_a_shipped_template_points_at_its_line() -> None:
    with pytest.raises(RenderError, match=r"^templates/slurm/job\.sbatch\.j2:3: 'run_id' is undefined"):
        render_template("slurm/job.sbatch.j2", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n{% if x %}\n", r":2: .*(endif|end of template)"),
        ("a\n{{ x | nofilter }}\n", r":2: No filter named 'nofilter'"),
        ("a\n{{ x | safe }}\n", r":2: No filter named 'safe'"),
        ("{% include 'nothing.sh.j2' %}\n", r"there is no template 'nothing.sh.j2'"),
        ("a\nb {{ none }}\n", r":2: None \(NoneType\) is not text"),
        ("a\nb {{ flag }}\n", r":2: True \(bool\) is not text"),
        ("a\nb {{ x | name }}\n", r":2: 'it is' is not a variable name"),
    ],
)
def test_template_errors_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RenderError, match=r"^templates/slurm/own\.sbatch\.j2.*" + message):
        render(tmp_path, text, x="it is", none=None, flag=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a\necho "{{ x }}"\n', ":2: a value inside double quotes: write it bare, it is quoted already"),
        ("echo '{{ x }}'\n", ":1: a value inside single quotes"),
        ("echo `{{ x }}`\n", ":1: a value inside backticks"),
        ("a\n# {{ x }}\n", ":2: a value in a comment needs `| comment`"),
        ("cat <<E\n{{ x }}\nE\n", ":2: a value inside a here-document"),
        ('echo "${A:-{{ x }}}"\n', ":1: a value inside double quotes"),
        ('echo "$(cat "{{ x }}")"\n', ":1: a value inside double quotes"),
        ("echo {{ x | comment }}\n", ":1: `| comment` and `| sbatch` do not quote for bash"),
        ("{% set y = x | sbatch %}\necho {{ y }}\n", ":1: `| comment` and `| sbatch` do not quote"),
        ("{% filter comment %}a{% endfilter %}\n", ":1: `| comment` and `| sbatch` do not quote"),
        ("echo 'open\n", "the template ends inside single quotes"),
        ("(({{ x }} > 1))\n", ":1: a value inside arithmetic, which bash evaluates"),
        ("n=$((1 + {{ x }}))\n", "inside arithmetic"),
        ("n=$[{{ x }}]\n", "inside arithmetic"),
        ("for ((i = 0; i < {{ x }}; i++)); do :; done\n", "inside arithmetic"),
        ("if true &&\n  [[ {{ x }} -eq 1 ]]; then :; fi\n", ":2: a value inside [[ ]] with an operator"),
        ("[[ 1 -lt {{ x }} ]]&& echo\n", "inside [[ ]] with an operator"),
        ("[[\n-v {{ x }} ]]\n", "inside [[ ]] with an operator"),
        ("declare -i n\nn={{ x }}\n", ":1: `-i` makes bash evaluate every later value"),
        ("f() { local -ri n={{ x }}; }\n", "`-ri` makes bash evaluate"),
        ("declare -a a={{ x }}\n", "a value of `declare`, which bash evaluates again"),
        ("export {{ x }}\n", "a value of `export`"),
        ("${a}eval {{ x }}\n", "a value of `eval`"),
        ("a[{{ x }}]=1\n", "a value inside a subscript"),
        ("a[1 + {{ x }}]=1\n", "a value inside a subscript"),
        ("a=([{{ x }}]=1)\n", "a value inside a subscript"),
        ("echo ${a[{{ x }}]}\n", "a value inside ${...}"),
        ("echo ${a:{{ x }}}\n", "a value inside ${...}"),
        ("printf -v {{ x }} 1\n", "a value of `-v`"),
        ("test -v {{ x }}\n", "a value of `-v`"),
        ("unset {{ x }}\n", "a value of `unset`"),
        ("read -r {{ x }} <<<1\n", "a value of `read`"),
        ("e'va'l {{ x }}\n", "a value of `eval`"),
        ("eval a=({{ x }})\n", "a value of `eval`"),
        ('eval "$(echo {{ x }})"\n', "a value of `eval`"),
        ("n={{ x }}\neval a=($n)\n", ":1: `eval` evaluates n"),
        ('n={{ x }}\nbash -c "$(echo $n)"\n', ":1: `-c` evaluates n"),
        ("if ! \\eval {{ x }}; then :; fi\n", "a value of `eval`"),
        ("let {{ x }}\n", "a value of `let`"),
        ("trap {{ x }} EXIT\n", "a value of `trap`"),
        ("bash -ec {{ x }}\n", "a value of `-c`"),
        (
            "n={{ x }}\nif ((n > 1)); then :; fi\n",
            ":1: arithmetic evaluates n (line 2), which gets a value here: write the value with `| number`",
        ),
        ("n={{ x }}\n[[ $n -gt 1 ]]\n", ":1: [[ ]] with an operator evaluates n"),
        ("echo \\{{ x }}\n", "a value after a backslash"),
        ("echo ${{ x }}\n", "a value after `$`"),
        ("((1))# {{ x }}\n", "a value in a comment"),
        ("(echo)# {{ x }}\n", "a value in a comment"),
        ("f()# {{ x }}\n", "a value in a comment"),
        ("eval @({{ x }}|a)\n", "a value of `eval`"),
        ("echo $'it\\'s {{ x }}'\n", "a value inside $'...'"),
        ("x=$(cat <<E\n{{ x }}\nE\n)\n", ":2: a value inside a here-document"),
        ("cat <<'A B' <<-\\E\nA B\n{{ x }}\n\tE\n", ":3: a value inside a here-document"),
        ('echo "$(case a in a) echo "{{ x }}" ;; esac)"\n', ":1: a value inside double quotes"),
        ('{% if x %}echo "{% else %}"{% endif %}{{ x }}"\n', "that open between `if` and `else` must close"),
        ("{% for y in x %}'{% endfor %}\n", "that open between `for` and `endfor` must close"),
        ("echo \"{% include 'torchrun/start.sh.j2' %}\"\n", "`include` includes other text"),
        ("echo {% block a %}{% endblock %}\n", "`block` includes other text"),
        ("{% filter replace('\\'', '') %}{{ x }}{% endfilter %}\n", "the tag `filter` is not for templates"),
        ("{% macro m() %}a{% endmacro %}{% call m() %}{% endcall %}\n", "the tag `call` is not for"),
        ("echo {% print x %}\n", "the tag `print` is not for"),
        ("cat <<E\n$(id)\n", "the template ends inside a here-document"),
        ("echo {{ x | number }}\n", "'$(id)' (str) is not a whole number"),
        ('echo "{{ x ~ n | number }}"\n', ":1: a value inside double quotes"),
        ('echo "{{ x or n | number }}"\n', ":1: a value inside double quotes"),
        ("n=$((1 + {{ n + n | number }}))\n", ":1: a value inside arithmetic"),
        ('echo "{{ x if n else n | number }}"\n', ":1: a value inside double quotes"),
        ('echo "{{ x | number if n else x | name }}"\n', ":1: a value inside double quotes"),
        ("# {{ x ~ n | comment }}\n", ":1: `| comment` and `| sbatch` apply to a part of this value only"),
        ("a\n# {{ (n | comment) ~ x }}\n", ":2: `| comment` and `| sbatch` apply to a part"),
        ("#SBATCH --comment={{ x ~ n | sbatch }}\n", ":1: `| comment` and `| sbatch` apply to a part"),
        ("echo {{ (x | comment) ~ n }}\n", ":1: `| comment` and `| sbatch` apply to a part"),
        ("echo {{ x | comment if n else n }}\n", ":1: `| comment` and `| sbatch` apply to a part"),
        ("echo {{ (x | sh).format(x) }}\n", ":1: 'NoneType' object is not callable"),
        ("echo {{ ('{}' | sh).format_map({'': x}) }}\n", ":1: 'NoneType' object is not callable"),
        ("a\n#SBATCH --job-name={{ x | comment }}\n", ":2: a value in an #SBATCH line needs `| sbatch`"),
        ("#{{ x | comment }}\n", ":1: a value in an #SBATCH line needs `| sbatch`"),
        ("n={{ x }}\n((${n} > 0))\n", ":1: arithmetic evaluates n"),
        ('n={{ x }}\n(( 1 + "${n}" > 0))\n', ":1: arithmetic evaluates n"),
        ("n=1{{ x }}\n((n))\n", ":1: arithmetic evaluates n"),
        ("n={{ x }}\n[[ ${n} -eq 1 ]]\n", ":1: [[ ]] with an operator evaluates n"),
        ('n={{ x }}\n[[ "${n:-1}" -eq 1 ]]\n', ":1: [[ ]] with an operator evaluates n"),
        ("n={{ x }}\n[[ -v $n ]]\n", ":1: [[ ]] with an operator evaluates n"),
        ("n={{ x }}\n[[ -v a[n] ]]\n", ":1: [[ ]] with an operator evaluates n"),
        ('n={{ x }}\necho "${!n}"\n', ":1: ${!...} evaluates n"),
        ('n={{ x }}\necho "${HOME:n}"\n', ":1: ${name:offset} evaluates n"),
        ("n={{ x }}\necho ${HOME: 0:${n}}\n", ":1: ${name:offset} evaluates n"),
        ("n={{ x }}\necho ${a[$n]}\n", ":1: a subscript evaluates n"),
        ("n={{ x }}\nz[$n]=1\n", ":1: a subscript evaluates n"),
        ('n={{ x }}\nz["${n}"]=1; echo\n', ":1: a subscript evaluates n"),
        ('n={{ x }}\nprintf -v "$n" x\n', ":1: `-v` evaluates n"),
        ("n={{ x }}\nlet 'y=n'\n", ":1: `let` evaluates n"),
        ('n={{ x }}\nif true; then eval "$n"; fi\n', ":1: `eval` evaluates n"),
        ('n={{ x }}\nread -r "${n}"', ":1: `read` evaluates n"),
        ('n={{ x }}\nexport "$n" # it', ":1: `export` evaluates n"),
        ("n={{ x }}\nbash -c $n\n", ":1: `-c` evaluates n"),
        ("a=({{ x }})\n((a[0]))\n", ":1: arithmetic evaluates a"),
        (
            'n={{ x }}\nm="$n"\no=(${m})\n((o))\n',
            ":1: arithmetic evaluates o (line 4), whose text comes from n, which",
        ),
        ("n={{ x }}\nz[ 1 + $n ]=1\n", ":1: a subscript evaluates n"),
        ("n={{ x }}\nz=([$n]=1)\n", ":1: a subscript evaluates n"),
        ("n={{ x }}\necho ${@:n}\n", ":1: ${name:offset} evaluates n"),
        ("n={{ x }}\necho ${n@P}\n", ":1: ${name@P} evaluates n"),
        ('n={{ x }}\necho `eval "$n"`\n', ":1: `eval` evaluates n"),
        ("a+=(1\n  {{ x }})\n((a))\n", ":2: arithmetic evaluates a"),
        ("a[0]={{ x }}\n((a))\n", ":1: arithmetic evaluates a"),
        ("for n in 1 {{ x }}; do ((n)); done\n", ":1: arithmetic evaluates n"),
        ("/bin/bash -c {{ x }}\n", "a value of `-c`"),
        ("bash <<< {{ x }}\n", "a value of `bash`"),
        ('n={{ x }}\n/bin/sh <<<"$n"\n', ":1: `/bin/sh` evaluates n"),
        ("a=((n)){{ x }}\n", ":1: `(` in a list of words"),
        ("a=(1; 2)\n", ":1: `;` in a list of words"),
        ("eval {% if n %};{% endif %} {{ x }}\n", "a value of `eval`"),
        ('{% if not n %}cat <<E;{% endif %}\n"\nE\n{{ x }}\n"\n', "that open between `if` and `endif` must"),
        ("cat <<E;{% include 'torchrun/start.sh.j2' %}\nE\n", "`include` includes other text"),
    ],
)
def test_a_value_where_quoting_does_not_hold_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RenderError) as error:
        render(tmp_path, text, x="$(id)", n=7)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo {{ x }}", "echo 'a'\\''b'"),
        ("n=$(({{ n | number }} + 1)) # {{ x | comment }}", "n=$((7 + 1)) # a'b"),
        ("echo \"$(cat {{ x }})\" '{' ${#list[@]}", "echo \"$(cat 'a'\\''b')\" '{' ${#list[@]}"),
        ("a=({{ many }})", "a=('a b' '')"),
        ("[[ {{ x }} == 7 && 1 -eq {{ n | number }} ]] || true", "[[ 'a'\\''b' == 7 && 1 -eq 7 ]] || true"),
        ("cat <<E\n$x\nE\necho {{ x }}", "cat <<E\n$x\nE\necho 'a'\\''b'"),
        ("case {{ x }} in (a) ;; b) echo {{ n }} ;; esac", "case 'a'\\''b' in (a) ;; b) echo 7 ;; esac"),
        ("n={{ n | number }}; ((n > ${a:-{{ n | number }}}))", "n=7; ((n > ${a:-7}))"),
        ('echo "{{ n | number if x else (n + 1) | number }}" # {{ (x ~ n) | comment }}', 'echo "7" # a\'b7'),
        ("echo '{{ v | name }}'", "echo 'V'"),
        ("#SBATCH --nodes={{ n | number }}\n# {{ v | name }}", "#SBATCH --nodes=7\n# V"),
        ("a=({{ many }} <(x) $(y)); ((${#a[@]} > 0))", "a=('a b' '' <(x) $(y)); ((${#a[@]} > 0))"),
        (
            "n={{ x }}; [[ -v n && -n ${n} ]]; echo ${n:-1}",
            "n='a'\\''b'; [[ -v n && -n ${n} ]]; echo ${n:-1}",
        ),
        (
            "n={{ x }}; trap 'rm \"$n\"' EXIT; read -r m <$n",
            "n='a'\\''b'; trap 'rm \"$n\"' EXIT; read -r m <$n",
        ),
        ('n={{ x }}; export m=$n; echo "${!n@}"', "n='a'\\''b'; export m=$n; echo \"${!n@}\""),
        ("A_{{ v | name }}={{ x }} b''#{{ x }}", "A_V='a'\\''b' b''#'a'\\''b'"),
        ("{{ x | upper }}{{ x ~ n }}", "'A'\\''B''a'\\''b7'"),
        ("{% macro m(v) %}$({{ v }}){% endmacro %}{{ m(x) }}", "'$('\\''a'\\''\\'\\'''\\''b'\\'')'"),
    ],
)
def test_values_are_quoted_without_being_asked_to(tmp_path: Path, text: str, expected: str) -> None:
    assert render(tmp_path, text, x="a'b", n=7, many=("a b", ""), v="V") == expected


RUN_A_VALUE = r"""
eval "$(echo {{ x }})"
(( $(echo {{ x }}) ))
[[ $(echo {{ x }}) -eq 1 ]]
a[$(echo {{ x }})]=1
declare "$(echo {{ x }})"
let "$(echo {{x}})"
set -- {{ x }}; eval "$1"
f(){ eval "$1"; }; f {{ x }}
f() { g "$@"; }; g() { ((${1})); }; f {{ x }}
f() { shift; ((${1})); }; f 1 {{ x }}
f() { for n; do ((n)); done; }; f {{ x }}
f() { "$@"; }; g() { eval "$1"; }; f g {{ x }}
f() ( eval "$1" ); f {{ x }}
function f { local n=$1; ((n)); }; f {{ x }}
f() { echo {{ x }}; }; (( $(f) ))
f() { echo "$1"; }; (( $(f {{ x }}) ))
f() { ((${1})); }; n={{ x }}; f n
set -- {{ x }}; eval "${!#}"
set -- -n {{ x }}; while getopts n: o; do ((OPTARG)); done
PS4={{ x }}; set -x; true
BASH_ENV={{ x }} bash script
export ENV={{ x }}; sh -ic true
RANDOM={{ x }}
OPTIND={{ x }}
a=({{ x }}); for i in "${a[@]}"; do ((i)); done
a=(); declare a={{ x }}
n={{ x }}; m=1+$n; ((m))
n={{ x }}; m=n; ((m))
n={{ x }}; n="${n%%.*}"; ((n))
m={{ x }}; : "${n:=$m}"; ((n))
n={{ x }}; eval "${n}; true"
n={{ x }}; eval 2>&1 "$n"
d={{ x }}; eval "$d/y"
d={{ x }}; $d/run
: {{ x }}; eval "$_"
echo {{ x }} | while read -r n; do ((n)); done
for i in 1; do echo {{ x }}; done | while read -r n; do ((n)); done
while read -r n; do ((n)); done < <(echo {{ x }})
read -r n <<<{{ x }}; ((n))
mapfile -t a < <(echo {{ x }}); ((a[0]))
printf -v n %s {{ x }}; ((n))
[[ {{ x }} =~ (.*) ]]; ((BASH_REMATCH[1]))
n=$(cut -d, -f1 <<<{{ x }}); ((n))
n=$(cat <(echo {{ x }})); ((n))
n=$(echo {{ x }} | tr , .); ((n))
n=$(basename {{ x }}); ((n))
echo {{ x }} | bash
echo {{ x }} | { n=$(cat); ((n)); }
echo {{ x }} > >(bash); wait $!
{{ x }} 2>&1 | bash
echo >& {{ x }}
d={{ x }}; echo >&"$d"
bash <(echo {{ x }})
source <(echo {{ x }})
source /dev/stdin <<<{{ x }}
n={{ x }}^bash <<E^$n^E
n={{ x }}^cat <<E^$((n))^E
n={{ x }}^read -r m <<E^"$n"^E^((${m//\"/}))
set -- {{ x }}; f() { { :; } }; eval "$1"
$'eval' {{ x }}
n={{ x }}; trap '((n))' EXIT
n={{ x }}; eval '((n))'
export A={{ x }}; bash -c '((A))'
bash -c 'eval "$1"' _ {{ x }}
bash -c "eval \"\$1\"" _ {{ x }}
bash -c '$0 $1' {{ x }}
bash -c 'exec "$@"' _ sh -c {{ x }}
bash -c 'bash -c "$@"' _ {{ x }}
bash -c -o posix 'eval "$1"' _ {{ x }}
q='eval "$1"'; bash -c "$q" _ {{ x }}
bash -c 'echo "$1"' _ {{ x }} | bash
n={{ x }}; v=$(eval echo '$n'); ((v))
n={{ x }}; trap "eval \"\$n\"" EXIT
exec {a[{{ x }}]}</dev/null
compgen -W {{ x }}
exec 3<<<{{ x }}; read n <&3; ((n))
m={{ x }}; n="m+1"; ((n))
m={{ x }}; n=${q:-m}; ((n))
m={{ x }}; declare -A d=([k]=m); ((d[k]))
m={{ x }}; n='a[$m]'; ((n))
d={{ x }}; n=$d/run; ((n))
d={{ x }}; n=$d/run; ((${n%/*}))
$'\145va\x6c' {{ x }}
shopt -s expand_aliases; BASH_ALIASES[n]={{ x }}^n
"$BASH" -c {{ x }}
${BASH} -c {{ x }}
env -S {{ x }}
echo {{ x }} | xargs -I% bash -c %
"""


def runs_a_value(source: str, payloads: tuple[str, ...], folder: Path) -> bool:
    for payload in payloads:
        command = ["bash", "-c", JINJA.from_string(source).render(x=payload)]
        subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=240)
    return (folder / "PWNED").exists()


@pytest.mark.parametrize("source", [line.replace("^", "\n") for line in RUN_A_VALUE.strip().splitlines()])
def test_a_template_that_would_run_a_value_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "script").write_text("true\n")
    assert runs_a_value(source, (*PAYLOADS, "touch PWNED;", "eval touch PWNED;"), tmp_path)
    with pytest.raises(RenderError, match=r"own\.sbatch\.j2:[12]: .*evaluates"):
        render(tmp_path, source, x="x")


RUN_NO_VALUE = r"""
eval "$({{ x }} shell.bash hook)"
n=$(wc -l <{{ x }}); ((n > 1))
n=$(df -P {{ x }} | awk 'NR == 2 { print $4 }'); ((n > 1))
n=$(ls {{ x }} | wc -l); ((n > 1))
n={{ x }}; m=${n//[!0-9]/}; ((m > 0 && ${#n} > 3))
d={{ x }}; f=$d/run; (( $(stat -c %s "$f" || echo 0) )); "$d"/run
retry() { local n=$1; shift; for ((i = 0; i < n; i++)); do "$@" && return; done; }; retry 3 true {{ x }}
f() { local n=$1; shift; ((n)); }; f() { local n=$1; shift; ((n)); }; f 3 {{ x }}
export A=1; export -n A; n={{ x }}; declare a=(-n -i "$n")
f() { printf '%s' "$1" >&2; }; (( $(f {{ x }}) ))
f() { local -r n=$1; printf -v out %s "$n"; }; f {{ x }}
declare -a a; a+=({{ x }}); declare -a b=("${a[@]}")
f() { local n; read -r n < <(echo 1); ((n)); }; echo {{ x }} | cat; f
n={{ x }}; trap 'rm -f "$n"' EXIT
bash -c 'cd / && for i in 1 2; do "$@" $((i + 1)); done' _ true {{ x }}
echo &> {{ x }}; echo 2>&1 >{{ x }}; cat 2>> {{ x }} <{{ x }}
n={{ x }}; export m=$n; [ "$n" -eq 1 ]; [[ $n == 1 ]]
IFS=$'\x1f'; n={{ x }}; echo $'\033[1m'"$n"; printf 'epoch[%s]' "$n"; echo "epoch[$n]"
n="nodes of m"; m={{ x }}; k=3; ((k))
"""


@pytest.mark.parametrize("source", RUN_NO_VALUE.strip().splitlines())
def test_a_template_that_runs_no_value_is_accepted(tmp_path: Path, source: str) -> None:
    assert render(tmp_path, source, x="x") == JINJA.from_string(source).render(x="x")
    assert not runs_a_value(source, PAYLOADS, tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('set -- {{ x }}\neval "$1"\n', ":1: `eval` evaluates $1 of the script (line 2), which gets a value"),
        (
            "f() {\n((${1})); }\nf {{ x }}\n",
            ":3: arithmetic evaluates $1 of f (line 2), which gets a value here",
        ),
        (
            "n={{ x }}\n$n\n",
            ":1: a command without quotes evaluates n (line 2), which gets a value here: put",
        ),
        ("echo >& {{ x }}\n", ":1: a value of `>&`, which bash evaluates again; write `&>` instead"),
        ("\nPS4={{ x }}\n", ":2: bash itself evaluates PS4, which gets a value here: write the value with"),
        ("f() [[ -n $1 ]]\n", ":1: put the body of the function f in braces"),
        ("{% set events = x %}\n", ":1: `events` is a name of launcher's own: choose another"),
        ("{% for exit_codes in x %}{% endfor %}\n", ":1: `exit_codes` is a name of launcher's own"),
        ("{% from 'a.sh.j2' import m as events %}\n", ":1: `events` is a name of launcher's own"),
        (
            "{% if x %}f() {\n{% endif %}\n",
            ":2: quotes, parentheses or braces that open between `if` and `endif`",
        ),
        ("echo \x02\n", ":1: a control character"),
    ],
)
def test_a_refusal_says_what_bash_evaluates_where_and_why(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(RenderError) as error:
        render(tmp_path, source, x="x")
    assert message in str(error.value)


ESCAPES = [
    "{{ x.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__ }}",
    "{{ x | attr('__class__') }}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "{% for c in m.__init__.__globals__.values() %}{{ c }}{% endfor %}",
    "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(secret) }}",
    "{{ secret.name.format.__self__ }}",
    "{{ (secret | string).__class__ }}",
    "{% set _ = many.append('x') %}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_reaches_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RenderError, match=r"^templates/slurm/own\.sbatch\.j2:1: "):
        render(tmp_path, text, x="x", secret=Secret(name="A"), many=["a"])
    assert not (tmp_path / "PWNED").exists()


# Split at blanks; `_` stands for one, `^` for a line break.
GRAMMAR = r"""
' " ` \ $ # ( ) { } [ ] | & ; < > = _ ^ $( $(( (( )) [[_ _]] ${a[ ${a: $[ $' <<E^ ^E^ _-eq_1 _-v_ a[ ]=1
a=( a= n= ((n)) case_a_in_a)_ ;;_esac echo_ #_ \^ printf_-v_ declare_-i_n^ local_ export_ declare_-A_a^ unset_
read_-r_ test_-v_ eval_ let_ bash_-c_ if_true;_then_ fi^ f()_{_ }^f^ {{_x_}} {{_x_}} {{_x_}}
_"$n"_ _${n}_ ${!n} ${a:n} n={{_x_}}^ a=({{_x_}})^ for_n_in_{{_x_}};_do_ ;_done^ [[_$n_-eq_1_]]^ a[$n]=1^ <<<
set_--_ f_ f_() "$1" "$@" $((n)) $n m=$n ((m)) ${1} $(f_ |_ |_while_read_n;_do_ |_bash^ <(echo_ done_
trap_'((n))'_EXIT^ eval_'((n))'^ PS4= set_-x^ RANDOM= n_ shift^ >(bash_ cat_ basename_ for_n^do_ "$_" 2>&1_
printf_-v_n_%s_ export_n_
"""
PARTS = st.one_of(
    st.sampled_from([part.replace("_", " ").replace("^", "\n") for part in GRAMMAR.split()]),
    st.text("ab1 $'\"", max_size=3),
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=st.lists(PARTS, max_size=5), after=st.lists(PARTS, max_size=5))
@example(before=["$''", "read -r "], after=[])
@example(before=['$"read" -r '], after=[])
@example(before=["\\$'\\' '"], after=["'"])
@example(before=["a=("], after=[")\n", "${a:n}"])
@example(before=["eval ", "a=("], after=[")\n"])
@example(before=["eval ", "$(", "echo "], after=[")"])
def test_a_template_that_is_accepted_runs_no_value(before: list[str], after: list[str]) -> None:
    source = "".join([*before, "{{ x }}", *after])
    try:
        check_shell_template(JINJA, source, "t")
        JINJA.from_string(source).render(x="x")
    except (jinja2.TemplateError, RenderError):
        event("refused")
        return
    with tempfile.TemporaryDirectory() as folder:
        assert not runs_a_value(source, PAYLOADS, Path(folder)), source


@pytest.mark.parametrize("name", [name for name in shipped.template_names() if kind_of(name) == "sh"])
def test_no_shipped_script_puts_a_value_where_quoting_does_not_hold(name: str) -> None:
    check_shell_template(JINJA, (shipped.templates_dir() / name).read_text(), name)


@pytest.mark.parametrize(
    "outer",
    [
        "{% include 'own/part.json.j2' %}\n",
        "{% extends 'own/part.json.j2' %}\n",
        "{% import 'own/part.json.j2' as part %}\n",
        "{% from 'own/part.json.j2' import x %}\n",
        "{% include 'own/' ~ 'part' ~ '.json.j2' %}\n",
        "{% include 'own/between.json.j2' %}\n",
    ],
)
def test_a_part_of_a_script_is_checked_as_a_script_whatever_its_name(tmp_path: Path, outer: str) -> None:
    folder = tmp_path / "templates" / "own"
    folder.mkdir(parents=True)
    (folder / "between.json.j2").write_text("{% include 'own/part.json.j2' %}\n")
    (folder / "part.json.j2").write_text('true\necho "{{ x }}"\n')
    with pytest.raises(RenderError, match=r"^templates/own/part\.json\.j2:2: a value inside double quotes"):
        render(tmp_path, outer, x="$(id)")


def test_a_script_cannot_include_a_shipped_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"^templates/docker/_image\.Dockerfile\.j2:\d+: a value in"):
        render(tmp_path, "{% include 'docker/_image.Dockerfile.j2' %}\n", title="$(id)")


def test_json_values_are_json_and_a_broken_request_is_named(tmp_path: Path) -> None:
    assert render(tmp_path, '{"a": {{ x }}}', "runpod/own.json.j2", x='"\n{{') == '{"a": "\\"\\n{{"}'
    (tmp_path / "templates/runpod/create-pod.json.j2").write_text('{"name": {{ name }},}')
    what = target(clusters()["runpod-a6000"], "task")
    with pytest.raises(RenderError, match=r"^templates/runpod/create-pod\.json\.j2 does not make valid JSON"):
        render_run(type(what)(**{**what.__dict__, "project_dir": tmp_path}))


def test_an_ejected_template_wins_and_its_difference_is_shown(tmp_path: Path) -> None:
    name = "torchrun/start.sh.j2"
    path = eject.eject(name, tmp_path)
    assert eject.diff_template(name, tmp_path) == ""
    path.write_text(path.read_text().replace("# One host,", "# My host,"))
    assert "-# One host, without torchrun" in eject.diff_template(name, tmp_path)
    assert "+# My host, without torchrun" in eject.diff_template(name, tmp_path)
    what = replace(target(clusters()["local"], "task"), ranks_per_node=2)
    files = render_run(replace(what, project_dir=tmp_path))
    assert "# My host," in files[0].text
    (tmp_path / "start.sh").write_text(render_run(what)[0].text)
    diff = eject.diff_rendered(files, tmp_path)
    assert diff.count("\n+# My host") == 1 and diff.count("\n-# One host") == 1
    ejected = {info.name for info in eject.list_templates(tmp_path) if info.ejected}
    assert ejected == {name}


def test_only_a_template_that_stands_for_a_shipped_one_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "templates" / "web").mkdir(parents=True)
    (tmp_path / "templates" / "web" / "page.html.j2").write_text("{{ title }}")
    what = replace(target(clusters()["local"], "task"), project_dir=tmp_path)
    assert notes(what) == ()
    path = eject.eject("torchrun/start.sh.j2", tmp_path)
    assert notes(what) == (f"{path} replaces the shipped template",)


def test_the_image_of_an_edited_template_differs_from_the_shipped_one(tmp_path: Path) -> None:
    cluster = clusters()["slurm-h100"]
    path = eject.eject("docker/Dockerfile.j2", tmp_path)
    assert render_image(cluster, tmp_path) == render_image(cluster)
    path.write_text(path.read_text() + "# mine\n")
    assert render_image(cluster, tmp_path)[0].text == render_image(cluster)[0].text + "# mine\n"


def test_ejecting_overwrites_nothing_and_an_unknown_name_gets_a_suggestion(tmp_path: Path) -> None:
    eject.eject("docker/Dockerfile.j2", tmp_path)
    with pytest.raises(RenderError, match="exists already"):
        eject.eject("docker/Dockerfile.j2", tmp_path)
    with pytest.raises(RenderError, match=r"did you mean 'slurm/job\.sbatch\.j2'"):
        eject.eject("slurm/job.sbach.j2", tmp_path)
    with pytest.raises(RenderError, match="there is no template"):
        eject.eject("../../etc/passwd", tmp_path)


def test_every_template_describes_itself(tmp_path: Path) -> None:
    infos = eject.list_templates(tmp_path)
    assert {info.name.split("/")[0] for info in infos} == {
        "torchrun",
        "slurm",
        "runpod",
        "docker",
        "apptainer",
    }
    assert all(info.description for info in infos)


def test_images_need_a_base_and_a_plain_name() -> None:
    cluster = clusters()["slurm-h100"]
    names = [file.path for file in render_image(cluster)]
    assert names == ["Dockerfile", "image.def"]
    assert not any("ENTRYPOINT [" in file.text for file in render_image(cluster))
    with pytest.raises(RenderError, match=r"`container\.base`, the image to build on, is missing"):
        render_image(clusters()["local"])
    bad = cluster.model_copy(update={"container": cluster.container.model_copy(update={"base": "a\nRUN rm"})})
    with pytest.raises(RenderError, match="is not an image reference"):
        render_image(bad)


def test_copies_of_templates_that_are_in_the_library_now_are_refused(tmp_path: Path) -> None:
    slurm = replace(target(clusters()["slurm-a100"], "task"), project_dir=tmp_path)
    batch = tmp_path / "templates" / "slurm" / "job.sbatch.j2"
    batch.parent.mkdir(parents=True)
    batch.write_text('#!/bin/bash\n{% include "slurm/_records.sh.j2" %}\n')
    with pytest.raises(
        RenderError, match=r"^templates/slurm/job.sbatch.j2 is a copy from an earlier version"
    ):
        render_run(slurm)
    batch.rename(batch.with_name("_signals.sh.j2"))
    with pytest.raises(
        RenderError, match=r"_signals.sh.j2 is no longer read: its functions are in slurm/slurm"
    ):
        render_run(slurm)
