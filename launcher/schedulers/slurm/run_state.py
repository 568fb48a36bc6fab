"""Judge the state of a run from its own records and Slurm's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import LIVING, Status
from launcher.schedulers.rundir import record_end, status_of
from launcher.schedulers.slurm.handle import handle_of, job_of
from launcher.schedulers.slurm.identity import belongs_to, message_of_foreign_job
from launcher.schedulers.slurm.jobs import begun
from launcher.schedulers.slurm.pending import why_pending
from launcher.schedulers.slurm.records import JobRecord, Records
from launcher.schedulers.slurm.site import Site
from launcher.schedulers.slurm.states import WITHOUT_SUPERVISOR, Meaning, meaning
from launcher.spec.events import AttemptStarted, SlurmJob, latest
from launcher.supervise.host import shows_life

NEVER_BEGAN = (
    "job {} ended with exit code 0 before its supervisor began: does a line of `setup:` replace the shell "
    "(exec)?"
)

NO_JOB = (
    "Slurm has no job of this run: its submission was interrupted, or Slurm's answer was lost, and no job "
    "has begun"
)


def lives(state: Mapping[str, Any]) -> bool:
    """Return whether the run has not ended according to its own records. It may be about to be requeued."""
    return state.get("state", "submitted") in LIVING or bool(state.get("requeue"))


def status_from_slurm(
    run: RunDir, job: str | None, records: Records, trouble: str, site: Site | None = None
) -> Status:
    """Return the run's status, from its own records and Slurm's."""
    handle = handle_of(run, job)
    state = run.read_state()  # again: it may have ended before Slurm was asked
    if not lives(state):
        return status_of(run, handle_of(run, job_of(run)), state)
    record = records.get(job) if job is not None else None
    if job is not None and record is not None and not belongs_to(record, run):
        trouble, record = trouble or message_of_foreign_job(job, record), None
    slurm = meaning(record) if record is not None else None
    # If the controller does not answer, only accounting is left. It knows how jobs end, but about a job that
    # still runs the run's own records say more.
    if record is None or slurm is None or (trouble and slurm.state in LIVING):
        update = _unknown(run, state, job, trouble or records.silent)
        cancelled = run.cancel.exists() or (job is not None and records.left_array(job))
        if update["state"] == "lost" and cancelled and not begun(run):
            update = {
                "state": "cancelled",
                "failure": "cancelled",
                "reason": "cancelled while it waited in the queue",
            }
            _record_end(run, {**state, **update})
        return status_of(run, handle, {**state, **update})
    if slurm.state == "submitted":
        update = {
            "state": "submitted",
            "reason": f"job {record.id} {_words(record, slurm, site)}",
            "failure": None,
        }
    elif slurm.state in LIVING:
        update = {"reason": _reason_from_slurm(run, record, slurm), "failure": None}
        if state.get("state") not in ("running", "stopping"):
            update["state"] = slurm.state
    elif state.get("requeue") and slurm.state not in ("cancelled", "lost"):
        # The supervisor has judged the run, and its batch script was killed (scancel --batch).
        ended = f"job {record.id} {slurm.words} before it went back into the queue"
        update = {"requeue": False, "reason": "; ".join(filter(None, (state.get("reason"), ended)))}
        _record_end(run, {**state, **update})
    else:
        update = {"state": slurm.state, "failure": slurm.failure, "reason": f"job {record.id} {slurm.words}"}
        if slurm.failure != "succeeded":
            update |= _verdict(run, record, slurm)
        elif not _attempted(run):
            update = {"state": "failed", "failure": "image-error", "reason": NEVER_BEGAN.format(record.id)}
        _record_end(run, {**state, **update})
    return status_of(run, handle, {**state, **update})


def _attempted(run: RunDir) -> bool:
    """Return whether an attempt has started in the run's latest job, according to its records."""
    return isinstance(latest(run.read_events(), "submitting", "job", "attempt"), AttemptStarted)


def _unknown(run: RunDir, state: Mapping[str, Any], job: str | None, trouble: str) -> dict[str, Any]:
    if not trouble and shows_life(run):
        trouble = f"Slurm does not know job {job} here"
    if trouble:
        return {"state": _living_state(state), "reason": f"last known state; {trouble}"}
    reason = f"Slurm does not know job {job} (any more), and the run's own records do not show its end"
    return {"state": "lost", "failure": "node-failed", "reason": NO_JOB if job is None else reason}


def _living_state(state: Mapping[str, Any]) -> str:
    name = str(state.get("state", "submitted"))
    return name if name in LIVING else "stopping"


def _words(record: JobRecord, slurm: Meaning, site: Site | None) -> str:
    """Return what a job in the queue is waiting for or doing."""
    return f"waits: {why_pending(record, site)}" if record.state == "PENDING" else slurm.words


def _reason_from_slurm(run: RunDir, record: JobRecord, slurm: Meaning) -> str:
    """Return what a job that has its nodes is doing, or "" if the supervisor's records say it."""
    if record.state in WITHOUT_SUPERVISOR:
        return f"job {record.id} {slurm.words}"
    if not isinstance(latest(run.read_events(), "submitting", "job", "started"), SlurmJob):
        return ""
    if shows_life(run):
        return f"job {record.id} waits until the supervisor of an earlier start, which still runs, has ended"
    return f"job {record.id} has begun; its supervisor has not"


def _verdict(run: RunDir, record: JobRecord, slurm: Meaning) -> dict[str, Any]:
    """Judge an attempt that ended without a verdict.

    Return the fields of the run's state that this changes.
    """
    from launcher.schedulers.slurm.ended import verdict_of

    try:
        verdict = verdict_of(run, record, slurm)
    except OSError:  # another user's run, or a full disk
        return {}
    if verdict is None:
        return {}
    words = f"job {record.id} {slurm.words}"
    reason = verdict.reason if words in verdict.reason else f"{verdict.reason}; {words}"
    return {"failure": verdict.failure, "reason": reason}


def _record_end(run: RunDir, state: Mapping[str, Any]) -> None:
    """Record what Slurm reports about the end of the run, because Slurm forgets jobs."""
    with contextlib.suppress(OSError):  # another user's run, or a full disk: Slurm is queried again next time
        record_end(run, state, by="slurm")
