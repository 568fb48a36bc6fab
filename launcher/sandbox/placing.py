"""Choose a pod's data centre and its price."""

from __future__ import annotations

from launcher.sandbox import catalogue
from launcher.sandbox.faults import Dice
from launcher.sandbox.problem import ProblemError
from launcher.sandbox.records import Volume
from launcher.sandbox.request_bodies import Container, CreatePod, GpuConfig

NO_CAPACITY = "There are no longer any instances available with the requested specifications"
"RunPod's error message."


def place(body: Container, gpu: GpuConfig | None, volumes: dict[str, Volume], dice: Dice) -> str:
    """Return a data centre with free capacity. Raises ProblemError, with status 400 if there is none."""
    centres = body.dataCenterIds or list(catalogue.CENTRES)
    for mount in body.mounts.network:
        if mount.volumeId not in volumes:
            raise ProblemError(400, f"network volume {mount.volumeId} not found")
        if not mount.path.startswith("/"):
            raise ProblemError(400, f"mount path {mount.path!r} must be absolute")
        centres = [centre for centre in centres if centre == volumes[mount.volumeId].centre]
    if body.mounts.network and body.mounts.persistent:
        raise ProblemError(400, "mounts.persistent and mounts.network are mutually exclusive")
    if len(body.env) > 50:
        raise ProblemError(400, "at most 50 environment variables")
    no_capacity = ProblemError(400, NO_CAPACITY)
    if isinstance(body, CreatePod) and body.cpu is not None:
        flavor = catalogue.CPUS.get(body.cpu.id)
        count = body.cpu.vcpuCount
        if flavor is None or count > flavor.max_vcpu or count & (count - 1):
            raise ProblemError(400, f"cpu flavor {body.cpu.id} with {count} vCPUs does not exist")
        available = [centre for centre in centres if centre in catalogue.CENTRES]
    else:
        assert gpu is not None
        gpu_type = catalogue.GPUS.get(gpu.id)
        if gpu_type is None:
            raise ProblemError(400, f"gpu type {gpu.id} not found")
        if gpu.count > gpu_type.max_count:
            raise ProblemError(400, f"at most {gpu_type.max_count} of {gpu.id} in one pod")
        if gpu.allowedCudaVersions and not set(gpu.allowedCudaVersions) & set(catalogue.CUDA):
            raise no_capacity
        available = [centre for centre in centres if gpu_type.stock.get(centre, "NONE") != "NONE"]
    if not available:
        raise no_capacity
    if dice.happens("forbidden") is not None:
        raise ProblemError(403, "access to this resource pool is denied")
    if dice.happens("no-balance") is not None:
        raise ProblemError(402, "insufficient balance")
    if dice.happens("no-capacity") is not None:
        raise no_capacity
    return available[0]


def price_of(body: CreatePod, bid: float | None) -> float:
    """Return the price in USD per hour, from the catalogue or the bid."""
    if body.cpu is not None:
        return catalogue.CPUS[body.cpu.id].per_vcpu * body.cpu.vcpuCount
    assert body.gpu is not None
    gpu_type = catalogue.GPUS[body.gpu.id]
    price = gpu_type.secure if body.cloud == "SECURE" else gpu_type.community
    if bid is not None:
        if bid < price * catalogue.SPOT:
            raise ProblemError(400, f"bid {bid} is below the lowest bid, {price * catalogue.SPOT}")
        price = bid
    return price * body.gpu.count
