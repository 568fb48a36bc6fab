"""Write the run directory before a run, and read its status afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launcher.rundir.files import replace_bytes, replace_json, replace_text
from launcher.rundir.find import latest_checkpoint
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import newest
from launcher.rundir.time import now, seconds_of
from launcher.schedulers.base import UNFINISHED, MaybeDoneError, Prepared, SchedulerError, Status
from launcher.spec.cluster import MODES
from launcher.spec.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    Finished,
    Found,
    Refused,
    Replanned,
    Requeued,
    SecondEnded,
    SlurmJob,
    Starting,
    Submitted,
    Submitting,
    SupervisorStarted,
    Waiting,
    Withdrawn,
    latest,
)
from launcher.spec.records import StateRecord
from launcher.supervise.host import is_here, may_live, this_process

SENDING_SECONDS = 3600.0
"How long a submission may take. Later, its process id may belong to another process."


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Raise SchedulerError in place of an OSError of the block, which writes `path`."""
    try:
        yield
    except OSError as error:
        raise SchedulerError(f"cannot write {path}: {error.strerror}") from None


def write_run(prepared: Prepared, state: str = "submitted") -> RunDir:
    """Create the run directory completely or not at all, with the rights of `paths.access`.

    Raises OSError.
    """
    final = Path(prepared.run_dir)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = RunDir(final.with_name(f".{final.name}.partial"))
    try:
        partial.path.mkdir(mode=0o700)
        partial.path.chmod(MODES[prepared.request.cluster.paths.access])  # independent of the umask
        _write_plan(partial.path, prepared)
        partial.checkpoints.mkdir()
        by = {"submitter": this_process()} if state == "submitted" else {}
        replace_json(partial.state, {"state": state, "time": prepared.about.created, **by})
        partial.path.rename(final)
    except BaseException:
        shutil.rmtree(partial.path, ignore_errors=True)
        raise
    return RunDir(final)


def write_plan(run: RunDir, prepared: Prepared) -> Path:
    """Put another plan in force from the next attempt on, completely or not at all. Raises OSError."""
    attempts = run.attempts()
    final = run.plan_from(attempts[-1].number + 1 if attempts else 0)
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write_plan(partial, prepared)
        shutil.rmtree(final, ignore_errors=True)  # left by a supervisor that started no attempt
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def was_sent(run: RunDir) -> bool:
    """Return whether a scheduler was asked for the run: it was more than rendered or written."""
    return latest(run.read_events(), Submitting, Submitted, SlurmJob, Waiting) is not None


def latest_handle(events: Sequence[Event], prefix: str) -> str | None:
    """Return the latest handle with this prefix in a run's events.

    Return None if there is none, or if the answer to the last submission was lost.
    """
    refused = False
    for event in reversed(events):
        if event.handle is not None and event.handle.startswith(prefix) and not event.handle.endswith(":"):
            return event.handle
        if isinstance(event, Submitting) and not refused:
            return None
        refused = isinstance(event, Refused)
    return None


def may_be_sent(run: RunDir) -> bool:
    """Return whether the process that submits the run may still be at work."""
    state = run.read_state()
    process = state.submitter
    recent = time.time() - (seconds_of(state.time) or 0.0) < SENDING_SECONDS
    return process is not None and recent and may_live(process)


def is_being_submitted(run: RunDir) -> bool:
    """Return whether a process of this machine still waits for the scheduler's answer."""
    process = run.read_state().submitter
    return process is not None and is_here(process) and may_be_sent(run)


def rewrite_run(run: RunDir, prepared: Prepared) -> None:
    """Replace the plan of a run that has not begun, for another kind of node. Raises OSError."""
    shutil.rmtree(run.scripts)
    _write_plan(run.path, prepared)


def _write_plan(folder: Path, prepared: Prepared) -> None:
    within = RunDir(folder)
    within.scripts.mkdir(parents=True)
    replace_json(within.run, prepared.about.as_json())
    replace_json(within.plan, prepared.request.plan.model_dump(mode="json"))
    for file in prepared.files:
        replace_text(within.scripts / file.path, file.text, file.mode)


@contextlib.contextmanager
def in_force(run: RunDir, again: Prepared | None) -> Iterator[None]:
    """Put another plan in force for the block, and withdraw it after an error if the run does not start.

    If the scheduler was asked to start the run and did not answer, the plan stays, because the run may have
    begun with it.
    """
    if again is None:
        yield
        return
    with writing(run.path):
        folder = write_plan(run, again)
    try:
        run.append(Replanned(changed=again.about.changed, set=again.about.set or []))
        yield
    except BaseException:
        if not may_start(run):
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):
                run.append(Withdrawn())
        raise


