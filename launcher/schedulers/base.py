"""The protocol of every scheduler. `prepare` builds a run completely, and `submit` sends exactly that."""

from __future__ import annotations

import abc
import contextlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from launcher.rundir.files import delete_folder, open_regular
from launcher.spec.errors import RefusedError
from launcher.spec.listed_names import listed
from launcher.spec.records import LIVING as LIVING
from launcher.spec.records import ClusterRecord, RunRecord

if TYPE_CHECKING:  # `launcher list` and `launcher status` need none of these
    from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

    from launcher.planning.cost import Offered
    from launcher.planning.plan import Plan
    from launcher.render.render import RenderedFile
    from launcher.render.values import Target
    from launcher.rundir.layout import RunDir
    from launcher.schedulers.wanted_files import Wanted
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job


UNFINISHED = frozenset({"lost", "failed", "interrupted", "cancelled"})
"States of a run that has ended without success."


@dataclass(frozen=True)
class Request:
    """Everything that a submission depends on."""

    job: Job
    job_file: Path
    cluster: Cluster
    plan: Plan
    run_id: str
    runs_root: Path
    project_dir: Path
    others: tuple[Request, ...] = ()
    "RunPod: the same run, planned for other GPU types that may be rented instead."

    def __post_init__(self) -> None:
        """Make the paths of secret files absolute: they are checked and read in different folders."""
        secrets = [
            secret
            if secret.file is None or secret.file.startswith("~/")
            else secret.model_copy(update={"file": str(self.workdir / secret.file)})
            for secret in self.job.secrets
        ]
        object.__setattr__(self, "job", self.job.model_copy(update={"secrets": tuple(secrets)}))

    @property
    def workdir(self) -> Path:
        """The folder in which the job's processes start."""
        return (self.job_file.parent / self.job.workdir).resolve()

    def existing_workdir(self) -> Path:
        """Return `workdir`. Raises SchedulerError if it is not a directory."""
        if not self.workdir.is_dir():
            raise SchedulerError(
                f"workdir: {self.workdir} is not a directory; if it was moved, give its new absolute path "
                "with `--set workdir=PATH`"
            )
        return self.workdir


@dataclass(frozen=True)
class Prepared:
    """Everything that will be written and run, before any of it happens."""

    request: Request
    run_dir: str
    files: tuple[RenderedFile, ...]
    "Paths are relative to the run's scripts/."
    target: Target
    "Values that the templates use."
    command: tuple[str, ...]
    "What `submit` runs or sends."
    about: RunRecord
    "The content of run.json."
    warnings: tuple[str, ...] = ()
    offered: Offered | None = None
    "The first offer that would be rented, if the provider was asked."

    @property
    def values(self) -> list[str]:
        """The `--set` texts that distinguish the run in its sweep."""
        return self.about.sweep.values if self.about.sweep is not None else []

    def in_sweep(self, sweep_id: str, task: int, values: Sequence[str], **more: Any) -> Prepared:
        """Return the run as a task of a sweep. `values` are the `--set` texts that distinguish it."""
        sweep = {"id": sweep_id, "task": task, "values": list(values), **more}
        return replace(self, about=self.about.replace(sweep=sweep))


@dataclass(frozen=True)
class PreparedSweep:
    """Many runs that are sent together. Each is complete and can be resumed by itself."""

    id: str
    folder: Path
    "Folder of the sweep's own files, next to the run directories."
    runs: tuple[Prepared, ...]
    script: RenderedFile | None = None
    "The script that starts all of them, if there is one."
    command: tuple[str, ...] = ()

    @property
    def by_values(self) -> list[tuple[str, Prepared]]:
        """Each run with its values, such as `train.lr=1e-4 train.seed=0`."""
        return [(" ".join(run.values), run) for run in self.runs]


def warnings_of_runs(runs: Sequence[tuple[str, Iterable[str]]]) -> tuple[str, ...]:
    """Return the warnings of the runs of a sweep, each once. A warning that is not about all of them begins
    with the values of those that it is about.

    `runs` has each run's values, and its warnings.
    """
    by_warning: dict[str, list[str]] = {}
    for values, warnings in runs:
        for warning in dict.fromkeys(warnings):
            by_warning.setdefault(warning, []).append(values)
    return tuple(
        warning if len(about) == len(runs) else f"{listed(about)}: {warning}"
        for warning, about in by_warning.items()
    )


