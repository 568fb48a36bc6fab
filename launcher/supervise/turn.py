"""A run's turn on this machine: its place among the runs of its sweep, and GPUs of its own.

Both are locks (flock) that the supervisor holds until it ends, so the kernel frees them however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from launcher.rundir.layout import RunDir
from launcher.supervise.gpus import BusyError, CardsError, claim, polling, user

VISIBLE = "CUDA_VISIBLE_DEVICES"


def sweep_folder(run: RunDir, sweep: str) -> Path:
    """The folder of the locks of a sweep, beside its runs."""
    return run.path.parent / "sweeps" / sweep


class Turn:
    """What a run waits for before its first attempt. `take` is called until it returns ""."""

    def __init__(self, run: RunDir, gpus: int, environ: MutableMapping[str, str]) -> None:
        """`gpus`: how many the run needs, 0 if none are to be chosen. `environ` gets their indexes."""
        sweep = run.read_about().sweep
        self.run, self.gpus, self.environ = run, gpus, environ
        self.at_once = sweep.at_once if sweep is not None else None
        self.folder = sweep_folder(run, sweep.id) if sweep is not None else run.path
        self._why = "waits for GPUs"
        self._locks: list[int] = []

    def take(self) -> str:
        """Take what is free. Return why the run has to wait, or "" if it has its turn."""
        if self.at_once is not None:
            if not self._take_place(self.at_once):
                return f"waits for its turn in the sweep (--at-once {self.at_once})"
            self.at_once = None
        if self.gpus:
            who = {"run": self.run.id, "user": user()}
            try:
                with polling() as alone:
                    if not alone:
                        return self._why
                    chosen, locks = claim(self.gpus, who, among=self.environ.get(VISIBLE), shared=True)
            except BusyError as error:
                self._why = f"waits for GPUs: {error}"
                return self._why
            except CardsError as error:  # as on a machine without nvidia-smi: the job sees all GPUs
                print(f"[launcher] GPUs are not assigned: {error}", file=sys.stderr, flush=True)
            else:
                self._locks += locks
                self.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
                self.environ[VISIBLE] = ",".join(map(str, chosen))
            self.gpus = 0
        return ""

    def _take_place(self, places: int) -> bool:
        """Take one of the sweep's places."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in range(places):
            lock = os.open(self.folder / f"place-{number}", os.O_RDWR | os.O_CREAT, 0o644)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._locks.append(lock)
                return True
            os.close(lock)
        return False