def withdraw_unused(run: RunDir) -> None:
    """Withdraw the plan of a resume that was killed or never answered.

    Call it for a run that has ended. If a scheduler has confirmed a start with the plan, the plan stays.
    """
    for event in reversed(run.read_events()):
        if isinstance(event, Replanned):
            shutil.rmtree(run.plan_from(run.planned_at), ignore_errors=True)
            run.append(Withdrawn())
        if isinstance(event, (Replanned, Withdrawn, *_CONFIRMING)):
            return


_CONFIRMING = (Submitted, Requeued, Waiting, Starting, SlurmJob, Found, SecondEnded, SupervisorStarted)


def may_start(run: RunDir) -> bool:
    """Return whether the scheduler was asked to start the run, and did not refuse."""
    return isinstance(latest(run.read_events(), Replanned, Submitting, Refused), Submitting)


@contextlib.contextmanager
def asking_to_stop(runs: Sequence[RunDir], sent: Callable[[Path], bool], name: str) -> Iterator[None]:
    """Wrap the code that writes `cancel` in each run and sends it. Messages call the runs `name`.

    After an error, each request that was not `sent` is removed, so that no later query sends it, and the
    SchedulerError says so.
    """
    before = {run: _request(run) for run in runs}
    try:
        yield
    except BaseException as error:
        unsent = [run for run in runs if _request(run)[1] != before[run][1] and not sent(run.cancel)]
        if not unsent:
            raise
        for run in unsent:
            _restore_request(run, *before[run])
        if isinstance(error, MaybeDoneError):
            raise SchedulerError(
                f"{error}; the request to stop may or may not have arrived: see `launcher status {name}`, "
                "and cancel it again if it keeps running"
            ) from None
        if isinstance(error, SchedulerError):
            raise SchedulerError(
                f"{error}; {name} was not asked to stop and keeps running: cancel it again"
            ) from None
        raise


def _restore_request(run: RunDir, before: bytes | None, since: int) -> None:
    if before is None:
        run.cancel.unlink(missing_ok=True)
    else:
        replace_bytes(run.cancel, before)
        os.utime(run.cancel, ns=(since, since))  # the file's time shows whether it was sent


def _request(run: RunDir) -> tuple[bytes | None, int]:
    """Return the content and the time (ns) of `cancel`, or (None, 0) if there is none."""
    try:
        return run.cancel.read_bytes(), run.cancel.stat().st_mtime_ns
    except FileNotFoundError:
        return None, 0


def end_told(run: RunDir) -> dict[str, str | None]:
    """Return how a run ended, from its events and verdicts, or {} if they show no end since its last start.

    They may show it although state.json does not, because the supervisor could not write that (full disk).
    """
    for event in reversed(run.read_events()):
        match event:
            case Starting() | Submitted() | Submitting():
                return {}
            case AttemptStarted():
                break
            case Finished():
                return {"state": event.state, "failure": event.failure, "reason": event.reason}
            case AttemptEnded(failure="succeeded"):
                return {"state": "succeeded", "failure": "succeeded", "reason": event.reason}
    attempts = run.attempts()
    judged = attempts[-1].read_verdict() if attempts else None
    if judged is not None and judged.verdict.ok:
        return {"state": "succeeded", "failure": "succeeded", "reason": judged.verdict.reason}
    return {}


def record_end(run: RunDir, end: StateRecord, by: str) -> None:
    """Record how a run ended, according to `by` and not to its supervisor. Raises OSError."""
    written = end.as_json()
    kept = {name: written[name] for name in ("state", "failure", "reason", "attempt") if name in written}
    run.append(Finished(**kept, by=by))
    replace_json(run.state, {**kept, "time": now()})


def status_of(run: RunDir, handle: str, state: StateRecord, *, resumable: bool = True) -> Status:
    """Return the status from a run's files, with `state` in place of its state.json.

    `resumable`: whether the run can be continued if it ended without success.
    """
    about, attempts = run.read_about(), run.attempts()
    latest_attempt = attempts[-1].number if attempts else None
    return Status(
        run_id=run.id,
        name=about.job.name or "",
        state=state.state,
        handle=handle,
        attempt=state.attempt if state.attempt is not None else latest_attempt,
        step=_int(newest(run, "step")),
        steps=about.job.steps or _int(newest(run, "steps")),
        failure=state.failure,
        reason=state.reason,
        created=about.created,
        updated=state.time,
        checkpoint_step=latest_checkpoint(run),
        path=str(run.path),
        resumable=resumable and state.state in UNFINISHED,
    )


def _int(value: object) -> int | None:
    return value if isinstance(value, int) else None
