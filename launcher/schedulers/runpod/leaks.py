"""Find and end leaked pods: rented by launcher, no longer needed by any run, and still costing money."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from launcher.rundir.find import runs_in
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.lookup import statuses
from launcher.schedulers.registry import of_record
from launcher.schedulers.runpod import pods
from launcher.schedulers.runpod.api import Client
from launcher.schedulers.runpod.errors import UnendedError
from launcher.schedulers.runpod.handle import POD_NAME
from launcher.schedulers.runpod.lifecycle import past_deadline, why_leaked
from launcher.schedulers.runpod.poller import evidence_of
from launcher.schedulers.runpod.records import has_run
from launcher.schedulers.runpod.scheduler import RunPodScheduler


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

    @property
    def id(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class RentedPods:
    """All pods and clusters rented under launcher's names."""

    rented: tuple[Rented, ...]
    doubts: Mapping[str, str]
    "Path of a leaked pod -> why it is ended only if a person names it."


def list_rented(client: Client) -> RentedPods:
    """Update the records of the runs, and return what is rented and which of it is leaked.

    Raises: ApiError.
    """
    runs = {run.id: run for run in runs_in() if run.read_about().runpod is not None}
    named = {rented.run_id for rented in _rented(client, runs.values())} & runs.keys()
    # Polling a run ends its pod if it is past its deadline, so such runs are left out.
    statuses([runs[name] for name in named if past_deadline(evidence_of(runs[name])) is None])
    all_rented, doubts = _rented(client, runs.values()), dict[str, str]()
    for index, rented in enumerate(all_rented):
        if rented.why is None:
            continue
        try:
            if _in_use(rented, runs[rented.run_id]):
                all_rented[index] = replace(rented, why=None)
        except SchedulerError as error:
            doubts[rented.path] = f"{rented.why}; not ended, as it may have its run: {error}"
    return RentedPods(tuple(all_rented), doubts)


def end(client: Client, chosen: Iterable[Rented]) -> dict[str, str]:
    """End pods and clusters. Return path -> reason for each that could not be ended."""
    problems = {}
    for pod in chosen:
        try:
            pods.end(client, pod.path)
        except UnendedError as error:
            problems[pod.path] = str(error)
    return problems


def _rented(client: Client, runs: Iterable[RunDir]) -> list[Rented]:
    """Return everything rented. `runs` are the runs known here. Raises ApiError."""
    by_id = {run.id: run for run in runs}
    rented = []
    for path, name, status, price in pods.rented(client):
        if (match := POD_NAME.fullmatch(name)) is None:
            continue
        run, why, ending = by_id.get(match["run"]), None, False
        if run is not None:
            evidence = evidence_of(run)
            why = why_leaked(evidence, path, status)
            ending = why is None and not evidence.living
        rented.append(Rented(path, name, match["run"], status, price, why, run is not None, ending))
    return rented


def _in_use(rented: Rented, run: RunDir) -> bool:
    """Return whether the pod still runs its run, according to the volume's records. Raises VolumeError."""
    evidence = evidence_of(run)
    rejected = evidence.rejected is not None and evidence.rejected.handle.path == rented.path
    if rented.status in ("EXITED", "ERROR") or rejected:
        return False
    if past_deadline(evidence) is not None and evidence.handle.path == rented.path:
        return False
    copy = cast(RunPodScheduler, of_record(run.read_about().cluster)).copy(run)
    return has_run(copy, int(rented.name.rpartition("-")[2]), rented.id)
