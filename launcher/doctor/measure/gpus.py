"""Measure a node's GPUs through NVML. It has run on one H200; links between GPUs have not been measured."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

from launcher.doctor.measure.guarded import guarded, reason_of
from launcher.doctor.measure.host import torch_version
from launcher.doctor.values import Measured

SLOWDOWNS = {
    "nvmlClocksEventReasonSwPowerCap": "power cap",
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"Reasons for lower clocks: NVML's name and the doctor's."
MAX_LINKS = 36
"Number of NVLinks to query; no GPU has more (NVML_NVLINK_MAX_LINKS)."


def measure_gpus(node: int) -> Iterator[Measured]:
    """Yield the values of the GPUs that this process may use. Other GPUs may belong to another job."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        yield Measured("nvml", node, None, error=reason_of(error))
        return
    try:
        nvml.nvmlInit()
    except Exception as error:
        yield Measured("gpus", node, None, error=reason_of(error))
        return
    try:
        handles = visible_handles(nvml)
        yield Measured("gpus", node, len(handles))
        yield guarded("driver", node, lambda: _driver(nvml))
        for index, handle in handles.items():
            yield from _gpu(nvml, node, f"GPU {index}", handle)
        yield from _p2p(nvml, node, handles)
        for index, errors in _xid(nvml, handles):
            yield Measured("gpu-xid", node, errors, f"GPU {index}")
    finally:
        nvml.nvmlShutdown()


def visible_handles(nvml: Any) -> dict[int, Any]:
    """Return NVML's handles of the GPUs that this process may use, by index."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return {index: handles[index] for index in visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES", ""))}


def visible(uuids: Sequence[str], chosen: str) -> list[int]:
    """Return the indices of the GPUs that CUDA_VISIBLE_DEVICES (`chosen`) names, by index or UUID.

    Return all GPUs if it is empty, or if it names parts of GPUs (MIG).
    """
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    indices = [
        index
        for index, uuid in enumerate(uuids)
        if any(name == str(index) or uuid.startswith(name) for name in names)
    ]
    return indices or [*range(len(uuids))]


def _driver(nvml: Any) -> dict[str, str]:
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is CUDA 12.4
    return {
        "driver": _text(nvml.nvmlSystemGetDriverVersion()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "torch": torch_version()["cuda"],
    }


def _gpu(nvml: Any, node: int, name: str, handle: Any) -> Iterator[Measured]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    yield guarded("gpu-name", node, lambda: _text(nvml.nvmlDeviceGetName(handle)), name)
    yield Measured("gpu-memory", node, memory.total, name)
    yield guarded("gpu-used", node, lambda: _used(nvml, handle, memory), name)
    # Unsupported values are skipped: consumer GPUs have no ECC, for example.
    measures: dict[str, Callable[[], Any]] = {
        "gpu-ecc": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "gpu-rows": lambda: _rows(nvml.nvmlDeviceGetRemappedRows(handle)),
        "gpu-clocks": lambda: _slowdowns(nvml, handle),
        "gpu-mig": lambda: nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE,
    }
    for check, measure in measures.items():
        try:
            yield Measured(check, node, measure(), name)
        except nvml.NVMLError_NotSupported:
            continue
        except nvml.NVMLError as error:
            yield Measured(check, node, None, name, str(error))
    links = list(_links(nvml, handle))
    if any(links):
        yield Measured("gpu-nvlink", node, links.count(False), name)


def _used(nvml: Any, handle: Any, memory: Any) -> dict[str, Any]:
    pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return {"bytes": memory.used, "pids": [pid for pid in pids if pid != os.getpid()]}


def _rows(rows: Any) -> int:
    """Return the number of faulty rows not yet replaced. `rows` is (correctable, uncorrectable, pending,
    failed)."""
    _, _, pending, failed = rows
    return int(bool(pending)) + int(bool(failed))


def _slowdowns(nvml: Any, handle: Any) -> list[str]:
    bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return [word for name, word in SLOWDOWNS.items() if bits & getattr(nvml, name)]


def _links(nvml: Any, handle: Any) -> Iterator[bool]:
    for link in range(MAX_LINKS):
        with suppress(nvml.NVMLError):
            yield nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED


def _p2p(nvml: Any, node: int, handles: Mapping[int, Any]) -> Iterator[Measured]:
    index = nvml.NVML_P2P_CAPS_INDEX_READ
    index = index[0] if isinstance(index, tuple) else index  # a stray comma in nvidia-ml-py
    for first, second in combinations(handles, 2):
        with suppress(nvml.NVMLError):
            status = nvml.nvmlDeviceGetP2PStatus(handles[first], handles[second], index)
            word = "ok" if status == nvml.NVML_P2P_STATUS_OK else f"status {status}"
            yield Measured("gpu-p2p", node, word, f"GPU {first} and {second}")


def _xid(nvml: Any, handles: Mapping[int, Any]) -> Iterator[tuple[int, int]]:
    """Yield (GPU, number of Xid errors in the kernel log), or nothing if this user cannot read the log."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return
    if log.returncode:
        return
    errors = re.findall(r"NVRM: Xid \(PCI:([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f]+)", log.stdout)
    for index, handle in handles.items():
        domain, bus, device = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).partition(".")[0].split(":")
        address = (int(domain, 16), int(bus, 16), int(device, 16))
        yield index, sum(tuple(int(part, 16) for part in error.split(":")) == address for error in errors)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
