"""Where in the run this rank is: read when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from launcher.spec.verdict import Phase
from launcher.train.live import Moment


@dataclass
class Where:
    phase: Phase = "init"
    step: int | None = None
    "The optimizer step in progress, counted from 1."
    micro_batch: int | None = None
    "In force, once it is no longer the one of the recipe that the attempt began with."
    users: bool = False
    "The code that runs is the user's: their task, model or data."
    failed: Moment | None = None
    "The last allocation that failed; the run may have gone on after it."
    why_not: str | None = None
    "Why a step that ran out of memory is not repeated in process."
    trying: bool = False
    "Nothing is lost when memory runs out: the probe has something smaller to try."
    traceback: tuple[str, ...] = ()
    "Lines of what ends the attempt, when it was caught at first, and the frames with it."

    @contextmanager
    def during(self, phase: Phase, *, users: bool = False) -> Iterator[None]:
        """Left by an exception, the phase stays: the reader wants to know where it was."""
        before = self.phase, self.users
        self.phase, self.users = phase, users
        yield
        self.phase, self.users = before
