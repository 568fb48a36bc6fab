"""The `runpod:` section of a cluster profile, and the longest time and highest cost that it allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from launcher.planning.cost import hours, usd
from launcher.spec.quantities import Memory
from launcher.spec.scheduler_section import Section

if TYPE_CHECKING:
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job


class RunPod(Section):
    """What launcher may rent, and the maximum price."""

    missing: ClassVar[str] = "a `runpod:` section with at least gpu_id or cpu_id"
    runs_elsewhere: ClassVar[bool] = True
    rents: ClassVar[bool] = True
    starts_container: ClassVar[bool] = True
    asks_price: ClassVar[str] = "; `launcher submit --dry-run` asks RunPod"

    gpu_id: str | None = None
    "Id of the GPU type in RunPod's catalogue; `node.gpu` describes it."
    other_gpus: dict[str, Memory] = {}
    "Further GPU types that may be rented, with the memory of one GPU. The job is planned for each."
    cpu_id: str | None = None
    "Flavor of the pods of jobs without a GPU."
    vcpu: int | None = Field(None, ge=2)
    "vCPUs of a pod without a GPU: a power of two."
    clouds: tuple[Literal["SECURE", "COMMUNITY"], ...] = Field(("SECURE",), min_length=1)
    "Clouds to rent in. Network volumes exist in SECURE only, so launcher never rents COMMUNITY."
    data_centers: tuple[str, ...] = ()
    "Data centre of the volume, if the API key may not ask for it. Pods must be in the same one."
    disk_gb: PositiveInt = 50
    "Disk of the pod in GB."
    volume_id: str | None = None
    "Network volume, mounted at `volume_path`. It holds the run directories."
    volume_path: str = "/workspace"
    "Path of the network volume in the pod."
    registry_id: str | None = None
    "RunPod's id of the credentials for a private image registry. Not for spot pods or several nodes."
    cuda_versions: tuple[str, ...] = ()
    "Rent only hosts whose driver runs one of these CUDA versions."
    ports: tuple[str, ...] = ()
    "Ports of the pod to expose, in RunPod's notation."
    max_hours: PositiveFloat = 24
    "Time limit of one pod in hours, from its creation, whatever the training does."
    max_price: PositiveFloat | None = None
    "Highest price of all pods of a run together, in USD per hour. A pod billed above it is ended at once."
    budget: PositiveFloat | None = None
    "USD for all pods of a run together. The unspent rest limits the hours."
    unplanned: bool = False
    "Rent although launcher does not know whether the job fits."
    bid_per_gpu: PositiveFloat | None = None
    "USD per hour: rent an interruptible (spot) pod, which RunPod takes away if another user pays more."
    server_limit: bool = True
    """Let RunPod end each pod after its time, even if the start script never ran. RunPod has no such limit
    for pods of several nodes. false rents without the limit; a spot pod always has it."""

    @model_validator(mode="after")
    def _something_to_rent(self) -> RunPod:
        if self.gpu_id is None and self.cpu_id is None:
            raise ValueError("give gpu_id (with node.gpu), or cpu_id and vcpu")
        if (self.cpu_id is None) != (self.vcpu is None):
            raise ValueError("cpu_id and vcpu belong together")
        if self.vcpu is not None and self.vcpu & (self.vcpu - 1):
            raise ValueError(f"vcpu: {self.vcpu} is not a power of two")
        if self.gpu_id is None and (self.other_gpus or self.bid_per_gpu):
            raise ValueError("other_gpus and bid_per_gpu need gpu_id")
        return self

    def contradictions(self, cluster: Cluster) -> Iterator[tuple[tuple[str, ...], str]]:
        if self.gpu_id is not None and cluster.node.gpu is None:
            yield ("runpod", "gpu_id"), "needs `node.gpu` (type, count, memory)"
        if self.gpu_id is None and cluster.gpus_per_node:
            yield ("node", "gpu"), "needs runpod.gpu_id"

    def alternatives(self, cluster: Cluster) -> tuple[Cluster, ...]:
        return tuple(self._with_gpu(cluster, gpu_id) for gpu_id in self.other_gpus if gpu_id != self.gpu_id)

    def _with_gpu(self, cluster: Cluster, gpu_id: str) -> Cluster:
        assert cluster.node.gpu is not None  # other_gpus need gpu_id, and that needs node.gpu
        gpu = cluster.node.gpu.model_copy(update={"type": gpu_id, "memory": self.other_gpus[gpu_id]})
        section = self.model_copy(update={"gpu_id": gpu_id})
        return cluster.with_node(gpu=gpu).model_copy(update={"runpod": section, "usd_per_gpu_hour": None})

    def worst_case(
        self, job: Job, nodes: int, usd_per_hour: float | None, dearest: tuple[float, int] | None
    ) -> tuple[float | None, str]:
        """Return the worst-case cost in USD (None if unlimited or unknown) and an explanation.

        It covers every pod that the run rents without another command from you.
        """
        seconds = self.max_seconds(job)
        limit = "resources.time" if seconds == job.resources.time else self._named("max_hours")
        price, paid = usd_per_hour, seconds
        if dearest is not None:
            price, paid = dearest
        elif price is not None:
            paid = self.affordable(price, seconds, 0.0)
        if paid < seconds:
            seconds, limit = paid, "what the budget pays for"
        pods = 1 + job.retries.preemptions if self.bid_per_gpu is not None and job.requeue else 1
        most = f"{hours(seconds / 3600)} ({limit})"
        if pods > 1 and self.budget is None:
            most = f"{pods} pods of {most} each, one after the other (retries.preemptions)"
        if (why := self.no_server_limit(nodes)) is not None:
            day = "its hourly price" if price is None else f"{usd(24 * price)} a day"
            return None, (
                f"no limit ({why}): {most} if the start script runs; if it never runs, the pod costs {day} "
                "until `launcher status` or `launcher runpod leaks --end` ends it"
            )
        if price is None and self.max_price is not None:
            price, most = self.max_price, f"{most} at max_price"
        elif price is not None and price != usd_per_hour:
            most = f"{most} at the most expensive offer, {usd(price)}/h"
        total = None if price is None else price * seconds / 3600 * pods
        if self.budget is not None and (total is None or total > self.budget):
            total, most = self.budget, f"{most}, limited by the budget"
        if total is None:
            return None, f"not known without a price: {most}, then RunPod itself ends the pod"
        return total, f"{most}, then RunPod itself ends the pod"

    def no_server_limit(self, nodes: int) -> str | None:
        """Return why RunPod itself does not end the pods at their time limit; None if it does."""
        if nodes > 1:
            return "RunPod has no time limit for a cluster of pods"
        if not self.server_limit and self.bid_per_gpu is None:
            return "server_limit: false"
        return None

    def max_seconds(self, job: Job) -> int:
        """Return the time limit of one pod: max_hours, or the job's own time limit if that is shorter."""
        seconds = int(self.max_hours * 3600)
        return seconds if job.resources.time is None else min(seconds, job.resources.time)

    def affordable(self, usd_per_hour: float, seconds: int, spent: float) -> int:
        """Return how many of `seconds` the budget pays for. `spent`: USD that the run's earlier pods cost."""
        if self.budget is None or not usd_per_hour:
            return seconds
        return max(0, min(seconds, int((self.budget - spent) / usd_per_hour * 3600)))

    def _named(self, field: str) -> str:
        return field if field in self.model_fields_set else f"{field}, by default"
