"""Pods of one name: one submission has made several where an answer was lost. One is kept, the others are
ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.runpod.answers import Clusters, Pods, read
from launcher.schedulers.runpod.errors import ApiError

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client


class UnendedError(SchedulerError):
    """There is one that is not wanted, and it goes on costing money."""

    def __init__(
        self, message: str, path: str, usd_per_hour: float | None = None, limit: float | None = None
    ):
        super().__init__(message)
        self.path, self.usd_per_hour, self.limit = path, usd_per_hour, limit


def ids_named(client: Client, name: str, cluster: bool) -> list[str]:
    """Of all of this name that live. Raises ApiError."""
    if cluster:
        clusters = read(Clusters, client.get("/clusters"), "GET /clusters").clusters
        return [one.id for one in clusters if one.name == name]
    pods = read(Pods, client.get("/pods"), "GET /pods").pods
    return [pod.id for pod in pods if pod.name == name and pod.living]


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
