"""Read a bash script with values of a job in it, as far as needed to know what bash does with each value.

`Script.read` takes text, `Script.value` a value. A value is written as a quoted word, so it is refused where
these quotes mean nothing. `launcher.render.commands` says which of the other words bash evaluates again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from launcher.render import commands, flow
from launcher.render.commands import LOOPS, STARTS, Command
from launcher.render.flow import ASSIGNMENT, BARE, Flow, RefusedError

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
_EVALUATED: dict[str, str] = {"arithmetic": "arithmetic", "brace": "${...}"}
_TEST = "[[ ]] with an operator"
# Filters whose output is safe in comment lines only.
COMMENT_FILTERS = frozenset({"comment", "sbatch"})
COMMENTS_ONLY = "`| comment` and `| sbatch` do not quote for bash; use them in comments only"
# Filters whose output is safe however often bash evaluates it.
_SAFE = {"number": "0", "name": "__name__"}
_NAME_TESTS = frozenset({"-v", "-R"})
_EVALUATING_TESTS = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"}) | _NAME_TESTS
# Markers within a word: closed quotes, a `$` that expands nothing yet, and an expansion without a value.
_QUOTES, _DOLLAR, _OPAQUE = "\x01", "\x06", "?"
MARKERS = re.compile(r"[\x01-\x06]")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*]")
_REDIRECTION = re.compile(r"&>>?|<<<|[<>]&|>>|>\||<>|[<>]")
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*((?:[^\s;&|<>()\\'\"]|\\.|'[^'\n]*'|\"[^\"\n]*\")+)")
_FUNCTION = re.compile(r"\([ \t]*\)")
# A character by its number, in $'...'.
_CODE = re.compile(r"\\(?:([0-7]{1,3})|(?:x|u|U)([0-9A-Fa-f]{1,4}))")
# `${n//[!0-9]/}` holds digits only.
_DIGITS_ONLY = re.compile(r"//\[[!^](0-9|\[:digit:\])\]/?")


@dataclass
class _HereDocument:
    ends: str
    expands: bool
    text: str = ""
    shell: str = ""
    "The shell that reads it."


@dataclass
class _Frame:
    """A pair of quotes or brackets, and the state of the check inside it."""

    kind: _Kind
    command: Command = field(default_factory=Command)
    word: str = ""
    depth: int = 0
    "Parentheses open inside arithmetic."
    opened: str = ""
    "The characters that opened it."
    here: _HereDocument | None = None
    cases: int = 0
    "Number of open `case` statements, whose patterns end in a parenthesis."
    array: str = ""
    "Variable to which the parentheses assign a list."
    redirection: str = ""
    "Operator of a redirection whose word comes next."
    printed: set[str] = field(default_factory=set)
    "Cells of what its commands print."
    pipeline: set[str] = field(default_factory=set)
    "Cells of what the current pipeline prints so far."

    @property
    def words(self) -> list[str]:
        return self.command.words


@dataclass
class Script:
    """The part of bash's grammar that decides how bash reads a word appended to the text so far."""

    flow: Flow = field(default_factory=Flow)
    stack: list[_Frame] = field(default_factory=lambda: [_Frame("plain")])
    escaped: bool = False
    "Whether the text ends in a backslash."
    here: list[_HereDocument] = field(default_factory=list)
    "Here-documents that begin on the next line."
    defined: str = ""
    "Function whose body comes next."
    groups: list[tuple[int, str]] = field(default_factory=list)
    "Open braces and bodies of functions: number of frames around, name of the function or empty."
    shifted: set[str] = field(default_factory=set)
    "Functions that may have shifted their arguments by now."

    @property
    def top(self) -> _Frame:
        return self.stack[-1]

    @property
    def function(self) -> str:
        return next((name for _, name in reversed(self.groups) if name), "")

    def open(self) -> list[object]:
        """What is still open at the end of the text: quotes, parentheses, braces, here-documents."""
        return [frame.kind for frame in self.stack] + list[object](self.groups) + list[object](self.here)

    @property
    def in_command(self) -> bool:
        """Whether the text ends within a command."""
        top = self.top
        return bool(
            top.kind != "plain"
            or self.escaped
            or self.here
            or top.words
            or top.word
            or top.array
            or top.redirection
        )

    def read(self, text: str) -> None:
        position = 0
        while position < len(text):
            if self.escaped:
                self.escaped = False
                if text[position] != "\n":  # not a line continuation
                    owner = self.stack[-2] if self.top.kind == "double" else self.top
                    owner.word += _DOLLAR if text[position] == "$" else text[position]
                step = 1
            else:
                step = self._step(text, position)
            self.flow.line += text.count("\n", position, position + step)
            position += step

    def repeats(self) -> None:
        """The text that follows may be repeated."""
        self.shifted.add(self.function)

    def _push(self, kind: _Kind, opened: str = "") -> None:
        self.stack.append(_Frame(kind, opened=opened))

    def _open_quotes(self, kind: _Kind) -> None:
        """Open quotes. The `$` of $'...' and $"..." is not part of the word."""
        if kind in ("ansi", "double") and self.top.word.endswith("$"):
            self.top.word = self.top.word.removesuffix("$") + _QUOTES
        self._push(kind)

    def _pop(self) -> None:
        if len(self.stack) > 1:
            self.stack.pop()
        while self.groups and self.groups[-1][0] > len(self.stack):
            self.groups.pop()

    def _close(self, stands_for: str = _QUOTES) -> None:
        """Close quotes or an expansion, which become part of a word."""
        self._pop()
        owner = self.stack[-2] if self.top.kind == "double" else self.top
        owner.word += stands_for

    def _marks(self, cells: set[str], *, outside: int) -> str:
        """Marks of cells in the word of the frame with this index, quoted if it is in double quotes."""
        quoted = self.stack[outside].kind == "double"
        marks = "".join(flow.mark(cell, quoted=quoted) for cell in sorted(cells))
        return marks + "bash" if "BASH" in cells else marks

    def _parameter(self, name: str) -> str:
        """The cell of `$name`."""
        if name[0].isalpha() or name[0] == "_":
            return name
        return self.flow.argument(self.function, name, shifted=self.function in self.shifted)

    def _close_brace(self) -> None:
        inside = self.top.word
        parameter = re.match(r"([!#]?)([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*]|(?<=!)#$)", inside)
        if parameter is None:  # ${#}, ${?} and the like
            self._close(_OPAQUE)
            return
        sign, name = parameter.groups()
        rest = inside[parameter.end() :]
        cell = self._parameter(name)
        if sign == "!" and name != "#" and not re.search(r"[*@]\]?$", inside):
            self.flow.evaluates({cell}, "${!...}")
        if rest.startswith("["):
            self.flow.evaluates(flow.read_in_arithmetic(rest[1 : rest.rfind("]")]), "a subscript")
        offset = re.match(r"(?:\[.*\])?:(?![-=?+])(.*)", rest, re.DOTALL)
        if offset is not None:
            self.flow.evaluates(flow.read_in_arithmetic(offset[1]), "${name:offset}")
        if rest.endswith("@P"):
            self.flow.evaluates({cell}, "${name@P}", program=True)
        if re.match(r":?=", rest):
            self.flow.gets(name, flow.held(rest))
        cells = {cell} | flow.held(rest)
        if sign == "#" or _DIGITS_ONLY.fullmatch(rest):
            cells = set()
        several = "*" if name in "@*" or re.search(r"\[[@*]\]", rest) else ""
        self._close((self._marks(cells, outside=-2) or _OPAQUE) + several)

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
                self.stack[-2].word += _DOLLAR if char == "$" else char
        elif kind == "heredoc":
            self._here_document(char)
        elif kind == "ansi" and (code := _CODE.match(text, at)):
            self.stack[-2].word += MARKERS.sub(_OPAQUE, chr(int(code[1] or code[2], 8 if code[1] else 16)))
            return len(code[0])
        elif char == "\\":
            self.escaped = True
        elif kind == "ansi":
            if char == "'":
                self._close()
            else:
                self.stack[-2].word += char
        else:
            return self._active(text, at)
        return 1

    def _here_document(self, char: str) -> None:
        top, here = self.top, self.top.here
        assert here is not None
        if char != "\n":
            top.word += char
        elif top.word.strip("\t") != here.ends:
            here.text += top.word + "\n"
            top.word = ""
        else:
            self._pop()
            if here.expands:
                cells = flow.cells(self._part('"' + here.text.replace('"', "") + '"').top.word)
                self.flow.gets(flow.INPUT, cells)
                if here.shell:
                    self.flow.evaluates(cells, f"a here-document of `{here.shell}`", program=True)
            self._begin_here_document()

    def _part(self, text: str, function: str = "") -> Script:
        """Read text that bash evaluates apart from the script around it, or in a function of its own."""
        line = self.flow.line
        shifted = self.shifted | {function} if function else self.shifted
        script = Script(self.flow, groups=[(1, function or self.function)], shifted=shifted)
        script.read(text)
        self.flow.line = line
        return script

    def _begin_here_document(self) -> None:
        if self.here:
            self.stack.append(_Frame("heredoc", here=self.here.pop(0)))

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
                self._push(kind, start)
                return len(start)
        parameter = _PARAMETER.match(text, at + 1) if char == "$" else None
        if parameter is not None:
            owner = self.stack[-2] if top.kind == "double" else top
            several = "*" if parameter[0] in "@*" else ""
            owner.word += self._marks({self._parameter(parameter[0])}, outside=-1) + several
            return 1 + len(parameter[0])
        closing = {'"': "double", "`": "backtick"}.get(char)
        if closing is not None:
            if top.kind == closing:
                if closing == "backtick":
                    self._close_commands()
                else:
                    self._close()
            else:
                self._open_quotes("double" if char == '"' else "backtick")
        elif top.kind == "double":
            self.stack[-2].word += _OPAQUE if char == "$" else char
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
        ends = "]" if top.opened == "$[" else ""
        top.word += char
        if char in "([":
            top.depth += 1
        elif char in ")]":
            if top.depth:
                top.depth -= 1
            elif ends == char or text.startswith("))", at):
                self.flow.evaluates(flow.read_in_arithmetic(top.word), "arithmetic")
                self._close("" if top.opened == "((" else _OPAQUE)
                return 1 if ends else 2
            else:
                raise RefusedError("`((` begins arithmetic: write `( (` for a subshell in a subshell")
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
        operands = " ".join(top.words)
        if not _EVALUATING_TESTS.isdisjoint(top.words):
            # `-v name` evaluates only the subscript of a literal name, but all of an expanded one.
            named = not _NAME_TESTS.isdisjoint(top.words) and "[" not in "".join(top.words[1:])
            read = flow.cells(operands) if named else flow.read_in_arithmetic(operands)
            self.flow.evaluates(read, _TEST)
        if "=~" in top.words:
            self.flow.gets("BASH_REMATCH", flow.held(operands))
        top.words.clear()
        if word != "]]":
            return 1
        self._close()
        return self._plain(text, at)

    def _plain(self, text: str, at: int) -> int:
        char, top = text[at], self.top
        if self.defined and char not in " \t\n#{(":
            raise RefusedError(f"put the body of the function {self.defined} in braces")
        redirection = _REDIRECTION.match(text, at)
        if char == "#" and not top.word:
            self._push("comment")
        elif text.startswith("((", at) and not top.word:
            self._push("arithmetic", "((")
            return 2
        elif text.startswith(("<(", ">("), at):
            top.word += text[at : at + 2]
            self._push("plain", text[at : at + 2])
            return 2
        elif top.array and char in "(;&|<>":
            raise RefusedError(f"`{char}` in a list of words: put it in quotes")
        elif char == "(":
            return self._parenthesis(text, at)
        elif char == ")":
            if len(self.stack) > 1 and top.kind == "plain" and not top.cases:
                self._close_commands()
            else:
                self._end_of_command()
        elif redirection is not None:
            if text.startswith("<<", at) and redirection[0] != "<<<":
                return self._announce_here_document(text, at)
            fd = top.word
            if fd.isdigit():
                top.word = ""
            self._end_of_word()
            top.redirection = fd * fd.isdigit() + redirection[0]
            top.command.errors_are_output |= char == "&" or (fd == "2" and redirection[0] == ">&")
            if redirection[0] in ("<", "<<<", "<>") and fd in ("", "0"):
                top.command.input_is_given = True
            elif char != "<" and fd in ("", "1"):
                top.command.output_is_given = True
            return len(redirection[0])
        elif char in " \t":
            self._end_of_word()
        elif char in "\n;&|":
            self._end_of_command(char if text[at : at + 2] not in ("||", "&&") else "")
        else:
            top.word += char
        return 1

    def _parenthesis(self, text: str, at: int) -> int:
        top = self.top
        word = top.word.replace(_QUOTES, "")
        function = _FUNCTION.match(text, at)
        assigned = ASSIGNMENT.fullmatch(word)
        if function is not None and word and assigned is None and not flow.cells(word):
            self.defined, top.word = word, ""
            top.words.clear()
            return len(function[0])
        self._push("plain", "@(" if word and not assigned else "(")
        self.top.array = assigned[1] if assigned else ""
        if assigned:
            self.flow.arrays.add(assigned[1])
        if self.defined:
            self._open_group(self.defined)
        return 1

    def _close_commands(self) -> None:
        """Close parentheses or backticks around commands or a list."""
        top = self.top
        self._end_of_command()
        if top.array:
            marks = {cell for word in top.words for cell in flow.held(word)}
            self._close(flow.LIST + "".join(flow.mark(cell, quoted=True) for cell in sorted(marks)))
            return
        if top.opened == "(":
            self._close("")
            self._prints(top.printed)
            return
        self._close((self._marks(top.printed, outside=-2) or _OPAQUE) if top.opened != ">(" else _OPAQUE)

    def _prints(self, cells: set[str]) -> None:
        self.top.pipeline |= cells
        depth, function = next((group for group in reversed(self.groups) if group[1]), (0, ""))
        if function and all(frame.opened == "(" for frame in self.stack[depth:]):  # not captured inside it
            self.flow.gets(flow.output_of(function), cells)

    def _announce_here_document(self, text: str, at: int) -> int:
        match = _HERE_DOCUMENT.match(text, at)
        if match is None:
            raise RefusedError("a here-document whose end is not a plain word")
        self._end_of_word()
        ends = re.sub(r"[\\'\"]", "", match[1])
        self.here.append(_HereDocument(ends, expands=ends == match[1]))
        self.top.command.input_is_given = False  # its cells are those of piped text
        return match.end() - at

    def _end_of_word(self) -> None:
        top = self.top
        if not top.word:
            return
        word, top.word = top.word.replace(_QUOTES, ""), ""
        redirection, top.redirection = top.redirection, ""
        if redirection.endswith("<<<") or word.startswith("<("):
            top.command.input |= flow.cells(word)
        elif word.startswith(">("):
            top.command.feeds, top.command.output_is_given = True, False
        if redirection:
            if redirection == ">&":
                self.flow.evaluates(flow.cells(word), flow.DUPLICATED, program=True)
            self._subscripts([word])
            return
        assigned = ASSIGNMENT.match(word)
        if assigned is not None:
            self.flow.gets(assigned[1], flow.held(word[assigned.end() :]))
            if "[" in assigned[0]:
                self.flow.arrays.add(assigned[1])
        begins = top.command.before_program
        top.words.append(word)
        if word == "[[":
            self._push("test")
        elif word == "in" and top.words[-3:-2] == ["case"] and STARTS.issuperset(top.words[:-3]):
            top.cases += 1
            top.words.clear()
        elif word == "esac":
            top.cases = max(0, top.cases - 1)
        elif (begins and word in LOOPS) or word == "shift":
            self.repeats()
        elif word == "{" and top.words[-3:-2] == ["function"]:
            self._open_group(top.words[-2])
        elif word == "{" and begins:
            self._open_group(self.defined)
        elif (
            word == "}"
            and top.command.may_close_group
            and self.groups
            and self.groups[-1][0] == len(self.stack)
        ):
            self.groups.pop()

    def _open_group(self, function: str) -> None:
        self.groups.append((len(self.stack), function))
        self.defined = ""
        if function:
            self.shifted.discard(function)

    def _subscripts(self, words: list[str]) -> None:
        pattern = rf"(?:^|[\s{{])\w{'*' if self.top.array else '+'}\[(\S*\]|[^\]]*)"
        for subscript in re.findall(pattern, " ".join(words)):
            self.flow.evaluates(flow.read_in_arithmetic(subscript), "a subscript")

    def _end_of_command(self, ends: str = "") -> None:
        """End a command, by one of the characters newline, `;`, `&` and `|`, or otherwise."""
        self._end_of_word()
        top = self.top
        if top.kind == "test":  # the condition continues on the next line
            return
        if top.array or top.command.names_variables:
            self._subscripts(top.words)
        if top.array:
            return
        command, top.command = top.command, Command()
        if top.opened == "@(":  # a pattern
            top.printed |= {cell for word in command.words for cell in flow.cells(word)}
            return
        self._prints(commands.run(command, self.flow, self.function))
        code = command.code()
        if code:
            function = commands.CODE if command.code_and_arguments() else ""
            printed = self._part(code.replace(_DOLLAR, "$") + "\n", function).top.printed
            self._prints(set() if command.output_is_given else printed)
        if command.counts:
            top.pipeline.clear()
        for here in self.here:
            here.shell = here.shell or command.shell()
        if ends == "|" or command.feeds:
            self.flow.gets(flow.INPUT, top.pipeline | (top.printed if command.ends_compound else set()))
        if ends != "|":
            top.printed |= top.pipeline
            top.pipeline = set()
        top.redirection = ""
        if ends == "\n":
            self._begin_here_document()

    def value(self, filters: str) -> None:
        """Put a value at the end of the text.

        `filters` names the last filter, if any. Raises RefusedError.
        """
        top, safe = self.top, _SAFE.get(filters)
        if top.kind == "comment":
            if filters not in COMMENT_FILTERS and safe is None:
                raise RefusedError(
                    "a value in a comment needs `| comment`: a line break in it would end the comment"
                )
            directive = top.word.startswith("SBATCH") or "SBATCH".startswith(top.word)
            if directive and filters != "sbatch" and safe is None:
                raise RefusedError("a value in an #SBATCH line needs `| sbatch`: sbatch splits it at blanks")
            top.word += safe or "'"
            return
        if filters in COMMENT_FILTERS:
            raise RefusedError(COMMENTS_ONLY)
        if safe is not None and top.kind not in ("heredoc", "ansi", "backtick"):
            (self.stack[-2] if top.kind == "single" else top).word += safe
            return
        quoted = "double" if "double" in self._around() else top.kind
        if quoted in _QUOTED:
            raise RefusedError(f"a value inside {_QUOTED[quoted]}: write it bare, it is quoted already")
        if self.escaped:
            raise RefusedError("a value after a backslash, which removes its first quote")
        if top.word.endswith("$"):
            raise RefusedError(
                "a value after `$`: bash reads $'...' differently; `| name` writes a variable's name"
            )
        if top.kind in _EVALUATED:
            raise RefusedError(
                f"a value inside {_EVALUATED[top.kind]}, which bash evaluates; {BARE} can stand there"
            )
        top.word += flow.mark(flow.value_of(self.flow.line), quoted=True)

    def _around(self) -> list[str]:
        """The kinds of the frames of the current word. `$( )` begins a new one."""
        around: list[str] = []
        for frame in reversed(self.stack):
            if frame.kind == "plain":
                break
            around.append(frame.kind)
        return around

    def end(self) -> None:
        """Raise RefusedError if the template ends inside quotes, or bash evaluates a value of the job."""
        line = self.flow.line
        self.read("\n")
        if len(self.stack) > 1:
            raise RefusedError(f"the template ends inside {_QUOTED.get(self.top.kind, 'parentheses')}", line)
        self.flow.check()
