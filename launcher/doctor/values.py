"""Values of the doctor: what was measured, what is expected, and the findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from launcher.spec.records import RunRecord

if TYPE_CHECKING:
    from launcher.doctor.job_needs import JobNeeds

Verdict = Literal["good", "poor", "broken"]
"`poor`: training works, but is slow or at risk. `broken`: it fails, or computes wrong values."

Part = Literal["run", "node", "network", "collectives", "model", "search", "job"]

Level = Literal["quick", "standard", "thorough"]

MODULE = "launcher.doctor"
"`python -m launcher.doctor` examines a node. start.sh runs it before the ranks."

START = "launcher.doctor.start"
"The module that the ranks of the doctor's own run execute."


@dataclass(frozen=True)
class Measured:
    """One measured value."""

    check: str
    "Name of a row of `checks.CHECKS`."
    node: int
    value: Any
    "A number, text, bool or mapping, or None if it could not be measured."
    subject: str = ""
    "Which of several things was measured: `GPU 3`, a folder, `node 0 to node 1`."
    error: str = ""
    "Why it could not be measured, or what failed."


@dataclass(frozen=True)
class Expected:
    """What the profile and the plan promise about each node. None means unknown."""

    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    gpu_memory: int | None = None
    "Bytes."
    memory: int | None = None
    "Host memory in bytes."
    shm: int | None = None
    "Size of /dev/shm in bytes."
    inter_node: float | None = None
    "Bandwidth of a node's network in bytes/s."
    interface: str | None = None
    nvme_dir: str | None = None
    command: bool = False
    "Whether the job is a user's command, which may not use torch."
    shared: bool = True
    "Whether all nodes share the run folder."
    job: JobNeeds | None = None
    "What the job of `launcher doctor --job` needs."

    @classmethod
    def of(cls, about: RunRecord, plan: Mapping[str, Any], needs: JobNeeds | None = None) -> Expected:
        """Read run.json and plan.json."""
        layout, job, cluster = plan.get("layout", {}), about.job, about.cluster
        return cls(
            nodes=layout.get("nodes", 1),
            ranks_per_node=layout.get("ranks_per_node", 1),
            gpus_per_node=layout.get("gpus_per_node", 0),
            gpu_type=cluster.node.gpu.type,
            gpu_memory=cluster.node.gpu.memory,
            memory=job.resources.memory_per_node or cluster.node.memory,
            shm=cluster.container.shm,
            inter_node=cluster.network.inter_node,
            interface=cluster.network.interface,
            command=job.command is not None,
            shared=not about.apart,
            job=needs,
            nvme_dir=job.train.nvme_dir,
        )

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def backend(self) -> str:
        """The backend that training uses for its tensors."""
        return "nccl" if self.gpus_per_node else "gloo"


class Opinion(NamedTuple):
    """A verdict on one measured value."""

    verdict: Verdict
    expected: str = ""
    cause: str = ""
    cure: str = ""


@dataclass(frozen=True)
class Finding:
    """A measured value and its verdict. Equal findings of several nodes and subjects are merged."""

    check: str
    title: str
    part: Part
    verdict: Verdict
    nodes: tuple[int, ...]
    subjects: tuple[str, ...]
    measured: str
    "The value as text."
    expected: str
    cause: str = ""
    cure: str = ""
