"""What the doctor has found out about a cluster and belongs into its profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.doctor.results import Results
from launcher.spec.base import GIB


@dataclass(frozen=True)
class Facts:
    """Each value with the reason that is written beside it."""

    env: Mapping[str, str] = field(default_factory=dict)
    "For `network.env`."
    why_env: str = ""
    gpu_type: str = ""
    "For `node.gpu`, as NVML names it; empty if the run had no GPUs or different ones."
    gpu_memory: str = ""
    "The memory of the smallest GPU, rounded down."
    why_gpu: str = ""

    def __bool__(self) -> bool:
        return bool(self.env or self.gpu_type)

    def or_else(self, older: Facts) -> Facts:
        """Return these facts, and those of an older run for what this one did not find out."""
        env, gpu = (self if self.env else older), (self if self.gpu_type else older)
        return Facts(env.env, env.why_env, gpu.gpu_type, gpu.gpu_memory, gpu.why_gpu)


def facts_of(results: Results) -> Facts:
    """Return what a run found out."""
    day = str(results.run.read_about().created or "")[:10]
    by = f"launcher doctor{f', {day}' * bool(day)}, run {results.run.id}"
    chosen = next((one.value for one in results.values if one.check == "chosen"), None) or {}
    names = {one.value for one in results.values if one.check == "gpu-name" and one.value}
    memory = min((one.value for one in results.values if one.check == "gpu-memory" and one.value), default=0)
    alike = len(names) == 1 and memory > 0
    return Facts(
        chosen.get("env") or {},
        f"{by}: {chosen.get('before')} without it",
        names.pop() if alike else "",
        f"{int(memory / GIB * 10) / 10:g}GiB" if alike else "",
        f"by NVML, {by}",
    )
