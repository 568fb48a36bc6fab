"""Find the GPU that a site means by the type in its GRES: `a100`, `nvidia_h100_80gb_hbm3`, `rtxa6000`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launcher.planning.hardware import GPU_TYPES, GpuType, model_of, plain


def likely_types(gres_type: str, features: Iterable[str] = ()) -> list[GpuType]:
    """Return all GPUs that the type may mean, smallest memory first; none for MIG slices and unknown names.

    With AutoDetect=nvml the type is the device name in lower case; otherwise the administrator chose it.
    """
    if not gres_type or re.search(r"\d+g\.\d+gb", gres_type):
        return []
    device = gres_type.replace("_", " ")
    for name in (device, f"nvidia {device}"):
        exact = [gpu for gpu in GPU_TYPES if re.fullmatch(gpu.names, name, re.IGNORECASE)]
        if exact and exact[0].names.count(".*") == 0:
            return exact[:1]
    plain_name = plain(gres_type)
    tokens = {gpu.label: model_of(gpu.label) for gpu in GPU_TYPES}
    named = {token for token in tokens.values() if re.search(rf"{token}(?![0-9])", plain_name)}
    if not named:
        return []
    longest = max(named, key=len)
    types = [gpu for gpu in GPU_TYPES if tokens[gpu.label] == longest]
    hints = " ".join(
        (gres_type, *(feature for feature in features if longest in plain(feature) or "mem" in feature))
    )
    sized = [gpu for gpu in types if (size := re.search(r"(\d+)GB", gpu.label)) and _sized(size[1], hints)]
    types = sized or types
    if "pci" in hints.lower():
        types = [gpu for gpu in types if "PCIe" in gpu.label] or types
    if "sxm" in hints.lower():
        types = [gpu for gpu in types if "PCIe" not in gpu.label] or types
    return sorted(types, key=lambda gpu: gpu.memory)


def _sized(size: str, hints: str) -> bool:
    return re.search(rf"(?<!\d){size}(?!\d)", hints) is not None
