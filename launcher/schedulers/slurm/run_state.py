"""Judge the state of a run from its own records and Slurm's."""

from __future__ import annotations

import contextlib
from typing import Any

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import LIVING, Status
from launcher.schedulers.rundir import is_being_submitted, record_end, status_of
from launcher.schedulers.slurm.handle import handle_of, job_of
from launcher.schedulers.slurm.identity import belongs_to, message_of_foreign_job
from launcher.schedulers.slurm.jobs import begun
from launcher.schedulers.slurm.pending import why_pending
from launcher.schedulers.slurm.records import JobRecord, Records
from launcher.schedulers.slurm.site import Site
from launcher.schedulers.slurm.states import WITHOUT_SUPERVISOR, Meaning, meaning
from launcher.spec.events import AttemptStarted, SlurmJob, Submitting, SupervisorStarted, latest
from launcher.spec.records import StateRecord
from launcher.supervise.host import shows_life

NEVER_BEGAN = (
    "job {} ended with exit code 0 before its supervisor began: does a line of `setup:` replace the shell "
    "(exec)?"
)

SUBMITTING = "launcher submits it: Slurm has not answered yet"

NO_JOB = (
    "Slurm has no job of this run: its submission was interrupted, or Slurm's answer was lost, and no job "
    "has begun"
)


def lives(state: StateRecord) -> bool:
    """Return whether the run has not ended according to its own records. It may be about to be requeued."""
    return not state.ended or state.requeue


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
        state = _unknown(run, state, job, trouble or records.silent)
        cancelled = run.cancel.exists() or (job is not None and records.left_array(job))
        if state.state == "lost" and cancelled and not begun(run):
            reason = "cancelled while it waited in the queue"
            state = state.replace(state="cancelled", failure="cancelled", reason=reason)
            _record_end(run, state)
        return status_of(run, handle, state)
    words = f"job {record.id} {slurm.words}"
    if slurm.state == "submitted":
        reason = f"job {record.id} {_words(record, slurm, site)}"
        state = state.replace(state="submitted", reason=reason, failure=None)
    elif slurm.state in LIVING:
        name = state.state if state.state in ("running", "stopping") else slurm.state
        state = state.replace(state=name, reason=_reason_from_slurm(run, record, slurm), failure=None)
    elif state.requeue and slurm.state not in ("cancelled", "lost"):
        # The supervisor has judged the run, and its batch script was killed (scancel --batch).
        ended = f"{words} before it went back into the queue"
        state = state.replace(requeue=False, reason="; ".join(filter(None, (state.reason, ended))))
        _record_end(run, state)
    else:
        state = state.replace(state=slurm.state, failure=slurm.failure, reason=words)
        if slurm.failure != "succeeded":
            state = state.replace(**_verdict(run, record, slurm))
        elif not _attempted(run):
            reason = NEVER_BEGAN.format(record.id)
            state = state.replace(state="failed", failure="image-error", reason=reason)
        _record_end(run, state)
    return status_of(run, handle, state)


def _attempted(run: RunDir) -> bool:
    """Return whether an attempt has started in the run's latest job, according to its records."""
    return isinstance(latest(run.read_events(), Submitting, SlurmJob, AttemptStarted), AttemptStarted)


def _unknown(run: RunDir, state: StateRecord, job: str | None, trouble: str) -> StateRecord:
    if not trouble and shows_life(run):
        trouble = f"Slurm does not know job {job} here"
    if job is None and is_being_submitted(run) and not run.cancel.exists():
        return state.replace(state="submitted", reason=SUBMITTING)
    if trouble:
        name = "stopping" if state.ended else state.state
        return state.replace(state=name, reason=f"last known state; {trouble}")
    reason = f"Slurm does not know job {job} (any more), and the run's own records do not show its end"
    return state.replace(state="lost", failure="node-failed", reason=NO_JOB if job is None else reason)


def _words(record: JobRecord, slurm: Meaning, site: Site | None) -> str:
    """Return what a job in the queue is waiting for or doing."""
    return f"waits: {why_pending(record, site)}" if record.state == "PENDING" else slurm.words


def _reason_from_slurm(run: RunDir, record: JobRecord, slurm: Meaning) -> str:
    """Return what a job that has its nodes is doing, or "" if the supervisor's records say it."""
    if record.state in WITHOUT_SUPERVISOR:
        return f"job {record.id} {slurm.words}"
    if not isinstance(latest(run.read_events(), Submitting, SlurmJob, SupervisorStarted), SlurmJob):
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


def _record_end(run: RunDir, state: StateRecord) -> None:
    """Record what Slurm reports about the end of the run, because Slurm forgets jobs."""
    with contextlib.suppress(OSError):  # another user's run, or a full disk: Slurm is queried again next time
        record_end(run, state, by="slurm")
