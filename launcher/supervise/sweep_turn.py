"""A run's turn to start on its host: a place among the running tasks of its sweep, and free GPUs.

Both are locks that the supervisor holds. The kernel releases them when the supervisor ends, even if killed.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path

from launcher.rundir.layout import RunDir
from launcher.supervise.gpus import BusyError, UnknownGpusError, claim, polling, user
from launcher.supervise.sweep_queue import SweepQueue

VISIBLE = "CUDA_VISIBLE_DEVICES"


def sweep_folder(run: RunDir, sweep: str) -> Path:
    """Return the folder of a sweep's own files, which is next to its runs."""
    return run.path.parent / "sweeps" / sweep


class Turn:
    """Lets a run wait before its first attempt. Call `take` until it returns ""."""

    def __init__(
        self, run: RunDir, gpus: int, environ: MutableMapping[str, str], *, shared: bool = True
    ) -> None:
        """`gpus` is the number of GPUs to choose; 0 chooses none. Their indexes are written to `environ`.

        With `shared`, GPUs used by programs other than launcher may be taken. Raises QueueError.
        """
        self.run, self.gpus, self.environ, self.shared = run, gpus, environ, shared
        self._why = "waits for GPUs"
        self._locks: list[int] = []
        about = run.read_about()
        self._queue: SweepQueue | None = None
        if (sweep := about.sweep) is not None:
            # Hosts that share the folder each have their own queue.
            file = sweep_folder(run, sweep.id) / f"queue{f'-{about.hosts[0]}' if about.hosts else ''}"
            self._queue = SweepQueue(file, sweep.task, sweep.at_once)

    def take(self) -> str:
        """Try to take a place and GPUs. Return why the run must wait, or "".

        Raises GpusError or QueueError if the run can never start on this host, so that waiting is pointless.
        """
        queue = self._queue
        if queue is None:
            return self._take_gpus()
        if not queue.is_first():
            return "waits for its turn in the sweep: earlier runs are also waiting"
        if not queue.take_place():
            return f"waits for its turn in the sweep (--at-once {queue.places})"
        if why := self._take_gpus():
            queue.leave_place()
            return why
        queue.leave_line()
        return ""

    def _take_gpus(self) -> str:
        if not self.gpus:
            return ""
        who = {"run": self.run.id, "user": user()}
        try:
            with polling() as alone:
                if not alone:
                    return self._why
                among = self.environ.get(VISIBLE)
                chosen, locks = claim(self.gpus, who, among=among, shared=self.shared)
        except BusyError as error:
            self._why = f"waits for GPUs: {error}"
            return self._why
        except UnknownGpusError as error:  # a machine without nvidia-smi
            print(f"[launcher] GPUs are not assigned: {error}", file=sys.stderr, flush=True)
        else:
            self._locks += locks
            print(f"[launcher] has GPU {', '.join(map(str, chosen))}", file=sys.stderr, flush=True)
            self.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            self.environ[VISIBLE] = ",".join(map(str, chosen))
        self.gpus = 0
        return ""
