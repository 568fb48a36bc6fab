"""Which scheduler has a run, and the states of many runs with one question to each cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from launcher.rundir.find import RunNotFoundError
from launcher.rundir.layout import RunDir
from launcher.schedulers import local
from launcher.schedulers.base import Cancelled, Scheduler, SchedulerError, Status

Site = tuple[str | None, str | None, str | None]


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
    """In the order given. One that was deleted meanwhile is left out, one that cannot be read is damaged."""
    return list(states_of(runs).values())


def states_of(runs: Iterable[RunDir]) -> dict[RunDir, Status]:
    """As `statuses`, each with its run."""
    chosen = list(runs)
    by_place: dict[tuple[str, Site], list[RunDir]] = {}
    found: dict[RunDir, Status] = {}
    for run in chosen:
        try:
            cluster: dict[str, Any] = run.read_about().get("cluster", {})
            asked = cluster.get("scheduler") in ("slurm", "ssh", "runpod") and not _is_there(run, cluster)
            if asked and _was_sent(run):
                by_place.setdefault((cluster["scheduler"], site(cluster)), []).append(run)
            else:
                found[run] = local.LocalScheduler().status(local.handle_of(run))
        except DAMAGE as error:
            if run.submitted.exists():
                found[run] = _damaged(run, error)
    for its in by_place.values():
        found |= _statuses_there(its)
    return {run: found[run] for run in chosen if run in found}


def _statuses_there(runs: Sequence[RunDir]) -> dict[RunDir, Status]:
    """Of runs in one place. Where their records are damaged, each is asked for by itself."""
    try:
        several = cast("Several", scheduler_of(runs[0])[0])
        return dict(zip(runs, several.statuses(runs), strict=True))
    except DAMAGE as error:
        if len(runs) == 1:
            return {runs[0]: _damaged(runs[0], error)}
        return {run: status for one in runs for run, status in _statuses_there([one]).items()}


DAMAGE = (RunNotFoundError, LookupError, TypeError, ValueError, AttributeError, OSError)
"What reading the records of a run raises when they are not as launcher writes them."


def _damaged(run: RunDir, error: Exception) -> Status:
    reason = str(error) if isinstance(error, RunNotFoundError) else f"{type(error).__name__}: {error}"
    return Status(run.id, "", "damaged", local.handle_of(run), reason=reason, path=str(run.path))


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
    """Where its commands run, where its runs are if that is not here, which of several Slurm clusters."""
    if cluster.get("scheduler") == "runpod":  # one volume is one place
        section = cluster.get("runpod") or {}
        return f"runpod {section.get('volume_id')}", cluster.get("paths", {}).get("runs"), None
    login = cluster.get("login")
    if cluster.get("ssh"):
        login = ",".join(cluster["ssh"]["hosts"])
    runs = cluster.get("paths", {}).get("runs") if login is not None else None
    return login, runs, (cluster.get("slurm") or {}).get("clusters")


def _is_there(run: RunDir, cluster: Mapping[str, Any]) -> bool:
    """On the host itself, of `scheduler: ssh`: the run directory, and no copy of it."""
    return bool(cluster.get("ssh")) and str(run.path) == f"{cluster['paths']['runs'].rstrip('/')}/{run.id}"


def _was_sent(run: RunDir) -> bool:
    """Not only rendered."""
    kinds = {"submitting", "submitted", "job"}
    return any(event.get("event") in kinds for event in run.read_events())
