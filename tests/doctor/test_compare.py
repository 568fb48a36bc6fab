"""What has changed since the cluster was healthy."""

from __future__ import annotations

from typing import Any

from launcher.doctor.compare import changes, lines
from launcher.doctor.examine import examine
from launcher.doctor.values import Expected, Finding, Measured


def findings(shm: int, torch: str, seconds: float = 0.1) -> list[Finding]:
    values: list[tuple[str, Any]] = [("shm", shm), ("connect", seconds)]
    values.append(("torch", {"torch": torch, "cuda": "", "nccl": "", "misfits": []}))
    return examine([Measured(check, 0, value) for check, value in values], Expected())


def test_only_what_matters_is_told() -> None:
    before, now = findings(2**31, "2.13.0"), findings(2**20, "2.14.0", 0.2)
    assert changes(before, now) == [
        "/dev/shm: good, 2 GiB -> broken, 1 MiB",
        "torch: good, 2.13.0, no CUDA -> good, 2.14.0, no CUDA",
    ]
    assert lines("doctor-1", changes(before, before)) == ["as in doctor-1"]
