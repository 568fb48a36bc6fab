"""The phase and step that this rank is in; reported when it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.spec.verdict import Phase
from launcher.train.largest_tensors import Moment


@dataclass
class Where:
    phase: Phase = "init"
    step: int | None = None
    "The optimizer step in progress, counted from 1."
    micro_batch: int | None = None
    "The micro-batch in use, once it differs from the one at the start of the attempt."
    users: bool = False
    "True while the user's code runs: their task, model or data."
    failed: Moment | None = None
    "The last allocation that failed; the run may have recovered from it."
    why_not: str | None = None
    "Why a step with an OOM is not repeated in process."
    trying: bool = False
    "True while an OOM is harmless, because the probe has a smaller recipe to try."
    traceback: tuple[str, ...] = ()
    "Lines of the traceback that ends the attempt, if the exception was caught first and lost its frames."

    collectives: Callable[[], dict[str, Any] | None] = lambda: None
    "Returns the collectives of FSDP's units that this rank has issued, for the error report."

    def during(self, phase: Phase, *, users: bool = False) -> During:
        """Set the phase during a block. After an exception the phase stays, for the error report."""
        return During(self, phase, users)


class During:
    """The context of `Where.during`. A class, because a step enters seven of them."""

    def __init__(self, where: Where, phase: Phase, users: bool) -> None:
        self._where, self._inside = where, (phase, users)

    def __enter__(self) -> None:
        self._before = self._where.phase, self._where.users
        self._where.phase, self._where.users = self._inside

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._where.phase, self._where.users = self._before
