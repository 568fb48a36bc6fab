"""What is wrong with a file, where, and what to do: every problem at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    where: str
    "`job.yaml:12`, or `--set batch.global=0`."
    field: str
    "Dotted path, empty for the whole document."
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.field, self.message) if part)


class SpecError(Exception):
    """A file cannot be used. `problems` holds all of its errors, in the order of the file."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))
