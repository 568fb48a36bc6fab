"""Errors that a user can correct: what is wrong, where, and what to do. All problems are reported at once."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.spec.one_line import plain

LONGEST_WORD = 256
"Longest word that a message shows in full, in characters. Paths can be this long."
LONGEST = 1200
SHOWN = 60
"Number of characters shown of a longer word."


def shortened(message: str) -> str:
    """Return the message with long words, which are values of the user, and long text shortened."""
    pattern = rf"\S{{{LONGEST_WORD + 1},}}"
    text = re.sub(pattern, lambda word: f"{word[0][:SHOWN]}... ({len(word[0])} characters)", message)
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 2]} ... ({len(message)} characters) ... {text[-LONGEST // 2 :]}"


def text_of(error: BaseException) -> str:
    """Return the message of an exception of any code. Its own `__str__` may raise."""
    try:
        return str(error)
    except Exception as other:
        return f"(its message is unknown: __str__ raised {type(other).__name__})"


def described(error: BaseException) -> str:
    """Return `Type: message`."""
    return f"{type(error).__name__}: {text_of(error)}"


def first_line(error: BaseException) -> str:
    """Return `Type: first line of the message`, or only `Type` if the message is empty, as after `assert`."""
    return f"{type(error).__name__}: {text_of(error).strip()}".splitlines()[0].removesuffix(": ")


class LauncherError(Exception):
    """An error that the user can correct. The text says what is wrong, where, and what to do."""


class UsageError(LauncherError):
    """The request is invalid. The text is one line, whatever it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))


class RefusedError(LauncherError):
    """The plan, the cluster or the run does not allow the request."""


@dataclass(frozen=True)
class Problem:
    where: str
    "`job.yaml:12`, or `--set batch.global=0`."
    field: str
    "Dotted path. Empty for the whole document."
    message: str

    def __str__(self) -> str:
        return shortened(
            ": ".join(part for part in (plain(self.where), plain(self.field), self.message) if part)
        )


class SpecError(LauncherError):
    """A file cannot be used. `problems` holds all of its errors, in the order of the file."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))
