"""Split a job's `command:` that is written as text, as a shell does for one command."""

from __future__ import annotations

import re
import shlex

_PROTECTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
"Quoted text, or a character after a backslash."
_CONTINUATION = "\\\n"
_NEXT_COMMAND = re.compile(r"\n[^\s-]")
"A line that is neither indented nor begins with an option."
_FOR_A_SHELL = re.compile(r"[|&]{1,2}|.*;|<{1,3}|[\d&]?>>?(?![=>]).*|.*(?:\$\(|`).*")
"An operator, a redirection or a command substitution. A `>=3` or `<tag>` is none."


def split(text: str) -> list[str]:
    """Return the arguments.

    Raises ValueError for several commands, and for what only a shell understands: the program would get it as
    an argument.
    """
    text = _PROTECTED.sub(lambda match: "" if match[0] == _CONTINUATION else match[0], text).strip()
    unquoted = _PROTECTED.sub("_", text)
    shell = 'launcher starts one command, without a shell: write [bash, -c, "..."]'
    if _NEXT_COMMAND.search(unquoted):
        raise ValueError(f"has several lines; {shell}, or end a line with \\ to continue it")
    if found := next(filter(_FOR_A_SHELL.fullmatch, unquoted.split()), None):
        raise ValueError(f"{found} has no effect: {shell}, or quote it if it is an argument")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot split into arguments ({error}); write a list instead") from None
