"""Pods and clusters of launcher's that nobody needs any more, and that go on costing money."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of
from launcher.schedulers.base import LIVING
from launcher.schedulers.runpod.answers import Clusters, Pods, read
from launcher.schedulers.runpod.overdue import overdue
from launcher.schedulers.runpod.owner import has_run
from launcher.schedulers.runpod.place import handle_of
from launcher.schedulers.runpod.rejected import rejected
from launcher.schedulers.runpod.twins import NAME

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy

ENDING_SECONDS = 120.0
"For a pod to end itself after its run; the first of a cluster waits 30 s for the others."


@dataclass(frozen=True)
class Rented:
    """One that RunPod lists under a name of launcher's."""

    path: str
    "Below the API's address."
    name: str
    run_id: str
    status: str
    usd_per_hour: float
    why: str | None
    "Why it is leaked; None: it is needed, or nobody here can tell."
    known: bool
    "Its run is known on this machine."
    ending: bool
    "Its run has just ended, and it ends by itself."


def rented(client: Client, runs: Iterable[RunDir]) -> list[Rented]:
    """Raises ApiError."""
    by_id = {run.id: run for run in runs}
    found = []
    for path, name, status, price in _listed(client):
        match = NAME.fullmatch(name)
        if match is None:
            continue
        run = by_id.get(match["run"])
        why = None if run is None else why_leaked(run, path, status)
        ending = run is not None and why is None and not _lives(run)
        found.append(Rented(path, name, match["run"], status, price, why, run is not None, ending))
    return found


def why_leaked(run: RunDir, path: str, status: str) -> str | None:
    """By what is known here: its run's state may be older than the run."""
    handle, state = handle_of(run), run.read_state()
    if status in ("EXITED", "ERROR"):
        return f"it has stopped ({status}) and is still kept"
    if (unwanted := rejected(run)) is not None and unwanted[0].path == path:
        return unwanted[1]
    if handle.id is not None and handle.path != path:
        return f"its run is in {handle.path.strip('/')}"
    if (late := overdue(run)) is not None:
        return late
    if _lives(run):
        return None
    ended = seconds_of(str(state.get("time", "")))
    if ended is not None and time.time() < ended + ENDING_SECONDS:
        return None
    return f"its run has ended: {state.get('state')}"


def in_use(one: Rented, run: RunDir, copy: Copy) -> bool:
    """Whether it has its run by the volume's records, whatever is known here. Raises VolumeError."""
    name, unwanted = NAME.fullmatch(one.name), rejected(run)
    if one.status in ("EXITED", "ERROR") or (unwanted is not None and unwanted[0].path == one.path):
        return False
    if overdue(run) is not None and handle_of(run).path == one.path:
        return False
    return name is not None and has_run(copy, int(name["number"]), one.path.rpartition("/")[2])


def _lives(run: RunDir) -> bool:
    return run.read_state().get("state", "submitted") in LIVING


def _listed(client: Client) -> Iterator[tuple[str, str, str, float]]:
    """Path, name, status and USD per hour."""
    pods = read(Pods, client.get("/pods", includeClusterPods="true"), "GET /pods").pods
    members: dict[str, list[float]] = {}
    for pod in pods:
        if pod.cluster is not None:
            members.setdefault(pod.cluster.id, []).append(pod.cost)
        elif pod.status != "TERMINATED":
            yield f"/pods/{pod.id}", pod.name, pod.status, pod.cost
    for cluster in read(Clusters, client.get("/clusters"), "GET /clusters").clusters:
        yield f"/clusters/{cluster.id}", cluster.name, "cluster", sum(members.get(cluster.id, ()))
