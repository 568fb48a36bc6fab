"""Measure the ports of InfiniBand and RoCE adapters, from /sys/class/infiniband.

Source: the kernel's documentation, ABI/stable/sysfs-class-infiniband. Not yet run with an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from launcher.doctor.measure.guarded import guarded
from launcher.doctor.values import Measured


def measure_adapters(node: int, root: Path = Path("/")) -> Iterator[Measured]:
    """Yield the states of all ports of this node as one value, or nothing if there are no adapters."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    if ports:
        yield guarded("adapters", node, lambda: {_name(port): _port(port) for port in ports})


def _name(port: Path) -> str:
    return f"{port.parent.parent.name}:{port.name}"  # as NCCL_IB_HCA names it


def _port(port: Path) -> dict[str, str]:
    """Return the state and physical state as words, the rate with its unit, and the link layer."""
    state, physical = (
        re.sub(r"^\d+: *", "", (port / name).read_text().strip()) for name in ("state", "phys_state")
    )
    rate, link = ((port / name).read_text().strip() for name in ("rate", "link_layer"))
    return {"state": state, "physical": physical, "rate": rate.partition(" (")[0], "link": link}
