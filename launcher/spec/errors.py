"""What is wrong with a file, where, and what to do: every problem at once."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST_WORD = 256
"Characters without a space in a message: a path may have as many."
LONGEST = 1200
SHOWN = 60
"Characters that are shown of a longer word."


def shortened(message: str) -> str:
    """A message in which a user's value, however long, is quoted in part."""
    pattern = rf"\S{{{LONGEST_WORD + 1},}}"
    text = re.sub(pattern, lambda found: f"{found[0][:SHOWN]}... ({len(found[0])} characters)", message)
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 2]} ... ({len(message)} characters) ... {text[-LONGEST // 2 :]}"


class LauncherError(Exception):
    """What a user can mend. Its text is one clear message: what is wrong, where, what to do."""


class UsageError(LauncherError):
    """What is asked for makes no sense."""


class RefusedError(LauncherError):
    """The plan, the cluster or the run does not allow what is asked for."""


@dataclass(frozen=True)
class Problem:
    where: str
    "`job.yaml:12`, or `--set batch.global=0`."
    field: str
    "Dotted path, empty for the whole document."
    message: str

    def __str__(self) -> str:
        return shortened(": ".join(part for part in (self.where, self.field, self.message) if part))


class SpecError(LauncherError):
    """A file cannot be used. `problems` holds all of its errors, in the order of the file."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))
