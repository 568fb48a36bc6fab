"""Values read from run.json and state.json, which any version of launcher may have written."""

from __future__ import annotations

from typing import Annotated, Any

from launcher.spec.json_object import Record

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


class _Paths(Record):
    runs: str | None = None
    python: str | None = None


class _Ssh(Record):
    hosts: list[str]


class _Sweep(Record):
    id: str
    task: int = 0
    "The run's number in the sweep."
    runs: int | None = None
    "Number of runs of the sweep, where they are submitted one by one."
    at_once: int | None = None
    "How many runs of the sweep run at the same time. On ssh hosts: on the run's host."
    at_once_in_all: int | None = None
    "On ssh hosts: how many run at the same time on all hosts together."


class JobRecord(Record):
    """The job of a run. Code that needs more fields reads a Job from it."""

    name: str | None = None
    task: Any = None
    command: list[Any] | None = None
    env: dict[str, Any] | None = None
    batch: dict[str, Any] | None = None
    steps: int | None = None
    tags: Any = None


class ClusterRecord(Record):
    """The profile of a run. Code that needs more fields reads a Cluster from it."""

    name: str | None = None
    scheduler: str | None = None
    paths: _Paths | None = None
    login: str | None = None
    ssh: _Ssh | None = None
    runpod: dict[str, Any] | None = None


class RunRecord(Record):
    """run.json: the job in force, where it runs and when it was submitted."""

    id: str | None = None
    created: str = ""
    workdir: str | None = None
    project_dir: Any = None
    job_file: Any = None
    job: JobRecord = JobRecord()
    cluster: ClusterRecord = ClusterRecord()
    nodes: int | None = None
    gpus_per_node: int | None = None
    hosts: list[str] | None = None
    "The ssh hosts that were chosen, node 0's first."
    sweep: _Sweep | None = None


class StateRecord(Record):
    """state.json: the run's state and its latest attempt."""

    state: Annotated[str, STATES] = "submitted"
    reason: str = ""
    time: str = ""
    failure: str | None = None
    attempt: int | None = None
