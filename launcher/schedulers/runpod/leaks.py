"""Find leaked pods and clusters: rented by launcher, no longer needed by any run, and still costing money."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.rundir.layout import RunDir
from launcher.schedulers.runpod import pods
from launcher.schedulers.runpod.handle import POD_NAME
from launcher.schedulers.runpod.lifecycle import past_deadline, why_leaked
from launcher.schedulers.runpod.poller import evidence_of, has_run

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy


@dataclass(frozen=True)
class Rented:
    """A pod or cluster that RunPod lists under one of launcher's names."""

    path: str
    "Path in the API, such as `/pods/ID`."
    name: str
    run_id: str
    status: str
    usd_per_hour: float
    why: str | None
    "Why it is leaked, or None if it is needed or its run is not known on this machine."
    known: bool
    "Whether its run is known on this machine."
    ending: bool
    "Whether its run has just ended and the pod is about to end itself."


def rented(client: Client, runs: Iterable[RunDir]) -> list[Rented]:
    """Return everything rented under launcher's names. `runs` are the runs known here. Raises ApiError."""
    by_id = {run.id: run for run in runs}
    found = []
    for path, name, status, price in pods.rented(client):
        if (match := POD_NAME.fullmatch(name)) is None:
            continue
        run, why, ending = by_id.get(match["run"]), None, False
        if run is not None:
            evidence = evidence_of(run)
            why = why_leaked(evidence, path, status)
            ending = why is None and not evidence.living
        found.append(Rented(path, name, match["run"], status, price, why, run is not None, ending))
    return found


def in_use(one: Rented, run: RunDir, copy: Copy) -> bool:
    """Return whether the pod still has its run according to the records on the volume. Raises VolumeError."""
    evidence, name = evidence_of(run), POD_NAME.fullmatch(one.name)
    rejected = evidence.rejected is not None and evidence.rejected.handle.path == one.path
    if one.status in ("EXITED", "ERROR") or rejected or name is None:
        return False
    if past_deadline(evidence) is not None and evidence.handle.path == one.path:
        return False
    return has_run(copy, int(name["number"]), one.path.rpartition("/")[2])


def is_past_deadline(run: RunDir) -> bool:
    """Return whether the run's latest pod should have ended by now."""
    return past_deadline(evidence_of(run)) is not None
