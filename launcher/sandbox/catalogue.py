"""GPU and CPU types that can be rented here, with prices and stock.

GPU ids and memory are those of RunPod's table of GPU types. Host memory of A5000, H100 and H200 is that of
its pricing page. Other host memory, prices and stock are invented, because RunPod's change daily; the order
of prices is RunPod's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU type."""

    id: str
    name: str
    memory: int
    "GPU memory in GB."
    host: int
    "Host memory per GPU of a pod, in GB."
    secure: float
    "USD per GPU and hour."
    community: float
    stock: dict[str, str]
    "Data centre -> NONE, LOW, MEDIUM or HIGH."
    max_count: int = 8


@dataclass(frozen=True)
class Cpu:
    """A CPU flavor."""

    id: str
    name: str
    group: str
    per_vcpu: float
    "USD per vCPU and hour."
    ram_per_vcpu: float
    "Host memory per vCPU in GB."
    max_vcpu: int = 32


CENTRES = {
    "EU-RO-1": "EUROPE",
    "EU-CZ-1": "EUROPE",
    "US-KS-2": "NORTH_AMERICA",
    "US-TX-3": "NORTH_AMERICA",
}
CUDA = ("12.8", "12.9", "13.0")
GPUS = {
    gpu.id: gpu
    for gpu in (
        Gpu("NVIDIA RTX A5000", "RTX A5000", 24, 25, 0.27, 0.16, {"EU-RO-1": "HIGH", "US-KS-2": "LOW"}),
        Gpu(
            "NVIDIA GeForce RTX 4090",
            "RTX 4090",
            24,
            41,
            0.69,
            0.34,
            {"EU-RO-1": "HIGH", "US-TX-3": "MEDIUM"},
        ),
        Gpu("NVIDIA RTX A6000", "RTX A6000", 48, 50, 0.49, 0.33, {"EU-RO-1": "MEDIUM", "US-KS-2": "HIGH"}),
        Gpu("NVIDIA L40S", "L40S", 48, 94, 0.86, 0.79, {"EU-CZ-1": "HIGH", "US-KS-2": "MEDIUM"}),
        Gpu("NVIDIA A100-SXM4-80GB", "A100 SXM", 80, 125, 1.49, 1.39, {"EU-RO-1": "LOW", "US-KS-2": "HIGH"}),
        Gpu(
            "NVIDIA H100 80GB HBM3", "H100 SXM", 80, 125, 2.99, 2.69, {"EU-RO-1": "LOW", "US-KS-2": "MEDIUM"}
        ),
        Gpu("NVIDIA H200", "H200 SXM", 141, 276, 3.99, 3.59, {"EU-CZ-1": "LOW", "US-KS-2": "NONE"}),
    )
}
CPUS = {
    cpu.id: cpu
    for cpu in (
        Cpu("cpu3c", "Compute-Optimized", "CPU3", 0.03, 2),
        Cpu("cpu3g", "General Purpose", "CPU3", 0.04, 4),
        Cpu("cpu5c", "Compute-Optimized", "CPU5", 0.035, 2),
    )
}
SPOT = 0.5
"Lowest bid, as a fraction of the on-demand price."


def gpu(gpu_type: Gpu, available: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": gpu_type.id,
        "name": gpu_type.name,
        "pool": None,
        "manufacturer": "NVIDIA",
        "memory": gpu_type.memory,
        "secure": True,
        "community": True,
        "price": {"secure": gpu_type.secure, "community": gpu_type.community},
        "maxCount": {"secure": gpu_type.max_count, "community": gpu_type.max_count},
    }
    if available:
        answer["availability"] = best(gpu_type.stock.values())
        answer["dataCenters"] = [
            {"id": centre, "name": centre, "availability": level} for centre, level in gpu_type.stock.items()
        ]
        answer["cudaVersions"] = [{"version": version, "available": True} for version in CUDA]
    return answer


def cpu(flavor: Cpu, available: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": flavor.id,
        "name": flavor.name,
        "group": flavor.group,
        "vcpu": {"min": 2, "max": flavor.max_vcpu},
        "ramGbPerVcpu": flavor.ram_per_vcpu,
        "price": {"securePerVcpu": flavor.per_vcpu, "serverlessPerVcpu": flavor.per_vcpu * 1.5},
    }
    if available:
        answer["availability"] = "HIGH"
        answer["dataCenters"] = [{"id": id, "name": id, "availability": "HIGH"} for id in CENTRES]
    return answer


def centre(id: str, include: set[str]) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": id,
        "name": id,
        "region": CENTRES[id],
        "globalNetwork": False,
        "networkVolumeTypes": ["STANDARD"],
        "compliance": [],
    }
    if "GPU_AVAILABILITY" in include:
        answer["gpuAvailability"] = [
            {"id": gpu_type.id, "name": gpu_type.name, "availability": gpu_type.stock[id]}
            for gpu_type in GPUS.values()
            if id in gpu_type.stock
        ]
    if "CPU_AVAILABILITY" in include:
        answer["cpuAvailability"] = [
            {"id": flavor.id, "name": flavor.name, "availability": "HIGH"} for flavor in CPUS.values()
        ]
    return answer


def best(levels: Iterable[str]) -> str:
    order = ("NONE", "LOW", "MEDIUM", "HIGH")
    return max(levels, key=order.index)
