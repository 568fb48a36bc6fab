"""Have the doctor examine this node between two attempts, in the environment of the ranks."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping

from launcher.rundir.layout import AttemptDir, RunDir
from launcher.spec.verdict import EXIT_SICK
from launcher.supervise.attempt import NodePlace, start, tail
from launcher.supervise.judge import start_script_message
from launcher.supervise.process import signal_group

CHECK_SECONDS = 30.0
"Time limit of the check, which takes a second. A hanging file system must not delay the run further."
POLL_SECONDS = 0.1


def why_unfit(
    run: RunDir,
    attempt: AttemptDir,
    place: NodePlace,
    secrets: Mapping[str, str],
    asked_to_stop: Callable[[], bool],
) -> str:
    """Return why no rank should start on this node; empty if it is fit, or if the check itself fails.

    `attempt` is the one that has ended. `asked_to_stop` is called many times a second, and ends the check.
    """
    log = attempt.torchrun_log(place.rank)
    try:
        begin = log.stat().st_size if log.exists() else 0
        running = start(run, attempt, place, secrets, sends_sigterm=False, only_check=True)
    except OSError as error:
        print(f"[launcher] cannot examine this node: {error}", file=sys.stderr)
        return ""
    deadline = time.monotonic() + CHECK_SECONDS
    while (code := running.process.poll()) is None and time.monotonic() < deadline and not asked_to_stop():
        time.sleep(POLL_SECONDS)
    signal_group(running.process.pid, signal.SIGKILL)  # not waited for: it may hang in the kernel
    running.close()
    if code is None:
        print(f"[launcher] the check of this node was ended after {CHECK_SECONDS:.0f} s", file=sys.stderr)
    if code != EXIT_SICK:
        return ""
    return start_script_message(tail(log, begin)) or f"node {place.rank} is unfit"