@dataclass(frozen=True)
class Findings:
    """What the checks before a submission found."""

    refusals: tuple[str, ...] = ()
    "Why the job would be refused, or could never start or run."
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    """The status of a run.

    `state` is one of `spec.records.STATES`, or `damaged` if the run's records cannot be read.
    """

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
    resumable: bool = False
    "Whether `launcher resume` can continue the run. False if it was never sent or its directory is gone."

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def ended(self) -> bool:
        return self.state not in LIVING

    @property
    def exit_code(self) -> int:
        """Exit code of `launcher run` and `launcher status`: 0 unless the run ended without success."""
        if not self.ended or self.state in ("succeeded", "rendered"):
            return 0
        from launcher.spec.verdict import exit_code

        return exit_code(self.failure)


@dataclass(frozen=True)
class Cancelled:
    """How many of several runs were cancelled, by how far they had got."""

    waiting: int = 0
    "Removed from the queue."
    asked: int = 0
    "Asked to write a checkpoint and stop."
    ended: int = 0
    "Asked a second time, so that their ranks are ended at once."

    @classmethod
    def of(
        cls, runs: Collection[RunDir], again: Collection[RunDir], waiting: Collection[RunDir]
    ) -> Cancelled:
        """Count runs that were cancelled: `again` for the second time, `waiting` before they began."""
        ended = sum(run in again and run not in waiting for run in runs)
        return cls(len(waiting), len(runs) - len(waiting) - ended, ended)

    def __add__(self, other: Cancelled) -> Cancelled:
        return Cancelled(
            self.waiting + other.waiting,
            self.asked + other.asked,
            self.ended + other.ended,
        )


class SchedulerError(RefusedError):
    """A scheduler cannot do what was asked; the message says what to do instead."""


class MaybeDoneError(SchedulerError):
    """A request was sent and no answer came, so it may have been carried out."""


class UnclearError(SchedulerError):
    """The run may have been submitted, but no answer confirms it. It is kept."""


@runtime_checkable
class Streaming(Protocol):
    """A scheduler that has its own log for each run."""

    def stream(self, run: RunDir) -> Iterator[bytes]:
        """Yield the lines of that log until the run ends. Raises SchedulerError."""
        ...


@runtime_checkable
class Sweeping(Protocol):
    """A scheduler that takes many runs in one submission and queues those that cannot start yet."""

    def prepare_sweep(
        self, sweep_id: str, runs: Sequence[tuple[Prepared, tuple[str, ...]]], at_once: int | None = None
    ) -> PreparedSweep:
        """Prepare runs, each with the `--set` texts that distinguish it; `at_once` of them run at the same
        time.

        Raises SchedulerError if they cannot be sent together.
        """
        ...

    def check_sweep(self, sweep: PreparedSweep) -> tuple[str, ...]:
        """Check a sweep, like `Scheduler.check`."""
        ...

    def submit_sweep(self, sweep: PreparedSweep) -> list[RunDir]:
        """Submit a sweep.

        Raises SchedulerError; if certainly nothing was submitted, nothing is left behind.
        """
        ...


