"""Check that a shell template uses `{{ values }}` only where a quoted word is safe.

A value is written as a quoted word. In some places these quotes mean nothing (double quotes, a comment, a
here-document), and in others bash evaluates the word a second time (arithmetic, subscripts, `eval`). There a
value could run a command, so such a template is refused. `| number` and `| name` write a whole number or a
variable name, which are safe everywhere. What a command does with a value is not followed: `n=$(cat {{ x }})`
is accepted, whatever evaluates `n`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import jinja2
from jinja2 import nodes

_Kind = Literal[
    "plain", "double", "single", "ansi", "comment", "heredoc", "backtick", "arithmetic", "brace", "test"
]
_QUOTED: dict[str, str] = {
    "double": "double quotes",
    "single": "single quotes",
    "ansi": "$'...'",
    "comment": "a comment",
    "heredoc": "a here-document",
    "backtick": "backticks",
}
_EVALUATED: dict[str, str] = {"arithmetic": "arithmetic", "brace": "${...}", "test": "[[ ]] with an operator"}
# Filters whose output is safe in comment lines only.
_COMMENT_FILTERS = frozenset({"comment", "sbatch"})
_COMMENTS_ONLY = "`| comment` and `| sbatch` do not quote for bash; use them in comments only"
# Filters whose output is safe however often bash evaluates it.
_BARE = {"number": "0", "name": "__name__"}
# The tags allowed in `{% %}`. Any other tag writes text that is neither quoted nor checked.
_TAGS = frozenset(
    {"if", "elif", "else", "endif", "for", "endfor", "set", "endset", "block", "endblock"}
    | {"macro", "endmacro", "include", "extends", "import", "from"}
)
_OPENING = frozenset({"if", "for", "block", "macro"})
_TAKES_TEXT = frozenset({"block", "include"})
# Commands that treat a word as a name, an expression or a program, and evaluate it again.
_EVALUATE = frozenset(
    {"eval", "let", "unset", "read", "mapfile", "readarray", "getopts", "trap", "alias", "coproc", "wait"}
)
_DECLARE = frozenset({"declare", "typeset", "local", "readonly", "export"})
_SHELLS = frozenset({"bash", "sh", "dash", "ash", "ksh", "mksh", "zsh", "su"})
_NAME_TESTS = frozenset({"-v", "-R"})
_EVALUATING_TESTS = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"}) | _NAME_TESTS
# A command begins after these words.
_STARTS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "{", "!", "time"})
# Commands whose first argument is a command.
_RUNNERS = frozenset({"exec", "command", "builtin", "env", "nohup"})
# Markers within a word: a quoted expansion of unknown text (an unquoted one is `$`), and closed quotes.
_EXPANSION, _QUOTES = "?", "\1"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPANDED = re.compile(r"[$?]([A-Za-z_][A-Za-z0-9_]*)")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]]*\])?\+?=")
_PROCESS = re.compile(r"[<>]\(")


@dataclass
class _Frame:
    """A pair of quotes or brackets, and the state of the check inside it."""

    kind: _Kind
    words: list[str] = field(default_factory=list)
    "Words of the current simple command, without quotes."
    word: str = ""
    depth: int = 0
    "Parentheses open inside arithmetic."
    ends: str = ""
    "End word of a here-document."
    cases: int = 0
    "Number of open `case` statements, whose patterns end in a parenthesis."
    values: list[int] = field(default_factory=list)
    "Lines of values inside `[[ ]]`, which are checked at the end of a condition."
    array: str = ""
    "Variable to which the parentheses assign a list."
    target: bool = False
    "Whether the next word is the file of a redirection."


class _RefusedError(Exception):
    def __init__(self, problem: str, line: int | None = None) -> None:
        self.problem, self.line = problem, line


@dataclass
class _Shell:
    """The part of bash's grammar that decides how bash reads a word appended to the text so far."""

    stack: list[_Frame] = field(default_factory=lambda: [_Frame("plain")])
    line: int = 1
    escaped: bool = False
    "Whether the text ends in a backslash."
    here: list[str] = field(default_factory=list)
    "Here-documents that begin on the next line."
    evaluated: dict[str, str] = field(default_factory=dict)
    "Variables whose content bash evaluates -> the construct that evaluates it."
    holds: dict[str, set[str]] = field(default_factory=dict)
    "Variable -> variables whose whole content is assigned to it, as in `a=$b`."
    assigned: dict[str, int] = field(default_factory=dict)
    "Variables to which a value of the job is assigned -> line."

    @property
    def top(self) -> _Frame:
        return self.stack[-1]

    def open(self) -> list[str]:
        """What is still open at the end of the text: quotes, parentheses, here-documents."""
        return [frame.kind for frame in self.stack] + self.here

    def read(self, text: str) -> None:
        position = 0
        while position < len(text):
            if self.escaped:
                self.escaped = False
                if text[position] != "\n":  # not a line continuation
                    self.top.word += _QUOTES if text[position] == "$" else text[position]
                step = 1
            else:
                step = self._step(text, position)
            self.line += text.count("\n", position, position + step)
            position += step

    def _push(self, kind: _Kind, ends: str = "") -> None:
        self.stack.append(_Frame(kind, ends=ends))

    def _open_quotes(self, kind: _Kind) -> None:
        """Open quotes. The `$` of $'...' and $"..." is not part of the word."""
        if kind in ("ansi", "double") and self.top.word.endswith("$"):
            self.top.word = self.top.word.removesuffix("$") + _QUOTES
        self._push(kind)

    def _pop(self) -> None:
        if len(self.stack) > 1:
            self.stack.pop()

    def _close(self, stands_for: str = _QUOTES) -> None:
        """Close quotes or an expansion, which become part of a word."""
        self._pop()
        owner = self.stack[-2] if self.top.kind == "double" else self.top
        owner.word += stands_for

    def _evaluates(self, names: Iterable[str], construct: str) -> None:
        for name in names:
            self.evaluated.setdefault(name, construct)

    def _close_brace(self) -> None:
        inside = self.top.word
        if inside.startswith("!") and not re.search(r"[*@]\]?$", inside):
            self._evaluates(_IDENTIFIER.findall(inside)[:1], "${!...}")
        for subscript in re.findall(r"\[(.*)\]", inside, re.DOTALL):
            self._evaluates(_IDENTIFIER.findall(subscript), "a subscript")
        offset = re.match(r"!?(?:\w+|[@*])(?:\[.*\])?:(?![-=?+])(.*)", inside, re.DOTALL)
        if offset is not None:
            self._evaluates(_IDENTIFIER.findall(offset[1]), "${name:offset}")
        if inside.endswith("@P"):
            self._evaluates(_IDENTIFIER.findall(inside)[:1], "${name@P}")
        # ${#name} is a number, whatever the variable contains.
        names = [] if inside.startswith("#") else _IDENTIFIER.findall(inside)
        whole = "" if _IDENTIFIER.fullmatch(inside) else _EXPANSION
        sign = _EXPANSION if self.stack[-2].kind == "double" else "$"
        self._close("".join(sign + name for name in names) + whole)

    def _step(self, text: str, at: int) -> int:
        char, kind = text[at], self.top.kind
        if kind == "comment":
            if char == "\n":
                self._pop()
                return self._step(text, at)
            self.top.word += char
        elif kind == "single":
            if char == "'":
                self._close()
            else:
                self.stack[-2].word += _QUOTES if char == "$" else char
        elif kind == "heredoc":
            self._here_document(char)
        elif char == "\\":
            self.escaped = True
        elif kind == "ansi":
            if char == "'":
                self._close()
        else:
            return self._active(text, at)
        return 1

    def _here_document(self, char: str) -> None:
        if char != "\n":
            self.top.word += char
        elif self.top.word.strip("\t") == self.top.ends:
            self._pop()
            self._begin_here_document()
        else:
            self.top.word = ""

    def _begin_here_document(self) -> None:
        if self.here:
            self._push("heredoc", self.here.pop(0))

    def _active(self, text: str, at: int) -> int:
        """Read a character where `$` and backticks have a meaning."""
        char, top = text[at], self.top
        opened: tuple[tuple[str, _Kind], ...] = (
            ("$((", "arithmetic"),
            ("$[", "arithmetic"),
            ("$(", "plain"),
            ("${", "brace"),
        )
        for start, kind in opened:
            if text.startswith(start, at):
                self._push(kind, "]" if start == "$[" else "")
                return len(start)
        closing = {'"': "double", "`": "backtick"}.get(char)
        if closing is not None:
            if top.kind == closing:
                if closing == "backtick":
                    self._end_of_command()
                self._close()
            else:
                self._open_quotes("double" if char == '"' else "backtick")
        elif top.kind == "double":
            self.stack[-2].word += _EXPANSION if char == "$" else char
        elif top.kind == "arithmetic":
            return self._arithmetic(text, at)
        elif top.kind == "brace":
            if char == "}":
                self._close_brace()
            elif char == "'" and self.stack[-2].kind != "double":
                self._push("single")
            else:
                top.word += char
        elif char == "'":
            self._open_quotes("ansi" if top.word.endswith("$") else "single")
        elif top.kind == "test":
            return self._test(text, at)
        else:
            return self._plain(text, at)
        return 1

    def _arithmetic(self, text: str, at: int) -> int:
        char, top = text[at], self.top
        top.word += char
        if char in "([":
            top.depth += 1
        elif char in ")]":
            if top.depth:
                top.depth -= 1
            elif top.ends == char or text.startswith("))", at):
                self._evaluates(_IDENTIFIER.findall(top.word), "arithmetic")
                self._close(_EXPANSION)
                return 1 if top.ends else 2
            else:
                raise _RefusedError("`((` begins arithmetic: write `( (` for a subshell in a subshell")
        return 1

    def _test(self, text: str, at: int) -> int:
        char, top = text[at], self.top
        if char not in " \t\n;&|()<>":
            top.word += char
            return 1
        word, top.word = top.word, ""
        top.words.append(word)
        if word != "]]" and char not in "&|":
            return 1
        if not _EVALUATING_TESTS.isdisjoint(top.words):
            # `-v name` evaluates only the subscript of a literal name, but all of an expanded one.
            named = not _NAME_TESTS.isdisjoint(top.words) and not any(
                "[" in operand for operand in top.words[1:]
            )
            pattern = _EXPANDED if named else _IDENTIFIER
            self._evaluates(pattern.findall(" ".join(top.words)), _EVALUATED["test"])
            if top.values:
                raise _RefusedError(_needs_bare("test"), top.values[0])
        top.words.clear()
        top.values.clear()
        if word != "]]":
            return 1
        self._close()
        return self._plain(text, at)

    def _plain(self, text: str, at: int) -> int:
        char, top = text[at], self.top
        if char == "#" and not top.word:
            self._push("comment")
        elif text.startswith("((", at) and not top.word:
            self._push("arithmetic")
            return 2
        elif top.array and char in "(;&|<>" and not _PROCESS.match(text, at - (char == "(")):
            raise _RefusedError(f"`{char}` in a list of words: put it in quotes")
        elif char == "(":
            array = _ASSIGNMENT.fullmatch(top.word.replace(_QUOTES, ""))
            self._push("plain")
            self.top.array = array[1] if array else ""
        elif char == ")":
            self._end_of_command()
            if len(self.stack) > 1 and top.kind == "plain" and not top.cases:
                self._close(_EXPANSION)
        elif text.startswith("<<<", at):
            self._end_of_word()
            top.words.append("<<<")
            return 3
        elif text.startswith("<<", at):
            return self._announce_here_document(text, at)
        elif char in " \t":
            self._end_of_word()
        elif char in "\n;&|":
            self._end_of_command(newline=char == "\n")
        elif char in "<>":
            self._end_of_word()
            top.target = True
        else:
            top.word += char
        return 1

    def _announce_here_document(self, text: str, at: int) -> int:
        match = re.compile(r"<<-?[ \t]*((?:[^\s;&|<>()\\'\"]|\\.|'[^'\n]*'|\"[^\"\n]*\")+)").match(text, at)
        if match is None:
            raise _RefusedError("a here-document whose end is not a plain word")
        self._end_of_word()
        self.here.append(re.sub(r"[\\'\"]", "", match[1]))
        return match.end() - at

    def _end_of_word(self) -> None:
        top = self.top
        if not top.word:
            return
        word, top.word = top.word.replace(_QUOTES, ""), ""
        assigned = _ASSIGNMENT.match(word)
        holder = top.array or (assigned[1] if assigned else "")
        copied = _EXPANDED.fullmatch(word, assigned.end() if assigned else 0)
        if holder and copied is not None:
            self.holds.setdefault(holder, set()).add(copied[1])
        if top.target:
            top.target = False
            return
        top.words.append(word)
        if word == "[[":
            self._push("test")
        elif word == "in" and top.words[-3:-2] == ["case"] and _STARTS.issuperset(top.words[:-3]):
            top.cases += 1
            top.words.clear()
        elif word == "esac":
            top.cases = max(0, top.cases - 1)
        elif not _DECLARE.isdisjoint(top.words[:-1]) and re.match(r"-[A-Za-z]*[in]", word):
            raise _RefusedError(
                f"`{word}` makes bash evaluate every later value of that variable: leave it out"
            )

    def _end_of_command(self, newline: bool = False) -> None:
        self._end_of_word()
        if self.top.kind == "test":  # the condition continues on the next line
            return
        for subscript in re.findall(
            r"(?:^|\s)\w*\[([^\]]*)" if self.top.array else r"(?:^|\s)\w+\[([^\]]*)", " ".join(self.top.words)
        ):
            self._evaluates(_IDENTIFIER.findall(subscript), "a subscript")
        words = self.top.words
        if not self.top.array:
            program = next((word for word in words if not _before_program(word)), "")
            self._evaluates(re.findall(rf"[$]({_IDENTIFIER.pattern})", program), "a command without quotes")
        for word in words:
            command = self._evaluating(word)
            if command is not None:
                names = _IDENTIFIER.findall(word) if command == "let" else _EXPANDED.findall(word)
                self._evaluates(names, f"`{command}`")
        if not self.top.array:
            self.top.words.clear()
        self.top.target = False
        if newline:
            self._begin_here_document()

    def value(self, filters: str) -> None:
        """Put a value at the end of the text.

        `filters` names the last filter, if any. Raises _RefusedError.
        """
        top, bare = self.top, _BARE.get(filters)
        if top.kind == "comment":
            if filters not in _COMMENT_FILTERS:
                raise _RefusedError(
                    "a value in a comment needs `| comment`: a line break in it would end the comment"
                )
            directive = top.word.startswith("SBATCH") or "SBATCH".startswith(top.word)
            if directive and filters != "sbatch":
                raise _RefusedError("a value in an #SBATCH line needs `| sbatch`: sbatch splits it at blanks")
            top.word += "'"
            return
        if filters in _COMMENT_FILTERS:
            raise _RefusedError(_COMMENTS_ONLY)
        if bare is not None and top.kind not in ("heredoc", "ansi", "backtick"):
            (self.stack[-2] if top.kind == "single" else top).word += bare
            return
        quoted = "double" if "double" in self._around() else top.kind
        if quoted in _QUOTED:
            raise _RefusedError(f"a value inside {_QUOTED[quoted]}: write it bare, it is quoted already")
        if self.escaped:
            raise _RefusedError("a value after a backslash, which removes its first quote")
        if top.word.endswith("$"):
            raise _RefusedError(
                "a value after `$`: bash reads $'...' differently; `| name` writes a variable's name"
            )
        if top.kind == "test":
            top.values.append(self.line)
            top.word += "'"
            return
        if top.kind != "plain":
            raise _RefusedError(_needs_bare(top.kind))
        self._value_in_command(top)
        top.word += "'"

    def _around(self) -> list[str]:
        """The kinds of the frames of the current word. `$( )` begins a new one."""
        around: list[str] = []
        for frame in reversed(self.stack):
            if frame.kind == "plain":
                break
            around.append(frame.kind)
        return around

    def _evaluating(self, word: str) -> str | None:
        """The command or option that makes bash evaluate this word of the current command again, or the list
        or output that it is part of: `eval a=(...)`, `eval "$(...)"`."""
        top, outer = self.top, [frame for frame in self.stack[:-1] if frame.kind == "plain"]
        own = None if top.array else _evaluating(top.words, word)
        around = (_evaluating(frame.words, frame.word) for frame in outer)
        return own or next((name for name in around if name is not None and name not in _DECLARE), None)

    def _value_in_command(self, command: _Frame) -> None:
        word = command.word.replace(_QUOTES, "")
        if re.search(r"\[[^\]]*$", word) or any(
            re.search(r".\[[^\]]*$", text) for text in command.words if text != "[["
        ):
            raise _RefusedError(
                "a value inside [...]: bash evaluates a subscript; `| number` or `| name` can stand there"
            )
        assigned = _ASSIGNMENT.match(word)
        given = [command.array] if command.array else [assigned[1]] if assigned else []
        for loop, variable, list_of in zip(command.words, command.words[1:], command.words[2:], strict=False):
            if loop in ("for", "select") and list_of == "in":
                given.append(variable)
        for name in given:
            if _BARE["name"] not in name:
                self.assigned.setdefault(name, self.line)
        evaluating = self._evaluating(word)
        if evaluating is not None:
            raise _RefusedError(
                f"a value of `{evaluating}`, which bash evaluates again; `| number` or `| name` can stand "
                "there"
            )

    def end(self) -> None:
        """Raise _RefusedError if the template ends inside quotes, or bash evaluates a value of the job."""
        if self.open() not in (["plain"], ["plain", "comment"]) or self.here:
            kind = "heredoc" if self.here else self.top.kind
            raise _RefusedError(f"the template ends inside {_QUOTED.get(kind, 'parentheses')}")
        if self.top.kind == "comment":
            self._pop()
        self._end_of_command()
        copied = list(self.evaluated)
        while copied:
            holder = copied.pop()
            names = self.holds.get(holder, set()) - self.evaluated.keys()
            self._evaluates(names, self.evaluated[holder])
            copied += names
        for name in sorted(self.assigned.keys() & self.evaluated.keys()):
            raise _RefusedError(
                f"{self.evaluated[name]} evaluates {name}, which gets a value here: write the value with "
                "`| number` or `| name`",
                self.assigned[name],
            )


