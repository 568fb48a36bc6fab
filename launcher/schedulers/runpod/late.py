"""A pod that a look has found: looked for by its name where no answer told of it, and held against what was
asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.render.pod import pod_name
from launcher.rundir.layout import RunDir
from launcher.schedulers.runpod.create import billed_as, too_dear
from launcher.schedulers.runpod.place import Handle, claim, submissions
from launcher.schedulers.runpod.rejected import keep_rejected, last_submitting
from launcher.schedulers.runpod.twins import ids_named, keep_one

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy


def name_of(run: RunDir) -> str:
    """Of the pods of its last submission."""
    return pod_name(run.id, max(submissions(run), 1))


def find(copy: Copy, client: Client) -> Handle | None:
    """Where the answer to its creation was lost. Raises ApiError, VolumeError."""
    about, number = copy.run.read_about(), max(submissions(copy.run), 1)
    cluster = int(about["nodes"]) > 1
    ids = ids_named(client, name_of(copy.run), cluster)
    if not ids:
        return None
    kept = keep_one(client, cluster, ids, lambda: copy.text(claim(number)))
    return Handle(about["cluster"]["name"], f"cluster/{kept}" if cluster else kept)


def accept(copy: Copy, handle: Handle, client: Client) -> bool:
    """Whether there is nothing against it; either way it is written down. Raises ApiError."""
    run, asked = copy.run, last_submitting(copy.run)
    limits: dict[str, float] = asked.get("limits", {})
    gpu, price = billed_as(client, str(handle.id), handle.cluster)
    limit = limits.get(gpu, min(limits.values(), default=None))
    # It costs since it was asked for.
    run.event("found", handle=str(handle), gpu=gpu, usd_per_hour=price, since=asked["time"])
    why = _other_card(gpu, run.read_about(), submissions(run)) or too_dear(price, limit)
    if why is None:
        return True
    keep_rejected(copy, handle, why, price or limit, limit)
    return False


def _other_card(gpu: str, about: Mapping[str, Any], number: int) -> str | None:
    """Why it may not have the run. What is resumed has one plan for every card that it may get."""
    planned = about["cluster"]["runpod"].get("gpu_id") if about["gpus_per_node"] else "CPU"
    if number > 1 or gpu in ("CPU", planned):  # "CPU" as well where RunPod does not tell
        return None
    return f"its pod has {gpu}, and the run is planned for {planned}"


def is_priced(run: RunDir, handle: Handle) -> bool:
    return any(
        event.get("usd_per_hour") is not None and event.get("handle") == str(handle)
        for event in run.read_events()
    )
