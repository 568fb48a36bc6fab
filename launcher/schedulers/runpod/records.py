"""Record what happens to a run's pods, on this machine and on the volume."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from launcher.rundir.files import parsed, replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.stop import write_cancel_request
from launcher.rundir.time import now, seconds_of
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.rundir import record_end
from launcher.schedulers.runpod import pods
from launcher.schedulers.runpod.errors import ApiError
from launcher.schedulers.runpod.evidence import submission_in
from launcher.schedulers.runpod.handle import Handle, claim
from launcher.spec.events import DuplicateEnded, Rejected, SecondEnded
from launcher.spec.records import StateRecord

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy


def has_run(copy: Copy, number: int, id: str) -> bool:
    """Return whether this pod or cluster of submission `number` has begun the run and not finished it.

    Raises VolumeError.
    """
    if copy.text(claim(number)) != id or copy.text(f"pod-{id}.done"):
        return False
    state = _state_there(copy)
    return state is None or not state.ended


def adopt(copy: Copy, handle: Handle) -> None:
    """Record that this pod runs the run, in place of what was recorded about another. Raises VolumeError."""
    copy.run.append(SecondEnded(handle=str(handle)))
    if (state := _state_there(copy)) is not None:
        replace_json(copy.run.state, state.as_json())


def _state_there(copy: Copy) -> StateRecord | None:
    """Return state.json from the volume, or None if it is incomplete or invalid."""
    return StateRecord.read(parsed(copy.text("state.json").encode()))


def record(run: RunDir, state: str, failure: str, reason: str) -> None:
    """Record how the run ended."""
    end = run.read_state().replace(state=state, failure=failure, reason=reason)
    record_end(run, end, by="runpod")


def reject(copy: Copy, handle: Handle, reason: str, usd_per_hour: float | None, limit: float | None) -> None:
    """Record a pod that must end and could not be ended yet, and ask it to stop."""
    since = submission_in(copy.run.read_events()).time  # billed from then on
    rejected = Rejected(
        handle=str(handle), reason=reason, usd_per_hour=usd_per_hour, limit=limit, since=since
    )
    copy.run.append(rejected)
    replace_json(copy.run.state, copy.run.read_state().replace(reason=reason, time=now()).as_json())
    with suppress(SchedulerError):
        ask_to_stop(copy)


def end_duplicate(client: Client, run: RunDir, path: str) -> None:
    """End a second pod of the latest submission, and record what it has cost. Raises UnendedError."""
    price, since = 0.0, seconds_of(submission_in(run.read_events()).time)
    with suppress(ApiError):
        price = pods.billed(client, path, run.read_about().nodes)[1]
    pods.end(client, path)
    hours = (time.time() - since) / 3600 if since is not None else 0.0
    run.append(DuplicateEnded(pod=path.rpartition("/")[2], usd=price * hours))


def ask_to_stop(copy: Copy) -> None:
    """Ask the pod that runs the run, or will run it, to stop.

    Raises VolumeError; in that case the next poll sends the request.
    """
    write_cancel_request(copy.run.cancel)
    copy.send()
