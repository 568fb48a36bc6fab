"""What bash's commands evaluate, assign and print."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from launcher.render import flow
from launcher.render.flow import ASSIGNMENT, IDENTIFIER, Flow, RefusedError

# A command begins after these words.
STARTS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "{", "!", "time"})
_ENDS = frozenset({"}", "fi", "done", "esac"})
LOOPS = frozenset({"for", "select", "while", "until"})
# Commands whose first argument is a command.
_RUNNERS = frozenset({"exec", "command", "builtin", "env", "nohup"})
# Commands that treat a word as a name, an expression or a program, and evaluate it again.
_EVALUATE = frozenset({"eval", "let", "unset", "read", "mapfile", "readarray", "getopts", "trap", "alias"})
_EVALUATE |= {"coproc", "wait", "compgen", "complete"}
_DECLARE = frozenset({"declare", "typeset", "local", "readonly", "export"})
_READ = frozenset({"read", "mapfile", "readarray"})
_NAME_VARIABLES = _EVALUATE | _DECLARE | {"test", "["}
_SHELLS = frozenset({"bash", "sh", "dash", "ash", "ksh", "mksh", "zsh", "su"})
_SOURCE = frozenset({"source", "."})
CODE = "`-c`"
"Function that stands for the code that a shell gets with `-c`."
# Commands that print their arguments. What another program prints is only made from them.
_PRINT = frozenset(
    {"echo", "printf", "basename", "dirname", "realpath", "readlink", "expr", "seq", "ls", "find"}
)
# Programs that print nothing of their standard input but numbers.
_COUNT = frozenset({"wc"})


@dataclass
class Command:
    """A simple command."""

    words: list[str] = field(default_factory=list)
    "Words without quotes; a mark of `flow` stands for an expansion."
    input: set[str] = field(default_factory=set)
    "Cells of here-strings and process substitutions."
    input_is_given: bool = False
    "Whether its standard input is redirected."
    output_is_given: bool = False
    "Whether its standard output is redirected to a file."
    errors_are_output: bool = False
    "Whether its messages go to its standard output. They contain the program's name."
    feeds: bool = False
    "Whether it writes to a process substitution."

    @property
    def spelled(self) -> list[str]:
        """The words as they are if every expansion is empty."""
        return [flow.without_expansions(word) for word in self.words]

    @property
    def before_program(self) -> bool:
        """Whether no word so far is the name of a program or function."""
        return all(_before_program(word) for word in self.words)

    def program_and_arguments(self) -> tuple[str, list[str]]:
        """Return the name of the program or function, or "", and its arguments."""
        at = next((at for at, word in enumerate(self.words) if not _before_program(word)), len(self.words))
        return "".join(self.words[at : at + 1]), self.words[at + 1 :]

    @property
    def counts(self) -> bool:
        """Whether it prints nothing of its standard input but numbers."""
        return self.program_and_arguments()[0] in _COUNT

    @property
    def ends_compound(self) -> bool:
        """Whether it ends a compound command."""
        return not self.words or self.words[0] in _ENDS

    @property
    def names_variables(self) -> bool:
        """Whether a word of it may be an element of an array, whose subscript bash evaluates."""
        names = _NAME_VARIABLES | ({"-v"} if "printf" in self.words else set())
        if not names.isdisjoint(self.spelled):
            return True
        arguments = len(self.program_and_arguments()[1])
        assigned = self.words[: len(self.words) - arguments]
        return any(re.match(r"\w+\[", word) for word in assigned) or any(
            word.startswith("{") for word in self.words
        )

    @property
    def may_close_group(self) -> bool:
        return (STARTS | _ENDS).issuperset(self.words)

    def code(self) -> str:
        """The text among its words that bash takes for commands, or ""."""
        words = [flow.literal(word) for word in self.words]
        if "eval" in words:
            return " ".join(words[words.index("eval") + 1 :])
        if code_and_arguments := self.code_and_arguments():
            return flow.literal(code_and_arguments[0])
        if "trap" in words or self.shell():
            return "\n".join(word for word in words if " " in word or "(" in word)
        return ""

    def shell(self) -> str:
        """The shell among its words, or ""."""
        return next(filter(_is_shell, self.spelled), "")

    def code_and_arguments(self) -> list[str]:
        """The words after the `-c` of a shell, if it is known which of them is its code: the first one."""
        given = self.words[self.spelled.index(self.shell()) + 1 :] if self.shell() else []
        at = next((at for at, word in enumerate(given) if re.fullmatch("-[a-np-z]*c[a-np-z]*", word)), None)
        if at is None or "eval" in self.words:
            return []
        code, *arguments = given[at + 1 :] or [""]
        known = code[:1] not in ("", "-", "+") and not flow.cells(code)
        return [code, *arguments] if known and not any(map(_is_shell, arguments)) else []


def _is_shell(word: str) -> bool:
    return flow.without_expansions(word).rsplit("/", 1)[-1] in _SHELLS


def _before_program(word: str) -> bool:
    return word in STARTS or word in _RUNNERS or ASSIGNMENT.match(word) is not None


def run(command: Command, cells: Flow, function: str) -> set[str]:
    """Record what a command of a function evaluates and assigns, and return the cells of what it prints.

    `function` is empty outside functions. Raises RefusedError.
    """
    words = command.words
    program, arguments = command.program_and_arguments()
    cells.evaluates(flow.split_cells(program), "a command without quotes", program=True)
    if words:
        cells.gets("_", flow.held(words[-1]))
    if program in ("for", "select"):
        listed = {cell for word in arguments[2:] for cell in flow.held(word)}
        if arguments[1:2] != ["in"]:
            listed = {cells.argument(function, "@", shifted=True)}
        cells.gets(arguments[0] if arguments else "", listed)
        return set()
    _evaluating(command, cells)
    _declaring(command, cells)
    _storing(command, cells, function)
    if program == "set":
        cells.passes(function, ["*", *arguments])
    elif flow.cells(program):
        cells.passes_to_any(function, (program, *arguments))
    else:
        cells.passes(program, arguments)
    if command.output_is_given:
        return set()
    printed = set[str]().union(*map(flow.held, arguments))
    if _PRINT.isdisjoint(word.rsplit("/", 1)[-1] for word in words):
        printed = flow.made(printed) | {flow.output_of(program)} | command.input
    if command.errors_are_output:
        printed |= flow.made(flow.cells(program))
    if program == "cat" and not arguments and not command.input_is_given:
        printed.add(flow.INPUT)
    return printed


def _evaluating(command: Command, cells: Flow) -> None:
    """Record the words that a command takes for names, expressions or programs."""
    words, present = command.words, set(command.spelled)
    all_cells = set[str]().union(*map(flow.cells, words))
    for name in sorted(present & _EVALUATE):
        read = set[str]().union(*map(flow.read_in_arithmetic, words)) if name == "let" else all_cells
        cells.evaluates(read, f"`{name}`", program=True)
    if present & {"printf", "test", "["}:
        for at, option in enumerate(command.spelled):
            if option == "-v" or (option.startswith("-v") and "printf" in present):
                named = set[str]().union(*map(flow.cells, words[at : at + 2]))
                cells.evaluates(named, "`-v`", program=True)
    if "env" in present and any(re.match("-[A-Za-z]*S|--split-string", word) for word in command.spelled):
        cells.evaluates(all_cells, "`env -S`", program=True)
    shell = command.shell()
    if shell:
        given = words[command.spelled.index(shell) + 1 :]
        options = [word for word in given if re.fullmatch(r"-[a-z]+", word)]
        if any("c" in option for option in options):
            code, *arguments = command.code_and_arguments() or [" ".join(given)]
            cells.evaluates(flow.cells(code), CODE, program=True)
            cells.gets(f"@{CODE}", {cell for word in arguments for cell in flow.held(word)})
        cells.evaluates(command.input, f"`{shell}`", program=True)
        script = [word for word in given if not word.startswith("-")]
        if not script or "-s" in options or "xargs" in present:
            cells.evaluates({flow.INPUT}, f"`{shell}`", program=True)
    elif present & _SOURCE:
        cells.evaluates(command.input, "`source`", program=True)
        if any(re.match(r"/dev/(stdin|fd/)|/proc/self/fd/", word) for word in words):
            cells.evaluates({flow.INPUT}, "`source`", program=True)


def _declaring(command: Command, cells: Flow) -> None:
    name = next((word for word in command.spelled if word in _DECLARE), None)
    if name is None:
        return
    given = command.words[command.spelled.index(name) + 1 :]
    options = "".join(word for word in given if re.fullmatch(r"[-+][A-Za-z]+", word))
    for word in given:
        if name != "export" and re.match(r"-[A-Za-z]*[in]", word):
            raise RefusedError(
                f"`{word}` makes bash evaluate every later value of that variable: leave it out"
            )
    for word in given:
        assigned = ASSIGNMENT.match(word)
        if assigned is None:
            cells.evaluates(flow.cells(word), f"`{name}`", program=True)
        elif not word.startswith(flow.LIST, assigned.end()):  # bash reads '([subscript]=...)' as a list
            cells.evaluates(flow.cells(word), f"`{name}`", array=assigned[1])
        variable = assigned[1] if assigned else word
        if "a" in options.lower():
            cells.arrays.add(variable)


def _storing(command: Command, cells: Flow, function: str) -> None:
    """Record the variables that a command fills."""
    words, present = command.words, set(command.spelled)
    if present & _READ:
        variables = {*filter(IDENTIFIER.fullmatch, words), "REPLY", "MAPFILE"} - _READ
        for variable in variables:
            cells.gets(variable, command.input if command.input_is_given else {flow.INPUT})
        if "read" not in present or any(re.match(r"-[a-z]*a", word) for word in words):
            cells.arrays |= variables
    else:
        cells.gets(flow.INPUT, command.input)
    if "getopts" in present:
        cells.gets("OPTARG", {cells.argument(function, "@", shifted=True)})
    if "printf" in present and "-v" in words:
        target, *rest = words[words.index("-v") + 1 :] or [""]
        name = IDENTIFIER.match(target)
        cells.gets(name[0] if name else "", set[str]().union(*map(flow.held, rest)))
