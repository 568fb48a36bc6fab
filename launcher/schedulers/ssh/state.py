"""Determine the state of a run from its records and its supervisor's lock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from shlex import quote

from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of
from launcher.schedulers.rundir import end_told
from launcher.spec.events import Submitting, latest
from launcher.spec.records import StateRecord

UNSTARTED_SECONDS = 180.0
"If no supervisor has appeared this long after an unanswered submission, there is none."
_HELD = 75


def locks_script(remote_root: str, runs: Sequence[str]) -> str:
    """Return shell code that prints each run with the state of its supervisor's lock.

    `held`: the supervisor runs; `free`: it has ended; `none`: none has started so far.
    """
    return (
        f"for r in {' '.join(map(quote, runs))}; do\n"
        f"f={quote(remote_root)}/$r/supervisor.lock w=none\n"
        f'if [ -s "$f" ]; then flock -n -s -E {_HELD} "$f" true 2>/dev/null\n'
        f"case $? in 0) w=free ;; {_HELD}) w=held ;; *) w=unknown ;; esac; fi\n"
        "printf '%s %s\\n' \"$r\" $w\ndone"
    )


def parse_locks(answer: bytes) -> dict[str, str]:
    lines = answer.decode(errors="replace").splitlines()
    return {run: word for run, _, word in (line.rpartition(" ") for line in lines)}


def corrected_state(run: RunDir, lock: str, trouble: str, where: str) -> StateRecord:
    """Return state.json, corrected by the state of the lock.

    `trouble` says why the host could not be queried. state.json is read after the lock was tested, so it
    shows the end of a run that has released its lock.
    """
    state = run.read_state()
    if state.ended:
        return state
    if trouble:
        return state.replace(reason=f"last known state; {trouble}")
    if lock == "free" and (end := end_told(run)):
        return state.replace(**end)
    if lock == "free":
        reason = "the supervisor was killed or its host was restarted; its ranks ended with it"
    elif lock == "lost":
        reason = f"{where} no longer exists"
    elif lock == "none" and _seconds_since_submission(run) > UNSTARTED_SECONDS:
        reason = "no supervisor has started: the connection was lost during the submission"
    else:
        return state
    return state.replace(state="lost", failure="node-failed", reason=reason)


def _seconds_since_submission(run: RunDir) -> float:
    """Return the seconds since the latest submission."""
    event = latest(run.read_events(), Submitting)
    return time.time() - (seconds_of(event.time) or 0.0) if event is not None else 0.0