def _before_program(word: str) -> bool:
    """Whether the word comes before the name of the program or function."""
    return word in _STARTS or word in _RUNNERS or _ASSIGNMENT.match(word) is not None


def _evaluating(words: list[str], word: str) -> str | None:
    """The command or option that makes bash evaluate this word of a simple command again."""
    present = set(words)
    for name in sorted(present & _EVALUATE):
        return name
    declare = sorted(present & _DECLARE)
    if declare and (_ASSIGNMENT.match(word) is None or any(option.startswith("-") for option in words)):
        return declare[0]
    if present & {"printf", "test", "["} and ("-v" in words or word.startswith("-v")):
        return "-v"
    if any(program.rsplit("/", 1)[-1] in _SHELLS for program in words):
        if any(re.fullmatch(r"-[a-z]*c[a-z]*", option) for option in (*words, word)):
            return "-c"
        if "<<<" in words:
            return "<<<"
    return None


def _needs_bare(kind: str) -> str:
    return f"a value inside {_EVALUATED[kind]}, which bash evaluates; `| number` or `| name` can stand there"


def check_shell_template(environment: jinja2.Environment, source: str, filename: str) -> None:
    """Raise TemplateSyntaxError (with the line) for a value where its quotes do not protect it."""
    environment.parse(source, filename, filename)  # raises syntax errors with their own message and line
    shell, expression = _Shell(), list[tuple[str, str]]()
    branches: list[tuple[str, list[str], list[str]]] = []
    inside = False
    try:
        for line, token, value in environment.lex(source):
            shell.line = line
            if token == "data":
                shell.read(value)
            elif token in ("variable_begin", "block_begin"):
                inside, expression = True, []
            elif token == "variable_end":
                inside = False
                shell.value(_applied_filter(environment, "".join(text for _, text in expression)))
            elif token == "block_end":
                inside = False
                _check_tag(shell, [part for part in expression if part[0] != "whitespace"], branches)
            elif inside:
                expression.append((token, value))
        shell.end()
    except _RefusedError as refused:
        raise jinja2.TemplateSyntaxError(
            refused.problem, refused.line or shell.line, filename, filename
        ) from None


