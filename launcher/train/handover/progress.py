"""The step that a rank's state belongs to: set by the loop, read by the thread that hands the state over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launcher.train.cpu_memory_budget import Budget
from launcher.train.undo.undo import Undo


class Progress:
    """The last complete optimizer step. Parameters, optimizer states and loss scale have their values from
    `step`.

    Other state changes during a step; `undo` holds it as of the end of `step`.
    """

    undo: Undo

    def __init__(self, device: torch.device, budget: Budget) -> None:
        self.budget = budget
        self.step = 0
        self.torn = False
        "An update, or the copies after it, did not end, so the state belongs to no step."
        self.unrecorded: dict[str, Any] | None = None
        "Result of `step`, until its evaluation is done and its metrics are written."
        self.unsaved: list[str] = []
        """Attributes that changed in the second or third step of this attempt and that no checkpoint holds.
        Set after the third step."""
        self._changed: dict[str, None] = {}
        self._done = 0
        self._lock = threading.Lock()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self, step: int, undo: Undo, unrecorded: dict[str, Any] | None = None) -> None:
        """Set the initial state, before the first step. `step` is 0 or the restored step."""
        self.undo = undo
        self._take(loaded=True)
        self.step, self.unrecorded = step, unrecorded

    @property
    def position(self) -> tuple[int, bool]:
        """The step, and whether its evaluation and metrics are done."""
        return self.step, self.unrecorded is None

    @contextmanager
    def updating(self, step: int, result: dict[str, Any], started: float) -> Iterator[None]:
        """Guard every change of parameters, optimizer states or the loss scale. Blocks forever if the state
        is being handed over, because the process then ends. `started` is the start of the successful pass, by
        time.perf_counter."""
        with self._lock:
            with self.budget.host_side():
                self.undo.find_written()
            self.torn = True  # also while the copies of `undo` are older than the parameters
            yield
            self._done += 1
            if self._done in (2, 3):  # the first step creates caches and the like, which then stay
                with self.budget.host_side():
                    self._changed |= dict.fromkeys(self.undo.changed())
                self.unsaved = list(self._changed) if self._done == 3 else []
            self._take()
            self.undo.release()
            self.unrecorded = {"result": result, "seconds": time.perf_counter() - started}
            self.step, self.torn = step, False

    def recorded(self, *, drew: bool) -> None:
        """Record that evaluation and metrics of the step are done. `drew`: they may have drawn random numbers
        or changed a buffer, so a new copy is taken. It costs 0.05 ms or more, mostly for numpy's state."""
        with self._lock:
            if drew:
                self._take()
            self.unrecorded = None

    def hold(self, seconds: float) -> bool:
        """Block updates until `let_go`; called from another thread. Return False if an update was in progress
        for all of `seconds`."""
        return self._lock.acquire(timeout=seconds)

    def let_go(self) -> None:
        self._lock.release()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for the end of the step, but not for later work: that may include a collective
        that never ends."""
        if self._event is not None:
            stream.wait_event(self._event)

    def _take(self, *, loaded: bool = False) -> None:
        with self.budget.host_side():
            self.undo.take(loaded=loaded)
        if self._event is not None:
            self._event.record()
