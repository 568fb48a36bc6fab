"""Templates: errors name file and line, ejected ones win, and no template can misplace a value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jinja2
import pytest

from launcher.render import eject, shipped
from launcher.render.context import check_shell_template
from launcher.render.environment import RenderError, kind_of, render_template
from launcher.render.render import notes, render_image, render_run
from tests.render.examples import clusters, target

NAME = "slurm/own.sbatch.j2"


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
    ],
)
def test_a_value_where_quoting_does_not_hold_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RenderError) as error:
        render(tmp_path, text, x="$(id)")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo {{ x }}", "echo 'a'\\''b'"),
        ("n=$(({{ n }} + 1)) # {{ x | comment }}", "n=$((7 + 1)) # a'b"),
        ("echo \"$(cat {{ x }})\" '{' ${#list[@]}", "echo \"$(cat 'a'\\''b')\" '{' ${#list[@]}"),
        ("a=({{ many }})", "a=('a b' '')"),
        ("{{ x | upper }}{{ x ~ n }}", "'A'\\''B''a'\\''b7'"),
        ("{% macro m(v) %}$({{ v }}){% endmacro %}{{ m(x) }}", "'$('\\''a'\\''\\'\\'''\\''b'\\'')'"),
    ],
)
def test_values_are_quoted_without_being_asked_to(tmp_path: Path, text: str, expected: str) -> None:
    assert render(tmp_path, text, x="a'b", n=7, many=("a b", "")) == expected


@pytest.mark.parametrize("name", [name for name in shipped.template_names() if kind_of(name) == "sh"])
def test_no_shipped_script_puts_a_value_where_quoting_does_not_hold(name: str) -> None:
    environment = jinja2.Environment(comment_start_string="{# ", trim_blocks=True, lstrip_blocks=True)
    check_shell_template(environment, (shipped.templates_dir() / name).read_text(), name)


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
    path.write_text(path.read_text().replace("# One host:", "# My host:"))
    assert "-# One host: torchrun" in eject.diff_template(name, tmp_path)
    assert "+# My host: torchrun" in eject.diff_template(name, tmp_path)
    what = replace(target(clusters()["local"], "task"), ranks_per_node=2)
    files = render_run(replace(what, project_dir=tmp_path))
    assert "# My host:" in files[0].text
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
    assert notes(what) == (f"{path} wins over the shipped template",)


def test_the_image_of_an_edited_template_differs_from_the_shipped_one(tmp_path: Path) -> None:
    cluster = clusters()["slurm-h100"]
    path = eject.eject("docker/Dockerfile.j2", tmp_path)
    assert render_image(cluster, tmp_path) == render_image(cluster)
    path.write_text(path.read_text() + "# mine\n")
    assert render_image(cluster, tmp_path)[0].text == render_image(cluster)[0].text + "# mine\n"


def test_ejecting_overwrites_nothing_and_an_unknown_name_gets_a_suggestion(tmp_path: Path) -> None:
    eject.eject("docker/Dockerfile.j2", tmp_path)
    with pytest.raises(RenderError, match="is there already"):
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