def _check_tag(
    shell: _Shell, expression: list[tuple[str, str]], branches: list[tuple[str, list[str], list[str]]]
) -> None:
    tag = expression[0][1] if expression else ""
    if any(token == "name" and value in _COMMENT_FILTERS for token, value in expression):
        raise _RefusedError(_COMMENTS_ONLY)
    if tag not in _TAGS:
        raise _RefusedError(f"the tag `{tag}` is not for templates of scripts: what it writes is not quoted")
    top = shell.top
    in_command = shell.escaped or shell.here or top.words or top.word or top.array or top.target
    if tag in _TAKES_TEXT and (top.kind != "plain" or in_command):
        raise _RefusedError(f"`{tag}` includes other text: put it where a command begins")
    if tag in _OPENING:
        branches.append((tag, shell.open(), [part for part in (*top.words, top.word) if part]))
    elif tag in ("else", "elif") or tag.removeprefix("end") in _OPENING:
        if branches and (branches[-1][1] != shell.open() or shell.escaped):
            raise _RefusedError(
                f"quotes or parentheses that open between `{branches[-1][0]}` and `{tag}` must close there"
            )
        if branches:  # if this branch is not taken, the command before it continues
            top.words[:0] = branches[-1][2]
        if branches and tag.startswith("end"):
            branches.pop()


def _applied_filter(environment: jinja2.Environment, expression: str) -> str:
    """The filter that applies to the whole of an output expression, or "".

    `a ~ b | number` filters only b, so the expression is parsed instead of searching its last words.
    """
    output = environment.parse(
        f"{environment.variable_start_string} {expression} {environment.variable_end_string}"
    ).body[0]
    filters = {_outer_filter(node) for node in output.iter_child_nodes()}
    applied = filters.pop() if len(filters) == 1 else ""
    inner = {node.name for node in output.find_all(nodes.Filter)}
    if applied not in _COMMENT_FILTERS and inner & _COMMENT_FILTERS:
        raise _RefusedError(
            "`| comment` and `| sbatch` apply to a part of this value only: put the whole in parentheses, "
            "as in `(a ~ b) | comment`"
        )
    return applied


def _outer_filter(node: nodes.Node) -> str:
    if isinstance(node, nodes.CondExpr):
        filters = {_outer_filter(branch) for branch in (node.expr1, node.expr2) if branch is not None}
        return filters.pop() if len(filters) == 1 else ""
    return node.name if isinstance(node, nodes.Filter) else ""
