"""Which of several pods of a run has it, by the volume's records."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from launcher.rundir.files import replace_json
from launcher.schedulers.base import LIVING
from launcher.schedulers.runpod.place import Handle, claim
from launcher.schedulers.runpod.twins import of_run

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy


def has_run(copy: Copy, number: int, id: str) -> bool:
    """Whether this pod or cluster of the submission `number` has begun the run and has not done with it.
    Raises VolumeError."""
    if copy.text(claim(number)) != id or copy.text(f"pod-{id}.done"):
        return False
    state = _state(copy)
    return state is None or state["state"] in LIVING


def other_than(handle: Handle, copy: Copy, client: Client) -> Handle | None:
    """One that lives and has the run. Raises ApiError, VolumeError."""
    for number, id in of_run(client, copy.run.id, handle.cluster):
        if id != handle.id and has_run(copy, number, id):
            return Handle(handle.profile, f"cluster/{id}" if handle.cluster else id)
    return None


def adopt(copy: Copy, handle: Handle) -> None:
    """It has the run, whatever was written down of another one. Raises VolumeError."""
    copy.run.event("twin", handle=str(handle))
    if (state := _state(copy)) is not None:
        replace_json(copy.run.state, state)


def _state(copy: Copy) -> dict[str, Any] | None:
    """As it is there; None where it is not whole yet, or none of a run."""
    with suppress(ValueError):
        state = json.loads(copy.text("state.json"))
        if isinstance(state, dict) and isinstance(state.get("state"), str):
            return state
    return None
