"""Checks of a node's GPUs, based on NVML."""

from __future__ import annotations

from typing import Any

from launcher.doctor.checks.host import version
from launcher.doctor.checks.row import Check, must_be
from launcher.doctor.values import Expected, Measured, Opinion
from launcher.planning.hardware import gpu_type_of
from launcher.spec.quantities import format_bytes

MEMORY_SHARE = 0.97
USED_BYTES = 2**30
"Memory that the driver and an idle process may hold on a GPU."
SLOWDOWNS = ("hardware slowdown", "hardware thermal slowdown", "power brake", "software thermal slowdown")
"Reasons for lower clocks that are faults. The power cap and idleness are not."


def count(measured: Measured, expected: Expected) -> Opinion:
    wanted = str(expected.gpus_per_node)
    if measured.value >= expected.gpus_per_node:
        return Opinion("good", wanted)
    return Opinion(
        "broken",
        wanted,
        "GPUs are missing: one fell off the bus, or the job was not given it.",
        "Look at `dmesg | grep -i xid`; reset or drain the node. If it has fewer, correct node.gpu.count.",
    )


def name(measured: Measured, expected: Expected) -> Opinion:
    if expected.gpu_type is None:
        return Opinion("good")
    wanted, actual = gpu_type_of(expected.gpu_type, expected.gpu_memory), gpu_type_of(measured.value)
    same = wanted == actual if wanted and actual else expected.gpu_type in measured.value
    if same:
        return Opinion("good", expected.gpu_type)
    cause = "The plan was made for another GPU."
    return Opinion("poor", expected.gpu_type, cause, "Correct node.gpu.type and node.gpu.memory.")


def memory(measured: Measured, expected: Expected) -> Opinion:
    if expected.gpu_memory is None:
        return Opinion("good")
    wanted = f"at least {format_bytes(expected.gpu_memory)}"
    if measured.value >= MEMORY_SHARE * expected.gpu_memory:
        return Opinion("good", wanted)
    cause = "The GPU has less memory than the profile says: a plan that fits there runs out of memory here."
    return Opinion("broken", wanted, cause, "Correct node.gpu.memory of the profile.")


def used(measured: Measured, expected: Expected) -> Opinion:
    wanted = f"at most {format_bytes(USED_BYTES)}"
    if measured.value["bytes"] <= USED_BYTES:
        return Opinion("good", wanted)
    cause = "Another process holds memory of this GPU: a plan that fits may run out of memory."
    return Opinion("broken", wanted, cause, "End the process; `nvidia-smi` shows its pid.")


def throttle(measured: Measured, expected: Expected) -> Opinion:
    if not set(measured.value) & set(SLOWDOWNS):
        return Opinion("good", "no slowdown")
    cause = "The GPU has lower clocks because of its temperature or power supply: all ranks wait for it."
    return Opinion("poor", "no slowdown", cause, "Check the node's cooling and power; drain the node.")


def mig(measured: Measured, expected: Expected) -> Opinion:
    if not measured.value or "MIG" in (expected.gpu_type or ""):
        return Opinion("good", "off")
    cause = "The GPU is divided (MIG): ranks see a part of it, and parts have no NVLink and no P2P."
    return Opinion("broken", "off", cause, "nvidia-smi -mig 0, or a profile of the MIG part.")


def driver(measured: Measured, expected: Expected) -> Opinion:
    """Judge whether the driver supports torch's CUDA version.

    A driver supports all CUDA versions up to its major version (CUDA Compatibility guide, minor version
    compatibility).
    """
    built = measured.value["torch"]
    if not built or version(measured.value["cuda"])[:1] >= version(built)[:1]:
        return Opinion("good", f"CUDA {built}" if built else "")
    return Opinion(
        "broken",
        f"CUDA {built}",
        "The driver is too old for the CUDA version that torch was built for.",
        f"Install a torch built for CUDA {measured.value['cuda']} or older, or a newer driver.",
    )


