"""Read pods and clusters of pods from RunPod's REST API, and validate what it answers."""

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
"An id that becomes part of URLs and handles."
Name = Annotated[str, Field(max_length=200)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]
A = TypeVar("A", bound="Answer")


class Answer(BaseModel):
    """Base class of validated answers. Fields that launcher does not need are ignored."""

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
    "Billed USD per hour."
    gpu: Gpus | None = None
    cluster: Membership | None = None

    @property
    def living(self) -> bool:
        return self.status in POD_LIVES


class Created(Answer):
    id: Id
    usd_per_hour: Money = Field(0.0, validation_alias="costPerHr")


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
    """Validate an answer as `kind`.

    Raises HostileAnswerError. Its message omits the answer's text, which may hold secrets.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise HostileAnswerError(
            f"RunPod: {what}: the answer does not match RunPod's API: {clean(where)}: {clean(first['msg'])}"
        ) from None


def get(client: Client, kind: type[A], path: str, **params: str) -> A:
    """Send a GET request and validate the answer as `kind`. Raises ApiError."""
    return read(kind, client.get(path, **params), f"GET {path}")


def living(client: Client, cluster: bool) -> list[tuple[str, str]]:
    """Return (id, name) of each live pod, or of each cluster. Raises ApiError."""
    if cluster:
        return [(cluster.id, cluster.name) for cluster in get(client, Clusters, "/clusters").clusters]
    return [(pod.id, pod.name) for pod in get(client, Pods, "/pods").pods if pod.living]


def ids_named(client: Client, name: str, cluster: bool) -> list[str]:
    """Return the ids of the live pods or clusters with this name. Raises ApiError."""
    return [id for id, its in living(client, cluster) if its == name]


def ids_of_run(client: Client, run_id: str, cluster: bool) -> list[tuple[int, str]]:
    """Return (submission, id) of the run's live pods or clusters, latest first. Raises ApiError."""
    matches = ((id, POD_NAME.fullmatch(name)) for id, name in living(client, cluster))
    submissions = [(int(match["number"]), id) for id, match in matches if match and match["run"] == run_id]
    return sorted(submissions, reverse=True)


def members(client: Client, path: str) -> list[Pod]:
    """Return the pod `/pods/ID`, or all pods of the cluster `/clusters/ID`. Raises ApiError."""
    if path.startswith("/clusters/"):
        return get(client, Pods, f"{path}/pods").pods
    return [get(client, Pod, path)]


def status(client: Client, path: str) -> str:
    """Return the status of a pod, or of a cluster's first stopped pod; "" if RunPod does not know it.

    Raises ApiError.
    """
    try:
        pods = members(client, path)
    except ApiError as error:
        if error.status == 404:
            return ""
        raise
    stopped = [pod.status for pod in pods if not pod.living]
    return next(iter([*stopped, *(pod.status for pod in pods)]), "PROVISIONING")


def billed(client: Client, path: str, nodes: int) -> tuple[str, float]:
    """Return the GPU type (or `CPU`) and the billed USD per hour (0 if unknown). Raises ApiError.

    A pod of the cluster that is not listed yet, or has no price, counts with the highest price of the others.
    """
    pods = members(client, path)
    gpus = [pod.gpu.id for pod in pods if pod.gpu is not None]
    costs = [pod.cost for pod in pods if pod.cost]
    missing = max(nodes - len(costs), 0)
    return gpus[0] if gpus else "CPU", sum(costs) + missing * max(costs, default=0.0)


def rented(client: Client) -> Iterator[tuple[str, str, str, float]]:
    """Yield (path, name, status, USD per hour) of everything billed to the account. Raises ApiError."""
    by_cluster: dict[str, float] = {}
    for pod in get(client, Pods, "/pods", includeClusterPods="true").pods:
        if pod.cluster is not None:
            by_cluster[pod.cluster.id] = by_cluster.get(pod.cluster.id, 0.0) + pod.cost
        elif pod.status != "TERMINATED":
            yield f"/pods/{pod.id}", pod.name, pod.status, pod.cost
    for cluster in get(client, Clusters, "/clusters").clusters:
        yield f"/clusters/{cluster.id}", cluster.name, "cluster", by_cluster.get(cluster.id, 0.0)


def end(client: Client, path: str) -> None:
    """End a pod or a cluster. Do nothing if it is already gone. Raises UnendedError."""
    try:
        client.delete(path)
    except ApiError as error:
        raise UnendedError(
            f"{path.strip('/')} could not be ended and keeps costing money: {error}; "
            "`launcher status` tries again, or end it in RunPod's console",
            path,
        ) from None
