"""Pods and clusters of pods, as RunPod's REST API tells of them: validated, or one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.schedulers.runpod.errors import ApiError, HostileAnswerError, UnendedError, clean
from launcher.schedulers.runpod.handle import POD_NAME
from launcher.schedulers.runpod.lifecycle import POD_LIVES

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client

Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
"It becomes a part of addresses and of handles."
Name = Annotated[str, Field(max_length=200)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]
A = TypeVar("A", bound="Answer")


class Answer(BaseModel):
    """A part of what RunPod answers; fields that launcher does not need are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Membership(Answer):
    id: Id
    rank: int | None = None


class Gpus(Answer):
    id: Name


class Pod(Answer):
    id: Id
    name: str
    status: Literal["PROVISIONING", "STARTING", "RUNNING", "EXITED", "ERROR", "TERMINATED"]
    cost: Money
    "USD per hour as it is billed."
    gpu: Gpus | None = None
    cluster: Membership | None = None

    @property
    def living(self) -> bool:
        return self.status in POD_LIVES


class Created(Answer):
    id: Id
    costPerHr: Money = 0.0  # noqa: N815


class Pods(Answer):
    pods: list[Pod]


class Cluster(Answer):
    id: Id
    name: str


class Clusters(Answer):
    clusters: list[Cluster]


class LogLine(Answer):
    line: str
    ts: str = ""
    source: str = ""


def read(kind: type[A], value: Any, what: str) -> A:
    """Raises HostileAnswerError, without the answer's text: it may hold secrets."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise HostileAnswerError(
            f"RunPod: {what}: not what its API promises: {clean(where)}: {clean(first['msg'])}"
        ) from None


def get(client: Client, kind: type[A], path: str, **params: str) -> A:
    """Raises ApiError."""
    return read(kind, client.get(path, **params), f"GET {path}")


def living(client: Client, cluster: bool) -> list[tuple[str, str]]:
    """(id, name) of each living pod, or of each cluster. Raises ApiError."""
    if cluster:
        return [(one.id, one.name) for one in get(client, Clusters, "/clusters").clusters]
    return [(pod.id, pod.name) for pod in get(client, Pods, "/pods").pods if pod.living]


def ids_named(client: Client, name: str, cluster: bool) -> list[str]:
    """Ids of the living pods or clusters with this name. Raises ApiError."""
    return [id for id, its in living(client, cluster) if its == name]


def ids_of_run(client: Client, run_id: str, cluster: bool) -> list[tuple[int, str]]:
    """(submission, id) of the run's living pods or clusters, the newest submission first. Raises ApiError."""
    matches = ((id, POD_NAME.fullmatch(name)) for id, name in living(client, cluster))
    found = [(int(match["number"]), id) for id, match in matches if match and match["run"] == run_id]
    return sorted(found, reverse=True)


def members(client: Client, path: str) -> list[Pod]:
    """The pod `/pods/ID`, or all pods of the cluster `/clusters/ID`. Raises ApiError."""
    if path.startswith("/clusters/"):
        return get(client, Pods, f"{path}/pods").pods
    return [get(client, Pod, path)]


def status(client: Client, path: str) -> str:
    """The pod's status, or that of the cluster's first pod that has stopped; empty if RunPod does not know
    it. Raises ApiError."""
    try:
        pods = members(client, path)
    except ApiError as error:
        if error.status == 404:
            return ""
        raise
    stopped = [pod.status for pod in pods if not pod.living]
    return next(iter([*stopped, *(pod.status for pod in pods)]), "PROVISIONING")


def billed(client: Client, path: str) -> tuple[str, float]:
    """GPU type or `CPU`, and USD per hour; 0 if the price is unknown. Raises ApiError."""
    pods = members(client, path)
    gpus = [pod.gpu.id for pod in pods if pod.gpu is not None]
    return gpus[0] if gpus else "CPU", sum(pod.cost for pod in pods)


def rented(client: Client) -> Iterator[tuple[str, str, str, float]]:
    """(path, name, status, USD per hour) of everything on the account that is billed. Raises ApiError."""
    by_cluster: dict[str, float] = {}
    for pod in get(client, Pods, "/pods", includeClusterPods="true").pods:
        if pod.cluster is not None:
            by_cluster[pod.cluster.id] = by_cluster.get(pod.cluster.id, 0.0) + pod.cost
        elif pod.status != "TERMINATED":
            yield f"/pods/{pod.id}", pod.name, pod.status, pod.cost
    for one in get(client, Clusters, "/clusters").clusters:
        yield f"/clusters/{one.id}", one.name, "cluster", by_cluster.get(one.id, 0.0)


def end(client: Client, path: str) -> None:
    """End a pod or a cluster; one that is gone already is fine. Raises UnendedError."""
    try:
        client.delete(path)
    except ApiError as error:
        raise UnendedError(
            f"{path.strip('/')} could not be ended and goes on costing money: {error}; "
            "`launcher status` tries again, or end it in RunPod's console",
            path,
        ) from None
