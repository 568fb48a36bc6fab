"""Facts about a cluster that the doctor has found and that belong in its profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.doctor.results import Results
from launcher.spec.quantities import GIB


@dataclass(frozen=True)
class Facts:
    """Values for the profile, each with the reason that is written next to it."""

    env: Mapping[str, str] = field(default_factory=dict)
    "Variables for `network.env`."
    why_env: str = ""
    gpu_type: str = ""
    "GPU type for `node.gpu`, as NVML names it; empty if the run had no GPUs or different types."
    gpu_memory: str = ""
    "Memory of the smallest GPU, rounded down."
    why_gpu: str = ""

    def __bool__(self) -> bool:
        return bool(self.env or self.gpu_type)

    def or_else(self, older: Facts) -> Facts:
        """Return these facts, with those of an older run where this run found nothing."""
        env, gpu = (self if self.env else older), (self if self.gpu_type else older)
        return Facts(env.env, env.why_env, gpu.gpu_type, gpu.gpu_memory, gpu.why_gpu)


def facts_of(results: Results) -> Facts:
    """Return the facts that a run has found about its cluster."""
    day = results.run.read_about().created[:10]
    source = f"launcher doctor{f', {day}' * bool(day)}, run {results.run.id}"
    chosen = next((value.value for value in results.values if value.check == "chosen"), None) or {}
    names = {value.value for value in results.values if value.check == "gpu-name" and value.value}
    memory = min(
        (value.value for value in results.values if value.check == "gpu-memory" and value.value), default=0
    )
    alike = len(names) == 1 and memory > 0
    return Facts(
        chosen.get("env") or {},
        f"{source}: {chosen.get('before')} without it",
        names.pop() if alike else "",
        f"{int(memory / GIB * 10) / 10:g}GiB" if alike else "",
        f"by NVML, {source}",
    )
