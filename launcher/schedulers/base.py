"""The protocol of every scheduler: what is prepared is what is shown, and what is shown is what is sent."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from launcher.spec.errors import RefusedError

if TYPE_CHECKING:  # `launcher list` and `launcher status` need none of these
    from collections.abc import Iterator, Sequence

    from launcher.planning.cost import Offered
    from launcher.planning.plan import Plan
    from launcher.render.render import RenderedFile
    from launcher.render.values import Target
    from launcher.rundir.layout import RunDir
    from launcher.schedulers.over_ssh.exchange import Wanted
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job


@dataclass(frozen=True)
class Capabilities:
    """What a scheduler can do; a request for more is refused before anything is sent."""

    submit: bool
    multi_node: bool = False
    arrays: bool = False
    "Many runs in one submission."


LIVING = frozenset({"submitted", "running", "stopping"})
"States of a run that has not ended."


@dataclass(frozen=True)
class Request:
    """All that a submission depends on."""

    job: Job
    job_file: Path
    cluster: Cluster
    plan: Plan
    run_id: str
    runs_root: Path
    project_dir: Path
    others: tuple[Request, ...] = ()
    "RunPod: the same run as it is planned for other GPU types that may be rented instead."

    def __post_init__(self) -> None:
        """Make the files of secrets absolute: who checks and who reads them have other folders."""
        secrets = [
            secret
            if secret.file is None or secret.file.startswith("~/")
            else secret.model_copy(update={"file": str(self.workdir / secret.file)})
            for secret in self.job.secrets
        ]
        object.__setattr__(self, "job", self.job.model_copy(update={"secrets": tuple(secrets)}))

    @property
    def workdir(self) -> Path:
        """Where the job's processes start."""
        return (self.job_file.parent / self.job.workdir).resolve()


@dataclass(frozen=True)
class Prepared:
    """Everything that will be written and run, before any of it is."""

    request: Request
    run_dir: str
    files: tuple[RenderedFile, ...]
    "Relative to the run's scripts/."
    target: Target
    "What the templates saw."
    command: tuple[str, ...]
    "What `submit` runs or sends."
    about: dict[str, Any]
    "run.json"
    warnings: tuple[str, ...] = ()
    offered: Offered | None = None
    "What would be rented first, where the provider was asked."


@dataclass(frozen=True)
class Status:
    """`state`: one of `runs.forms.STATES`, or `damaged`: its records cannot be read."""

    run_id: str
    name: str
    state: str
    handle: str
    attempt: int | None = None
    step: int | None = None
    steps: int | None = None
    failure: str | None = None
    reason: str = ""
    created: str = ""
    updated: str = ""
    checkpoint_step: int | None = None
    path: str = ""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def ended(self) -> bool:
        return self.state not in LIVING

    @property
    def exit_code(self) -> int:
        """Of `launcher run` and `launcher status`: 0 unless the run ended otherwise than well."""
        if not self.ended or self.state in ("succeeded", "rendered"):
            return 0
        from launcher.spec.verdict import exit_code

        return exit_code(self.failure)

    @property
    def resumable(self) -> bool:
        return self.state in ("lost", "failed", "interrupted", "cancelled")


@dataclass(frozen=True)
class Cancelled:
    """How many of several runs were still going on, and what was done with them."""

    waiting: int = 0
    "Taken out of the queue."
    asked: int = 0
    "Asked to write a checkpoint and stop."
    ended: int = 0
    "Had been asked before: their ranks are ended at once."

    def __add__(self, other: Cancelled) -> Cancelled:
        return Cancelled(self.waiting + other.waiting, self.asked + other.asked, self.ended + other.ended)


class SchedulerError(RefusedError):
    """A scheduler cannot do what is asked; the message says what to do instead."""


class MaybeDoneError(SchedulerError):
    """A request went out, and no answer came: what it asks for may have been done."""


class UnclearError(SchedulerError):
    """The run may have been submitted: no answer tells. It is kept."""


@runtime_checkable
class Streaming(Protocol):
    """A scheduler that tells its own log of a run while it is written."""

    def stream(self, handle: str) -> Iterator[bytes]:
        """Lines, until the run ends. Raises SchedulerError."""
        ...


class Scheduler(Protocol):
    """A handle is one string, `scheduler:...`, and serves every verb."""

    capabilities: Capabilities

    def prepare(self, request: Request) -> Prepared:
        """Pure. Raises RenderError, SchedulerError."""
        ...

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        """Look, before anything is sent, for what would fail. Warnings; raises SchedulerError."""
        ...

    def submit(self, prepared: Prepared) -> str:
        """Write the run directory, start it, return the handle. Raises SchedulerError, OSError."""
        ...

    def resume(self, handle: str, again: Prepared | None = None) -> str:
        """Go on with a run that has ended, with `again` as it was planned again; gives the new handle.
        Raises SchedulerError; then the run is as it was."""
        ...

    def status(self, handle: str) -> Status: ...

    def logs(self, handle: str, since: int) -> bytes:
        """The scheduler's own log of the run from byte `since` on; the ranks' are in the run directory."""
        ...

    def cancel(self, handle: str) -> None: ...

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        """Have here what the run has written so far, and there what was written here. Where the run directory
        is on this machine, there is nothing to do."""
        ...

    def where(self, run: RunDir) -> str:
        """Its run directory, as a person finds it: `host:path` where it is not on this machine."""
        ...

    def remove(self, runs: Sequence[RunDir]) -> None:
        """Delete everything of runs that have ended. Raises SchedulerError, OSError."""
        ...

    def list(self) -> list[Status]: ...
