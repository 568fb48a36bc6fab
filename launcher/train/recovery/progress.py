"""Which optimizer step a rank's state is of: told by the loop, asked by the thread that hands it over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launcher.train.budget import Budget
from launcher.train.recovery.undo import Undo


class Progress:
    """`step` is the last complete optimizer step: parameters, optimizer states and loss scale are its own.

    Everything else changes all the time; `undo` has it as at the end of that step.
    """

    undo: Undo

    def __init__(self, device: torch.device, budget: Budget) -> None:
        self.budget = budget
        self.step = 0
        self.torn = False
        "An update has failed half-way: nothing here is of any step."
        self.unrecorded: dict[str, Any] | None = None
        "What `step` brought, until its evaluation is done and its metrics are written."
        self.unsaved: list[str] = []
        """After the third step of this attempt: attributes that changed in the second or third, and that no
        checkpoint holds."""
        self._changed: dict[str, None] = {}
        self._done = 0
        self._still = threading.Lock()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self, step: int, undo: Undo, unrecorded: dict[str, Any] | None = None) -> None:
        """Before the first step: all is of `step`, 0 or what was restored."""
        self.undo = undo
        self._take(anew=True)
        self.step, self.unrecorded = step, unrecorded

    @property
    def position(self) -> tuple[int, bool]:
        """The step, and whether it is recorded."""
        return self.step, self.unrecorded is None

    @contextmanager
    def updating(self, step: int, result: dict[str, Any], started: float) -> Iterator[None]:
        """Around all that changes parameters, optimizer states or the loss scale. Waits for ever when the
        state is being handed over: the process ends then. `started`: the pass that counts, by
        time.perf_counter."""
        with self._still:
            with self.budget.host_side():
                self.undo.see_written()
            try:
                yield
            except BaseException:
                self.torn = True
                raise
            self._done += 1
            if self._done in (2, 3):  # the first fills what is made once, such as a cache
                with self.budget.host_side():
                    self._changed |= dict.fromkeys(self.undo.changed())
                self.unsaved = list(self._changed) if self._done == 3 else []
            self._take()
            self.undo.release()
            self.unrecorded = {"result": result, "seconds": time.perf_counter() - started}
            self.step = step

    def recorded(self, *, drew: bool) -> None:
        """Evaluation and metrics of the step are done. `drew`: something in there may have drawn random
        numbers or changed a buffer. A copy costs 0.05 ms or more, most of it numpy's state."""
        with self._still:
            if drew:
                self._take()
            self.unrecorded = None

    def hold(self, seconds: float) -> bool:
        """From another thread: no update begins until `let_go`. False: one was under way all the time."""
        return self._still.acquire(timeout=seconds)

    def let_go(self) -> None:
        self._still.release()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for the end of the step, and for nothing that was issued after it: that may be
        a collective which never ends."""
        if self._event is not None:
            stream.wait_event(self._event)

    def _take(self, *, anew: bool = False) -> None:
        with self.budget.host_side():
            self.undo.take(anew=anew)
        if self._event is not None:
            self._event.record()
