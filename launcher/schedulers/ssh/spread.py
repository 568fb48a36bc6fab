"""Move waiting runs of a sweep to other hosts that have become free, while this machine is on.

The hosts do not communicate, so without this process each run stays on its host.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.lookup import scheduler_of
from launcher.schedulers.ssh.scheduler import SshHosts
from launcher.schedulers.sweeps_without_queue import runs_of, task_of

LOOK_SECONDS = 10.0
"Pause between two polls of all runs of a sweep."


def main(folders: Sequence[str]) -> None:
    """Poll until no run waits. `folders` are the sweep's folders, one next to each host's copies of runs."""
    while waiting := [run for run in _runs(folders) if run.read_state().state == "submitted"]:
        try:
            hosts = scheduler_of(waiting[0])
            assert isinstance(hosts, SshHosts)
            for run in hosts.spread(_runs(folders)):
                print(f"{now()} {run.id} now waits on {hosts.where(run)}", file=sys.stderr, flush=True)
        except (SchedulerError, OSError) as error:  # the next poll tries again
            print(f"{now()} {error}", file=sys.stderr, flush=True)
        time.sleep(LOOK_SECONDS)


def _runs(folders: Sequence[str]) -> list[RunDir]:
    runs = [run for folder in folders for run in runs_of(Path(folder))]
    return sorted(runs, key=task_of)


if __name__ == "__main__":
    main(sys.argv[1:])
