"""Sources of what a plan knows about the job's model."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher.memory.peaks import Like
from launcher.memory.store import TraceStore
from launcher.memory.trace import NotAffineError
from launcher.planning.cached import CachedSource
from launcher.planning.declared_params import DeclaredParams
from launcher.planning.model_source import NoTraceError
from launcher.planning.plan import PlanRefusedError
from launcher.spec.errors import LauncherError, Problem, UsageError, text_of
from launcher.spec.mesh import WHOLE, Part
from launcher.spec.progress import working

if TYPE_CHECKING:
    from launcher.memory.shapes import ModelShapes
    from launcher.memory.states import Ranks
    from launcher.memory.trace import Trace
    from launcher.planning.cached import FromFiles
    from launcher.planning.model_source import About, Args, Source
    from launcher.spec.job import Job
    from launcher.spec.recipe import Precision, Recipe


class UserCodeError(LauncherError):
    """The code of the task, or of the model that the job declares, raised an exception."""


def traces_dir() -> Path:
    """Return the folder of stored traces: `traces/` in the user's cache folder of launcher."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("launcher")) / "traces"


def source_of(job: Job, workdir: Path, store: Path, like: Like, make: Callable[[], FromFiles]) -> Source:
    """Return a source that reads stored traces from `store` and gets missing ones from `make`.

    `like` is the device that the model runs on. Raises PlanRefusedError.
    """
    declared = job.plan
    if job.task is not None:
        trace_store = TraceStore(store, job.task, job.shaped_by, str(workdir), like)
    elif declared.model is not None:
        trace_store = TraceStore(store, declared.model, {"length": declared.length}, str(workdir), like)
    elif declared.params is not None:
        return DeclaredParams(declared.params, **job.model.model_dump())
    else:
        message = (
            "launcher does not know which model the command trains, so it cannot plan its memory; "
            "declare the model with plan.model or plan.params (docs/planning.md), or write a task"
        )
        raise PlanRefusedError([Problem("the job", "command", message)])
    return CachedSource(trace_store, make)


class UserCode:
    """Queries the job's task, or the model that it declares, in this process.

    Its code runs in `workdir`, and its output goes to stderr.

    Raises UserCodeError for errors in the code, UsageError, and SetupError if it does not fit the cluster.
    """

    def __init__(self, job: Job, workdir: Path, like: Like) -> None:
        self.job, self.workdir = job, workdir
        if not workdir.is_dir():
            raise UsageError(f"workdir: {workdir} is not a directory here; plan imports the task from it")
        self.name = f"task {job.task}" if job.task is not None else f"plan.model {job.plan.model}"
        with working(f"importing what {self.name} needs"):
            try:
                import torch  # noqa: F401
            except ImportError as error:
                raise UsageError(
                    f"{error}; building the model needs launcher's extra `train`: "
                    "pip install '.[train]' in its checkout"
                ) from None
            from launcher.train.tracing.declared_model import DeclaredSource
            from launcher.train.tracing.task_source import TaskSource
            from launcher.train.tracing.users_modules import forget_changed

            # These modules hold half a million objects, which the garbage collector need not visit again.
            gc.freeze()
            with WHOLE_PROCESS:
                forget_changed(workdir)
            self._source = (TaskSource if job.task is not None else DeclaredSource)(job, workdir, like)

    def about(self, args: Args | None = None) -> About:
        with self._running("asking the task"):
            return self._source.about(args)

    def shapes(self, precision: Precision, args: Args | None = None, part: Part = WHOLE) -> ModelShapes:
        with self._running("building the model without weights"):
            return self._source.shapes(precision, args, part)

    def trace(self, recipe: Recipe, ranks: Ranks, args: Args | None = None, *, exact: bool = False) -> Trace:
        what = f"sharding {recipe.sharding}, activations {recipe.activations}"
        with self._running(f"tracing a step: {what}, micro-batch {recipe.micro_batch_size}"):
            return self._source.trace(recipe, ranks, args, exact=exact)

    def files(self) -> list[Path]:
        from launcher.train.tracing.users_modules import modules_of

        with inside(self.workdir), modules_of(self.workdir):
            return self._source.files()

    @contextlib.contextmanager
    def _running(self, what: str) -> Iterator[None]:
        from launcher.train.tracing.users_modules import modules_of

        with working(what), running_user_code(self.name, self.workdir), modules_of(self.workdir):
            yield


@contextlib.contextmanager
def running_user_code(name: str, workdir: Path) -> Iterator[None]:
    """Run the user's code in its folder, with its output on stderr.

    Raises UserCodeError for errors that are not launcher's own. Its message calls the code `name`.
    """
    with inside(workdir), _raising_at_exit():
        try:
            yield
        except (LauncherError, NotAffineError, NoTraceError):  # our own
            raise
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # also SystemExit: code that exits gives no answer
            raise UserCodeError(_message(name, workdir, error)) from error


WHOLE_PROCESS = threading.RLock()
"""Held while the user's code runs, because all threads share the working directory, stdout, os._exit() and
torch's process group. Whoever reads relative paths holds it, too."""


@contextlib.contextmanager
def inside(workdir: Path) -> Iterator[None]:
    """Change to `workdir` for the block, and send what is printed to stderr. Other threads wait."""
    with WHOLE_PROCESS:
        before = Path.cwd()
        os.chdir(workdir)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _raising_at_exit() -> Iterator[None]:
    """Let os._exit() raise SystemExit in this process, which would end as if it had answered. Processes that
    are forked in the block still end."""
    leave, process = os._exit, os.getpid()

    def raise_or_leave(status: int) -> NoReturn:
        if os.getpid() == process:
            raise SystemExit(status)
        leave(status)

    os._exit = raise_or_leave
    try:
        yield
    finally:
        os._exit = leave


def _message(name: str, workdir: Path, error: BaseException) -> str:
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    frames = traceback.extract_tb(root.__traceback__)
    user_frames = (frame for frame in reversed(frames) if frame.filename.startswith(str(workdir)))
    last = next(user_frames, frames[-1])
    text = text_of(error)
    message, _, reason = text.strip().partition("\n")
    if message.endswith(":"):
        message = f"{message} {reason.strip().partition(chr(10))[0]}"
    needs_values = "meta" in text or type(error).__name__.startswith("DataDependent")
    values = "; the plan runs the model on the meta device, where tensors have no values"
    return (
        f"{name}: {type(error).__name__}{': ' * bool(message)}{message} ({last.filename}:{last.lineno})"
        f"{values if needs_values else ''}"
    )
