"""Which scheduler has a run, and the states of many runs with one question to each cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from launcher.runs.find import RunNotFoundError
from launcher.runs.layout import RunDir
from launcher.schedulers import local
from launcher.schedulers.base import Cancelled, Scheduler, SchedulerError, Status

Site = tuple[str | None, str | None]


class Several(Protocol):
    def statuses(self, runs: Iterable[RunDir]) -> list[Status]: ...


@runtime_checkable
class CancelsAll(Protocol):
    def cancel_all(self, runs: Sequence[RunDir], name: str) -> Cancelled: ...


def scheduler_of(run: RunDir) -> tuple[Scheduler, str]:
    """With the handle of the run's latest job."""
    cluster: dict[str, Any] = run.read_about().get("cluster", {})
    if cluster.get("scheduler") == "slurm" and _was_sent(run):
        from launcher.schedulers.registry import slurm_at
        from launcher.schedulers.slurm.handle import handle_of

        slurm = slurm_at(*site(cluster))
        slurm.known.append(run)
        return slurm, str(handle_of(run))
    if cluster.get("scheduler") == "runpod" and _was_sent(run):
        from launcher.schedulers.registry import runpod
        from launcher.schedulers.runpod.place import handle_of as pod_of

        scheduler = runpod()
        scheduler.known.append(run)
        return scheduler, str(pod_of(run))
    if cluster.get("scheduler") == "ssh" and _was_sent(run) and not _is_there(run, cluster):
        from launcher.schedulers.registry import ssh_at
        from launcher.schedulers.ssh.scheduler import handle_of as ssh_handle_of

        ssh = ssh_at(tuple(cluster["ssh"]["hosts"]), site(cluster)[1])
        ssh.known.append(run)
        return ssh, ssh_handle_of(run)
    return local.LocalScheduler(), local.handle_of(run)


def status_of(run: RunDir) -> Status:
    scheduler, handle = scheduler_of(run)
    return scheduler.status(handle)


def statuses(runs: Iterable[RunDir]) -> list[Status]:
    """Of every run that is readable, in the order given; one that was deleted meanwhile is left out."""
    chosen = list(runs)
    by_place: dict[tuple[str, Site], list[RunDir]] = {}
    found: dict[RunDir, Status] = {}
    for run in chosen:
        cluster: dict[str, Any] = run.read_about().get("cluster", {})
        asked = cluster.get("scheduler") in ("slurm", "ssh", "runpod") and not _is_there(run, cluster)
        if asked and _was_sent(run):
            by_place.setdefault((cluster["scheduler"], site(cluster)), []).append(run)
            continue
        with contextlib.suppress(RunNotFoundError):
            found[run] = local.LocalScheduler().status(local.handle_of(run))
    for its in by_place.values():
        several = cast("Several", scheduler_of(its[0])[0])
        found |= dict(zip(its, several.statuses(its), strict=True))
    return [found[run] for run in chosen if run in found]


def cancel_all(runs: Iterable[RunDir], name: str) -> Cancelled:
    """Those that have not ended, with one question to each cluster. `name` says what they are together.
    Raises SchedulerError, also where all of them have ended."""
    done = Cancelled()
    for scheduler, its in _by_scheduler(runs):
        if isinstance(scheduler, CancelsAll):
            done += scheduler.cancel_all(its, name)
            continue
        for run in its:  # resumed elsewhere
            if not status_of(run).ended:
                scheduler.cancel(scheduler_of(run)[1])
                done += Cancelled(asked=1)
    if done == Cancelled():
        raise SchedulerError(f"{name}: none of its runs is running or waiting")
    return done


def remove(runs: Iterable[RunDir]) -> None:
    """Logs, checkpoints, everything, here and where they ran. Raises SchedulerError, OSError."""
    for scheduler, its in _by_scheduler(runs):
        scheduler.remove(its)


def _by_scheduler(runs: Iterable[RunDir]) -> list[tuple[Scheduler, list[RunDir]]]:
    by_scheduler: dict[Any, tuple[Scheduler, list[RunDir]]] = {}
    for run in runs:
        scheduler = scheduler_of(run)[0]
        where = site(run.read_about().get("cluster", {}))
        by_scheduler.setdefault((type(scheduler), where), (scheduler, []))[1].append(run)
    return list(by_scheduler.values())


def site(cluster: Mapping[str, Any]) -> Site:
    """Where its commands run, and where its runs are if that is not here."""
    if cluster.get("scheduler") == "runpod":  # one volume is one place
        section = cluster.get("runpod") or {}
        return f"runpod {section.get('volume_id')}", cluster.get("paths", {}).get("runs")
    login = cluster.get("login")
    if cluster.get("ssh"):
        login = ",".join(cluster["ssh"]["hosts"])
    return login, cluster.get("paths", {}).get("runs") if login is not None else None


def _is_there(run: RunDir, cluster: Mapping[str, Any]) -> bool:
    """On the host itself, of `scheduler: ssh`: the run directory, and no copy of it."""
    return bool(cluster.get("ssh")) and str(run.path) == f"{cluster['paths']['runs'].rstrip('/')}/{run.id}"


def _was_sent(run: RunDir) -> bool:
    """Not only rendered."""
    kinds = {"submitting", "submitted", "job"}
    return any(event.get("event") in kinds for event in run.read_events())
