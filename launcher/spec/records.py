"""Values read from run.json and state.json, which any version of launcher may have written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from launcher.spec.json_object import Record

if TYPE_CHECKING:
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job

STATES = frozenset(
    {
        "rendered",
        "submitted",
        "running",
        "stopping",
        "lost",
        "succeeded",
        "failed",
        "interrupted",
        "cancelled",
    }
)
"States of a run. `rendered`: written by `launcher render --out` and not started since."


LIVING = frozenset({"submitted", "running", "stopping"})
"States of a run that has not ended."

_DIGEST = re.compile("[0-9a-f]{20}")


class _Paths(Record):
    runs: str | None = None
    python: str | None = None


class _Ssh(Record):
    hosts: list[str]


class _Slurm(Record):
    clusters: str | None = None
    partition: str | None = None
    comment: bool = True
    signal_seconds: int | None = None
    "How long before the time limit Slurm sends its warning."


class _RunPod(Record):
    gpu_id: str | None = None
    volume_id: str | None = None
    volume_path: str = ""
    bid_per_gpu: float | None = None


class _Gpu(Record):
    type: str | None = None
    memory: int | None = None


class _Node(Record):
    gpu: _Gpu = _Gpu()
    memory: int | None = None


class _Network(Record):
    inter_node: float | None = None
    interface: str | None = None
    env: dict[str, str] | None = None


class _Container(Record):
    shm: int | None = None


class _FailurePattern(Record):
    pattern: str
    class_: str


class _Batch(Record):
    global_: int | None = None


class _Resources(Record):
    memory_per_node: int | None = None
    cpus_per_node: int | None = None


class _Train(Record):
    nvme_dir: str | None = None


class _Sweep(Record):
    id: str
    task: int = 0
    "The run's number in the sweep."
    values: list[str] = []
    "The texts of `--set` that distinguish the run."
    runs: int | None = None
    "Number of runs of the sweep, where they are submitted one by one."
    at_once: int | None = None
    "How many runs of the sweep run at the same time. On ssh hosts: on the run's host."
    at_once_in_all: int | None = None
    "On ssh hosts: how many run at the same time on all hosts together."


class CodeRecord(Record):
    commit: str = ""
    changed_files: list[str] = []


class _Volume(Record):
    data_center: str | None = None


class JobRecord(Record):
    """The job of a run."""

    name: str | None = None
    task: str | None = None
    command: list[str] | None = None
    batch: _Batch = _Batch()
    steps: int | None = None
    tags: list[str] | None = None
    image: str | None = None
    resources: _Resources = _Resources()
    train: _Train = _Train()
    failures: list[_FailurePattern] | None = None

    def validated(self) -> Job:
        """Return the whole job. Raises ValueError if another version of launcher wrote it."""
        from launcher.spec.job import Job  # pydantic: the worker of each rank imports this module

        return Job.model_validate(self.as_json())


class ClusterRecord(Record):
    """The profile of a run."""

    name: str | None = None
    scheduler: str | None = None
    paths: _Paths = _Paths()
    login: str | None = None
    node: _Node = _Node()
    network: _Network = _Network()
    container: _Container = _Container()
    setup: list[str] | None = None
    failures: list[_FailurePattern] | None = None
    ssh: _Ssh | None = None
    slurm: _Slurm = _Slurm()
    runpod: _RunPod = _RunPod()

    @classmethod
    def of_profile(cls, cluster: Cluster) -> ClusterRecord:
        return cls.of(cluster.model_dump(mode="json", by_alias=True))

    def validated(self) -> Cluster:
        """Return the whole profile. Raises ValueError if another version of launcher wrote it."""
        from launcher.spec.cluster import Cluster

        return Cluster.model_validate(self.as_json())


class RunRecord(Record):
    """run.json: the job in force, where it runs and when it was submitted."""

    id: str | None = None
    created: str = ""
    workdir: str | None = None
    project_dir: str | None = None
    job_file: str | None = None
    job: JobRecord = JobRecord()
    cluster: ClusterRecord = ClusterRecord()
    nodes: int = 0
    gpus_per_node: int = 0
    ranks_per_node: int = 0
    versions: dict[str, Any] | None = None
    code: CodeRecord | None = None
    hosts: list[str] | None = None
    "The ssh hosts that were chosen, node 0's first."
    apart: bool = False
    "Whether these hosts share no folder."
    runpod: _Volume | None = None
    sweep: _Sweep | None = None
    changed: dict[str, Any] | None = None
    "A resumed run: field -> [before, after]."
    set: list[str] | None = None
    "A resumed run: the texts of `--set`."

    @property
    def code_digest(self) -> str:
        """Digest of the code that was sent, which names `workdir` on another host. Empty if none was sent."""
        last = (self.workdir or "").rpartition("/")[2]
        return last if _DIGEST.fullmatch(last) else ""


class StateRecord(Record):
    """state.json: the run's state and its latest attempt."""

    state: Annotated[str, STATES] = "submitted"
    reason: str = ""
    time: str = ""
    failure: str | None = None
    then: str | None = None
    attempt: int | None = None
    requeue: bool = False
    "Whether the batch script is about to requeue the job."
    submitter: dict[str, Any] | None = None
    "The process that submits the run, until the scheduler has answered or the run has begun."

    @property
    def ended(self) -> bool:
        return self.state not in LIVING
