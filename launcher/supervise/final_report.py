"""Write `report.html` when a run has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from launcher.rundir.layout import RunDir
from launcher.supervise.process import dying_with

MAX_SECONDS = 120.0
"A run of 100,000 steps on 64 ranks takes about 30 s; a larger one gets its page from `launcher report`."
ENDED = frozenset({"succeeded", "failed", "cancelled"})
"States in which the page is written. An interrupted run continues elsewhere and has no time for it."


def write_last_page(run: RunDir) -> None:
    """Write the page in a separate process, so that an error in it does not change how the run ends."""
    if run.read_state().state not in ENDED:
        return
    command = [sys.executable, "-m", "launcher.report.at_end", str(run.path)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=MAX_SECONDS,
            preexec_fn=dying_with(os.getpid(), signal.SIGKILL),
        )
