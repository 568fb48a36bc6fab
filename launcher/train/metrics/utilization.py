"""How busy this rank keeps its GPU and the CPU."""

from __future__ import annotations

import time

import torch

SECONDS = 1.0
"Minimum time between two measurements: NVML averages over up to a second, and each is a system call."


class Utilization:
    """Measures about once a second, in percent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_nvml = device.type == "cuda"
        self._last: dict[str, int] = {}
        self._before = time.monotonic(), time.process_time()

    def read(self) -> dict[str, int]:
        """Return the last measurement: `cpu`, where 100 is one core busy since the previous measurement, and
        `utilization`, the share of time in which the GPU worked, if NVML reports it."""
        wall = time.monotonic() - self._before[0]
        if wall > 0 and (wall >= SECONDS or not self._last):
            now = time.monotonic(), time.process_time()
            wall, busy = (after - before for after, before in zip(now, self._before, strict=True))
            self._before = now
            self._last = {"cpu": round(100 * busy / wall), **self._gpu()}
        return self._last

    def _gpu(self) -> dict[str, int]:
        if not self._has_nvml:
            return {}
        try:
            return {"utilization": torch.cuda.utilization(self._device)}
        except Exception:  # nvidia-ml-py is not installed, or NVML does not report it for this GPU
            self._has_nvml = False
            return {}
