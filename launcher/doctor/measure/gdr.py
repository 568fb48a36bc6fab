"""Measure the requirements of GPUDirect RDMA from /sys and /proc. Not yet run on a GPU.

Sources: NVIDIA's documentation of GPUDirect RDMA; NCCL's documentation, "Troubleshooting", GPU Direct; sysfs'
documentation, ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.doctor.measure.guarded import guarded
from launcher.doctor.values import Measured

NVIDIA, DISPLAY = "0x10de", ("0x0300", "0x0302")
"PCI vendor, and the classes of GPUs: VGA and 3D controllers."
DMABUF_KERNEL = (5, 12)


def measure_gdr(node: int, root: Path = Path("/")) -> Iterator[Measured]:
    """Yield values of GPUDirect RDMA, or nothing if there are no InfiniBand or RoCE adapters or no GPUs."""
    adapters = {
        adapter.name: (adapter / "device").resolve() for adapter in (root / "sys/class/infiniband").glob("*")
    }
    gpus = list(_gpus(root))
    if not adapters or not gpus:
        return
    yield guarded("gdr", node, lambda: _support(root))
    for index, gpu in enumerate(gpus):
        distances = {name: _distance(gpu, adapter) for name, adapter in sorted(adapters.items())}
        yield Measured("gdr-adapters", node, distances, f"GPU {index}")


def _gpus(root: Path) -> Iterator[Path]:
    """Yield the PCI device of each GPU, in bus order, which is NVML's order."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _read(device / "vendor") == NVIDIA and _read(device / "class")[:6] in DISPLAY:
            yield device.resolve()


def _support(root: Path) -> dict[str, Any]:
    """Return whether the kernel lets adapters reach the GPUs' memory, through nvidia_peermem or dma-buf."""
    kernel = re.match(r"(\d+)\.(\d+)", _read(root / "proc/sys/kernel/osrelease"))
    new_kernel = kernel is not None and (int(kernel[1]), int(kernel[2])) >= DMABUF_KERNEL
    open_modules = "Open Kernel Module" in _read(root / "proc/driver/nvidia/version")
    modules = root / "sys/module"
    return {
        "peermem": any((modules / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
        "dmabuf": new_kernel and open_modules,
    }


def _distance(gpu: Path, adapter: Path) -> str:
    common = Path(os.path.commonpath([gpu, adapter]))
    if re.match(r"[0-9a-f]{4}:", common.name):  # a bridge or switch below the host bridge
        return "switch"
    if common.name.startswith("pci"):
        return "host bridge"
    nodes = {_read(one / "numa_node") for one in (gpu, adapter)}
    return "NUMA node" if len(nodes) == 1 and nodes.isdisjoint({"", "-1"}) else "system"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
