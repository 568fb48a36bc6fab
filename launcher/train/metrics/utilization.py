"""How busy this rank keeps its GPU and the CPU."""

from __future__ import annotations

import time

import torch

SECONDS = 1.0
"Time between two questions to NVML, which averages over up to a second."


class Utilization:
    """Measures between two readings, in percent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asks_nvml = device.type == "cuda"
        self._gpu: dict[str, int] = {}
        self._asked = float("-inf")
        self._before = time.monotonic(), time.process_time()

    def read(self) -> dict[str, int]:
        """Return `cpu`, 100 for one core that this process used all the time since the last reading, and
        `utilization`, the share of the time in which the GPU worked, if NVML tells it."""
        now = time.monotonic(), time.process_time()
        wall, busy = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        if self._asks_nvml and now[0] - self._asked >= SECONDS:
            self._asked = now[0]
            self._gpu = self._ask()
        return {**({"cpu": round(100 * busy / wall)} if wall > 0 else {}), **self._gpu}

    def _ask(self) -> dict[str, int]:
        try:
            return {"utilization": torch.cuda.utilization(self._device)}
        except Exception:  # nvidia-ml-py is not installed, or NVML does not tell it for this GPU
            self._asks_nvml = False
            return {}