class Scheduler(abc.ABC):
    """Starts and follows runs. One object serves all runs of one place.

    `docs/schedulers.md` shows how to write another one.

    The methods that are not abstract suit a run directory on a disk of this machine.
    """

    multi_node: ClassVar[bool] = False
    "Whether a run may use several nodes. If not, such a plan is refused before anything is sent."
    own_logs: ClassVar[str] = "supervisor*.log"
    "Pattern of the files in a run directory that `logs` reads."
    uses_this_python: ClassVar[bool] = False
    "Whether a job runs in launcher's own interpreter unless the profile names another."

    @classmethod
    def at(cls, cluster: ClusterRecord) -> Scheduler:
        """Return the scheduler of a cluster profile. Raises SchedulerError.

        This version of launcher or an earlier one has written the profile.
        """
        return cls()

    @classmethod
    def place(cls, cluster: ClusterRecord) -> Hashable:
        """Return an identifier of where run directories are, or None for a disk of this machine.

        Profiles of one place share one object, and a run can only be resumed with a profile of the same
        place.
        """
        return None

    @classmethod
    def is_here(cls, run: RunDir, cluster: ClusterRecord) -> bool:
        """Return whether the run's supervisor is a process of this machine, although its profile names
        another place."""
        return False

    @abc.abstractmethod
    def prepare(self, request: Request) -> Prepared:
        """Return everything that `submit` would write and send, and write nothing.

        Raises RenderError, SchedulerError.
        """

    @classmethod
    def with_hardware(cls, cluster: Cluster, job: Job) -> Cluster:
        """Fill in what the profile leaves open and can be detected, such as the GPUs of `node.gpu: auto`.

        Raises SchedulerError.
        """
        return cluster

    @classmethod
    def scripts(cls, target: Target) -> tuple[RenderedFile, ...]:
        """Return the files of the run's `scripts/`, with `start.sh`, which starts the ranks of one node.

        Raises RenderError.
        """
        from launcher.render.quote import RenderError
        from launcher.render.render import start_script

        if (runtime := target.cluster.container.runtime) != "none":
            raise RenderError(
                f"container.runtime {runtime}: scheduler {target.cluster.scheduler} starts no container, but "
                "the interpreter paths.python of the profile; write `none`, or leave `container:` out"
            )
        return (start_script(target),)

    @classmethod
    def notes(cls, target: Target) -> tuple[str, ...]:
        """Return notes for the user, before the run is sent."""
        from launcher.render.render import notes

        unused = f"image {target.image}: not used, since container.runtime of the profile is none"
        return (*([unused] if target.image and not target.cluster.starts_container else []), *notes(target))

    @classmethod
    def by_hand(cls, scripts: Path) -> str:
        """Return a sentence that says how to start a rendered run by hand. `scripts` is its `scripts/`."""
        return f"{scripts / 'start.sh'} starts it by hand"

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        """Check for what would fail, before anything is sent. Return warnings; raise SchedulerError."""
        return ()

    @abc.abstractmethod
    def submit(self, prepared: Prepared) -> RunDir:
        """Write the run directory and start the run.

        Raises SchedulerError, OSError; then nothing is left behind.
        """

    @abc.abstractmethod
    def resume(self, run: RunDir, again: Prepared | None = None) -> None:
        """Continue a run that has ended. `again` is its new plan if it was planned again.

        Raises SchedulerError; then the run is as it was.
        """

    @abc.abstractmethod
    def handle(self, run: RunDir) -> str:
        """Return the scheduler's name of the run, such as `slurm:della:123456`, for people and for
        `--json`."""

    @abc.abstractmethod
    def status(self, run: RunDir) -> Status:
        """Return the run's status, and do what is due, such as ending a pod. Raises SchedulerError."""

    def statuses(self, runs: Sequence[RunDir]) -> list[Status]:
        """Return the status of many runs in their order, with as few queries as possible."""
        return [self.status(run) for run in runs]

    def logs(self, run: RunDir, since: int) -> bytes:
        """Return the scheduler's own log of the run from byte `since` on.

        The logs of the ranks are in the run directory.
        """
        parts = []
        for path in sorted(run.path.glob(self.own_logs)):
            with contextlib.suppress(OSError), open_regular(path) as file:
                parts.append(file.read())
        return b"".join(parts)[since:]

    @abc.abstractmethod
    def cancel(self, run: RunDir) -> None:
        """Ask the run to write a checkpoint and stop. A second call ends the ranks at once.

        Raises SchedulerError if the run has ended already.
        """

    def cancel_all(self, runs: Sequence[RunDir], name: str) -> Cancelled:
        """Cancel the runs that have not ended.

        Messages call them `name`. Raises SchedulerError.
        """
        living = [run for run, status in zip(runs, self.statuses(runs), strict=True) if not status.ended]
        again = {run for run in living if run.cancel.exists()}
        cancelled: list[RunDir] = []
        for run in reversed(living):  # the latest first, so that no waiting run starts when another one ends
            try:
                self.cancel(run)
            except SchedulerError:
                status = self.statuses([run])[0]
                if not status.ended:
                    raise
                if status.state != "cancelled":  # it has ended by itself in the meantime
                    continue
            cancelled.append(run)
        return Cancelled.of(cancelled, again, [run for run in cancelled if not self.has_begun(run)])

    def has_begun(self, run: RunDir) -> bool:
        """Return whether the run has begun, according to its local records. If not, cancelling it is enough
        to keep it from starting."""
        return True

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        """Fetch what the run has written, and send local changes. Raises SchedulerError."""
        return

    def where(self, run: RunDir) -> str:
        """Return the run directory for people: `host:path` if it is not on this machine."""
        return str(run.path)

    def remove(self, runs: Sequence[RunDir]) -> None:
        """Delete everything of runs that have ended. Raises SchedulerError, OSError."""
        for run in runs:
            delete_folder(run.path)
