"""Pods of one name: one submission has made several where an answer was lost. One is kept, the others are
ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.runpod.answers import Clusters, Pods, read
from launcher.schedulers.runpod.errors import ApiError

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client


NAME = re.compile(r"launcher-(?P<run>.+)-(?P<number>\d+)")
"Of a pod or cluster: launcher.render.pod.pod_name."


class UnendedError(SchedulerError):
    """There is one that is not wanted, and it goes on costing money."""

    def __init__(
        self, message: str, path: str, usd_per_hour: float | None = None, limit: float | None = None
    ):
        super().__init__(message)
        self.path, self.usd_per_hour, self.limit = path, usd_per_hour, limit


def ids_named(client: Client, name: str, cluster: bool) -> list[str]:
    """Of all of this name that live. Raises ApiError."""
    return [id for id, its in _living(client, cluster) if its == name]


def of_run(client: Client, run_id: str, cluster: bool) -> list[tuple[int, str]]:
    """Of all that live, whichever submission made them: its number and the id, the newest first.
    Raises ApiError."""
    found = [
        (int(match["number"]), id)
        for id, name in _living(client, cluster)
        if (match := NAME.fullmatch(name)) is not None and match["run"] == run_id
    ]
    return sorted(found, reverse=True)


def _living(client: Client, cluster: bool) -> list[tuple[str, str]]:
    """Id and name."""
    if cluster:
        clusters = read(Clusters, client.get("/clusters"), "GET /clusters").clusters
        return [(one.id, one.name) for one in clusters]
    pods = read(Pods, client.get("/pods"), "GET /pods").pods
    return [(pod.id, pod.name) for pod in pods if pod.living]


def keep_one(client: Client, cluster: bool, ids: Sequence[str], owner: Callable[[], str | None]) -> str:
    """Whoever owns the claim on the run (it has begun), else the first; the others are ended.

    Raises what `owner` raises: then all of them live on.
    """
    several = set(ids)
    claimed = owner() if len(several) > 1 else None
    kept = claimed if claimed is not None and claimed in several else ids[0]
    for other in several - {kept}:
        with suppress(UnendedError):  # it ends itself when it finds its run taken; `leaks` lists it
            end(client, f"/clusters/{other}" if cluster else f"/pods/{other}")
    return kept


def end(client: Client, path: str) -> None:
    """It is gone afterwards. Raises UnendedError."""
    try:
        client.delete(path)
    except ApiError as error:
        raise UnendedError(
            f"{path.strip('/')} could not be ended and goes on costing money: {error}; "
            "`launcher status` tries again, or end it in RunPod's console",
            path,
        ) from None
