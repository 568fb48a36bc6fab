"""A user's own patterns for failures: a regular expression and a failure class."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from launcher.spec.failures import FAILURES, FailureClass
from launcher.spec.value import Value

_NESTED = re.compile(r"\((?:[^()\\]|\\.)*(?<!\\)[*+](?:[^()\\]|\\.)*\)(?:[*+]|\{\d*,\d*\})")
"A repeated group that contains a repetition."


def _expression(text: str) -> str:
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    if compiled.search(""):
        raise ValueError("matches an empty line, and so every line")
    if _NESTED.search(text):
        raise ValueError("repeats a repetition, as in (a+)+: some lines would take forever")
    if _slow(text):
        raise ValueError("takes too long on some lines: repeat less, or name what stands between repetitions")
    return text


def _slow(text: str) -> bool:
    """Return whether a line of one repeated character takes long to search. Usually it takes microseconds.

    This does not find every slow expression. The worker also ends a search that takes too long.
    """
    import regex  # re cannot be interrupted

    try:
        compiled = regex.compile(text)
        for character in sorted({*text, *"a 0,"}):
            compiled.search(character * 2000 + "\x01", timeout=0.5)
    except TimeoutError:
        return True
    except regex.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return False


class FailurePattern(Value):
    """A line of output that shows why a run of this job, or on this cluster, failed."""

    pattern: Annotated[str, AfterValidator(_expression)]
    "Python regular expression, searched in each line of every rank before launcher's own patterns."
    class_: FailureClass = Field(alias="class")
    "Class of the failure, which decides what happens next."

    @field_validator("class_", mode="before")
    @classmethod
    def _a_failure(cls, name: Any) -> Any:
        if name in ("succeeded", "unknown"):
            names = ", ".join(known for known in FAILURES if known not in ("succeeded", "unknown"))
            raise ValueError(f"{name} is not a failure class: choose one of {names}")
        return name
