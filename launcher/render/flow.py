"""Follow the values of a job through a bash script, to the places where bash evaluates text.

A *cell* holds text: a variable, the arguments or the output of a function, piped text, or a value of the job.
`Flow` knows which cells get text from which, and which cells bash evaluates. A word of the script is a string
in which a mark stands for the text of a cell.

Text that is only *made from* a cell is the output of a program that gets it as an argument. `eval` and the
like may not evaluate such text. Arithmetic may, since counts and sizes are of this kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

INPUT = "<"
"Cell of what is piped into commands."
LIST = "\x05"
"In a word, before the marks of a list in parentheses."
_VALUE, _MADE, _OUTPUT, _NAMED = "=", "~", ")", "#"
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[.*?\])?\+?=", re.DOTALL)
# A mark begins with one of these: without quotes, bash splits the text into words.
_WHOLE, _SPLIT, _END = "\x02", "\x04", "\x03"
_MARK = re.compile(r"[\x02\x04]([^\x03]*)\x03")
# Variables that bash evaluates by itself (tried with bash 5.2).
_SPECIAL: tuple[str, ...] = ("PS4", "PS0", "PS1", "PS2", "PROMPT_COMMAND", "BASH_ENV", "ENV")
_SPECIAL += ("BASH_ALIASES", "RANDOM", "SRANDOM", "OPTIND", "HISTCMD")
BARE = "`| number` or `| name`"
DUPLICATED = "`>&`"
_REMEDIES = {
    "a command without quotes": "put the command in quotes",
    # The word of `>&` without a number before it is expanded twice (bash 5.2).
    DUPLICATED: "write `&>` instead",
}


def mark(cell: str, *, quoted: bool) -> str:
    return f"{_WHOLE if quoted else _SPLIT}{cell}{_END}"


def value_of(line: int) -> str:
    """The cell of a value of the job that stands in this line of the template."""
    return f"{_VALUE}{line}"


def output_of(function: str) -> str:
    return f"{_OUTPUT}{function}"


def made(cells: Iterable[str]) -> set[str]:
    """Cells of text that is made from these cells."""
    return {_MADE + cell.removeprefix(_MADE) for cell in cells}


def cells(text: str) -> set[str]:
    """The cells whose text is part of a word."""
    return set(_MARK.findall(text))


def split_cells(text: str) -> set[str]:
    """Those whose text bash splits into words."""
    return {match[1] for match in _MARK.finditer(text) if match[0][0] == _SPLIT}


def literal(text: str) -> str:
    return _MARK.sub(" ", text)


def without_expansions(text: str) -> str:
    return re.sub(r"[?*]", "", _MARK.sub("", text))


def held(text: str) -> set[str]:
    """The cells that get into what holds this word, and the variables it names: arithmetic reads them too."""
    return cells(text) | {_NAMED + name for name in IDENTIFIER.findall(literal(text))}


def read_in_arithmetic(text: str) -> set[str]:
    return cells(text) | set(IDENTIFIER.findall(literal(text)))


def several_words(word: str) -> bool:
    """Whether bash may make more or fewer than one word of this one."""
    listed = any(cell.startswith(_VALUE) for cell in cells(word))
    return listed or _SPLIT in word or re.search(r"[*?\[{]", word) is not None


class RefusedError(Exception):
    def __init__(self, problem: str, line: int | None = None) -> None:
        self.problem, self.line = problem, line


@dataclass(frozen=True)
class _Evaluated:
    cell: str
    construct: str
    line: int
    program: bool
    "Whether bash takes the text for commands, so that text that is made from a value counts."
    array: str = ""
    "If not empty, bash evaluates it only if this variable is an array."


@dataclass
class Flow:
    """The cells of a script."""

    line: int = 1
    sources: dict[str, set[str]] = field(default_factory=dict)
    "Cell -> cells whose text it may hold."
    evaluated: list[_Evaluated] = field(
        default_factory=lambda: [_Evaluated(name, "bash itself", 0, program=True) for name in _SPECIAL]
    )
    arrays: set[str] = field(default_factory=set)

    def gets(self, cell: str, held_cells: Iterable[str]) -> None:
        self.sources.setdefault(cell, set()).update(held_cells)

    def evaluates(
        self, evaluated: Iterable[str], construct: str, *, program: bool = False, array: str = ""
    ) -> None:
        self.evaluated += [
            _Evaluated(cell, construct, self.line, program, array) for cell in sorted(evaluated)
        ]

    def passes(self, function: str, arguments: list[str]) -> None:
        """Give arguments to a function. Their numbers are known as far as bash splits none of them."""
        first = 0  # of those whose number is not known
        for number, word in enumerate(arguments, 1):
            if several_words(word):
                first = first or number
            self.gets(f"{first}+@{function}" if first else f"{number}@{function}", held(word))
            self.gets(f"@{function}", held(word))

    def passes_to_any(self, caller: str, words: Iterable[str]) -> None:
        """Give words to the function that an expanded command name in `caller` may stand for."""
        self.gets(f"+@{caller}", {cell for word in words for cell in held(word)})

    def argument(self, function: str, which: str, *, shifted: bool) -> str:
        """The cell of `$1`, `$@` ... in a function, or in the script if its name is empty."""
        if shifted or not which.isdigit():
            return f"@{function}"
        self.gets(f"{which}@{function}", {f"{number}+@{function}" for number in range(1, int(which) + 1)})
        return f"{which}@{function}"

    def check(self) -> None:
        """Raise RefusedError if bash evaluates a value of the job."""
        calls = {cell for cell in self.sources if cell.startswith("+@")}
        for function in {cell.partition("@")[2] for cell in self.sources if "@" in cell} - {""}:
            for cell in (f"@{function}", f"1+@{function}"):
                self.gets(cell, calls - {f"+@{function}"})
        for at in self.evaluated:
            if not at.array or at.array in self.arrays:
                for way in self._ways_to_values(at):
                    raise _refused(at, way)

    def _ways_to_values(self, at: _Evaluated) -> Iterator[list[str]]:
        """The cells from an evaluated one to a value, both included."""
        seen, ways = set[str](), [[at.cell]]
        while ways:
            way = ways.pop()
            cell = way.pop()
            if cell.startswith(_NAMED if at.program else _MADE):
                continue
            way.append(cell.lstrip(_NAMED + _MADE))
            if way[-1].startswith(_VALUE):
                yield way
            elif way[-1] not in seen:
                seen.add(way[-1])
                ways += [[*way, source] for source in sorted(self.sources.get(way[-1], ()))]


def _refused(at: _Evaluated, way: list[str]) -> RefusedError:
    line = int(way.pop().removeprefix(_VALUE))
    if not way:
        where = "of" if at.construct.startswith("`") else "inside"
        remedy = _REMEDIES.get(at.construct, f"{BARE} can stand there")
        return RefusedError(f"a value {where} {at.construct}, which bash evaluates again; {remedy}", line)
    way = [cell for cell in way if "+@" not in cell] or way
    place = f" (line {at.line})" if at.line else ""
    via = f", whose text comes from {_shown(way[-1])}" if len(way) > 1 else ""
    remedy = _REMEDIES.get(at.construct, f"write the value with {BARE}")
    return RefusedError(
        f"{at.construct} evaluates {_shown(way[0])}{place}{via}, which gets a value here: {remedy}", line
    )


def _shown(cell: str) -> str:
    number, at, function = cell.partition("@")
    if at:
        which = f"${number}" if number.isdigit() else "an argument"
        return f"{which} of {function or 'the script'}"
    if cell.startswith(_OUTPUT):
        return f"the output of {cell.removeprefix(_OUTPUT)}"
    return {INPUT: "piped text", "_": "$_"}.get(cell, cell)
