"""Runs written by hand that look alive: their supervisor's lock is held by this process."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path
from typing import IO, Any

from launcher.rundir.files import append_json, replace_json
from launcher.rundir.time import now
from launcher.spec.quantities import GIB
from tests.report.written_run import Log, recipe

NOBODY = 2**22 + 1
"A process id that Linux never gives. Tests kill the supervisors of runs that they leave behind."


class Living(Log):
    """A run that goes on until `release`."""

    def __init__(self, path: Path, name: str = "gpt", **fields: Any) -> None:
        super().__init__(path)
        self.about(name, **{"steps": 1000, **fields})
        self.event("submitted")
        self.event("started", 30.0, host="node-1", pid=1, nodes=1)
        self.event("attempt", attempt=0, recipe=recipe(16))
        self.run.attempt(0).path.mkdir(parents=True)
        self._lock: IO[str] = open(self.run.supervisor_lock, "w")  # noqa: SIM115
        self._lock.write(f'{{"host": "{socket.gethostname()}", "pid": {NOBODY}}}')
        self._lock.flush()
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.state("running", attempt=0)

    def grow(self, step: int) -> None:
        """One step of both ranks, a second after the one before."""
        self.steps(0, step, step, 1.0, loss=5.0 - step / 100, tokens_per_second=8474.0)
        for rank in range(2):
            path = self.run.attempt(0).memory(rank)
            path.parent.mkdir(exist_ok=True)
            use = {"cpu": 100, **({"utilization": 98} if rank == 0 else {})}
            append_json(path, {"time": now(), "step": step, "reserved": (20 + rank) * GIB, "rss": GIB, **use})
            self.log(0, rank, f"step {step}")

    def release(self, state: str = "succeeded") -> None:
        replace_json(self.run.state, {"state": state, "time": now(), "attempt": 0})
        self._lock.close()
