"""Find out which GPU a site means by the type in its GRES: `a100`, `nvidia_h100_80gb_hbm3`, `rtxa6000`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from launcher.planning.hardware import GPU_TYPES, GpuType, model_of, plain


def likely_types(gres_type: str, features: Iterable[str] = ()) -> list[GpuType]:
    """All GPUs that the type may mean, smallest memory first.

    Empty if the name is unknown or names a MIG slice. With AutoDetect=nvml the type is the device name in
    lower case; otherwise it is whatever the administrator chose.
    """
    if not gres_type or re.search(r"\d+g\.\d+gb", gres_type):
        return []
    device = gres_type.replace("_", " ")
    for name in (device, f"nvidia {device}"):
        exact = [one for one in GPU_TYPES if re.fullmatch(one.names, name, re.IGNORECASE)]
        if exact and exact[0].names.count(".*") == 0:
            return exact[:1]
    called = plain(gres_type)
    tokens = {one.label: model_of(one.label) for one in GPU_TYPES}
    named = {token for token in tokens.values() if re.search(rf"{token}(?![0-9])", called)}
    if not named:
        return []
    longest = max(named, key=len)
    types = [one for one in GPU_TYPES if tokens[one.label] == longest]
    hints = " ".join(
        (gres_type, *(feature for feature in features if longest in plain(feature) or "mem" in feature))
    )
    for narrower in (
        [one for one in types if (size := re.search(r"(\d+)GB", one.label)) and _sized(size[1], hints)],
        [one for one in types if "PCIe" in one.label and "pci" in hints.lower()],
        [one for one in types if "PCIe" not in one.label and "sxm" in hints.lower()],
    ):
        both = [one for one in types if one in narrower]
        types = both or types
    return sorted(types, key=lambda one: one.memory)


def _sized(size: str, hints: str) -> bool:
    return re.search(rf"(?<!\d){size}(?!\d)", hints) is not None
