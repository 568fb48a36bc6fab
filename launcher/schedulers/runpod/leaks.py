"""Pods and clusters of launcher's that no run needs any more, and that go on costing money."""

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
    """A pod or cluster that RunPod lists under a name of launcher's."""

    path: str
    "Below the API's address."
    name: str
    run_id: str
    status: str
    usd_per_hour: float
    why: str | None
    "Why it is leaked; None: it is needed, or its run is not known on this machine."
    known: bool
    "Its run is known on this machine."
    ending: bool
    "Its run has just ended, and it ends by itself."


def rented(client: Client, runs: Iterable[RunDir]) -> list[Rented]:
    """Raises ApiError."""
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
    """Whether it has its run by the volume's records, whatever is known here. Raises VolumeError."""
    evidence, name = evidence_of(run), POD_NAME.fullmatch(one.name)
    rejected = evidence.rejected is not None and evidence.rejected.handle.path == one.path
    if one.status in ("EXITED", "ERROR") or rejected or name is None:
        return False
    if past_deadline(evidence) is not None and evidence.handle.path == one.path:
        return False
    return has_run(copy, int(name["number"]), one.path.rpartition("/")[2])


def is_past_deadline(run: RunDir) -> bool:
    return past_deadline(evidence_of(run)) is not None