def gdr(measured: Measured, expected: Expected) -> Opinion:
    if measured.value["peermem"] or measured.value["dmabuf"]:
        return Opinion("good", "supported")
    cause = "Network adapters cannot reach the GPUs' memory (GPUDirect RDMA): NCCL copies through the host."
    cure = "modprobe nvidia-peermem, or use NVIDIA's open kernel modules with Linux 5.12 or newer (dma-buf)."
    return Opinion("poor", "supported", cause, cure)


def gdr_adapters(measured: Measured, expected: Expected) -> Opinion:
    """Judge whether an adapter is near the GPU.

    NCCL uses GPUDirect RDMA only within a host bridge, unless NCCL_NET_GDR_LEVEL allows more.
    """
    near = [name for name, distance in measured.value.items() if distance in ("switch", "host bridge")]
    if near:
        return Opinion("good", "one is near")
    cause = "No network adapter is near this GPU: NCCL copies through the host."
    return Opinion("poor", "one is near", cause, "Compare `nvidia-smi topo -m`; ask for other GPUs.")


def _support(value: Any) -> str:
    words = {"peermem": "nvidia_peermem", "dmabuf": "dma-buf"}
    return ", ".join(word for name, word in words.items() if value[name]) or "no"


ROWS = (
    Check(
        "nvml", "NVML", "node",
        unmeasured=Opinion(
            "poor", "installed", "Without nvidia-ml-py the GPUs are not examined.",
            "Install nvidia-ml-py for this Python; launcher's extra `train` has it.",
        ),
    ),
    Check(
        "gpus", "GPUs", "node", count,
        unmeasured=Opinion(
            "broken", "NVML answers", "NVML does not answer, so that torch finds no GPU either.",
            "Install the driver; in a container use --gpus or --nv.",
        ),
    ),
    Check(
        "driver", "GPU driver", "node", driver, lambda v: f"{v['driver']}, CUDA {v['cuda']}",
        alike="poor", fixed=True,
    ),
    Check("gpu-name", "GPU", "node", name),
    Check("gpu-memory", "GPU memory", "node", memory, format_bytes, fixed=True),
    Check(
        "gpu-used", "GPU memory in use", "node", used,
        lambda v: " ".join([format_bytes(v["bytes"]), *(f"pid {pid}" for pid in v["pids"])]),
    ),
    Check(
        "gpu-ecc", "uncorrected ECC errors", "node",
        must_be(0, Opinion(
            "broken", "0", "The GPU's memory returned wrong values since the driver was loaded.",
            "Reset the GPU or reboot the node; replace the GPU if they come again.",
        )),
    ),
    Check(
        "gpu-rows", "memory rows to remap", "node",
        must_be(0, Opinion(
            "broken", "0", "Faulty rows of the GPU's memory are waiting to be replaced, or cannot be.",
            "Reset the GPU or reboot the node; replace the GPU if it stays.",
        )),
    ),
    Check(
        "gpu-xid", "Xid errors since boot", "node",
        must_be(0, Opinion(
            "poor", "0", "The driver reported errors of this GPU.",
            "Look them up in NVIDIA's list of Xid errors: `dmesg | grep -i xid`.",
        )),
    ),
    Check("gpu-clocks", "lower clocks", "node", throttle, lambda v: ", ".join(v) or "none"),
    Check("gpu-mig", "MIG", "node", mig, lambda v: "on" if v else "off", fixed=True),
    Check(
        "gpu-nvlink", "inactive NVLinks", "node",
        must_be(0, Opinion(
            "poor", "0", "Links between the GPUs are down.",
            "Restart nvidia-fabricmanager; check the bridges.",
        )),
    ),
    Check(
        "gpu-p2p", "GPU to GPU", "node",
        must_be("ok", Opinion(
            "poor", "ok", "These GPUs cannot read each other's memory: NCCL copies through the host.",
            "Disable ACS in the BIOS and IOMMU translation on bare metal.",
        )),
    ),
    Check("gdr", "GPUDirect RDMA", "node", gdr, _support),
    Check(
        "gdr-adapters", "adapters", "node", gdr_adapters,
        lambda v: ", ".join(f"{name}: {distance}" for name, distance in v.items()),
    ),
)  # fmt: skip
