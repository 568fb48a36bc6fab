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
