"""This machine. The supervisor is a detached process and keeps running when the terminal is closed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING

from launcher.rundir.files import replace_json
from launcher.rundir.find import remember_root
from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import remove_shared
from launcher.rundir.stop import write_cancel_request
from launcher.rundir.time import now
from launcher.schedulers.base import LIVING, Prepared, Request, SchedulerError, Status
from launcher.schedulers.registry import scheduler_class
from launcher.schedulers.rundir import (
    end_told,
    in_force,
    may_be_sent,
    status_of,
    was_sent,
    write_run,
    writing,
)
from launcher.schedulers.store import Store
from launcher.schedulers.sweeps_without_queue import OneByOne, remove_here
from launcher.spec.events import Resubmitted, Starting, Submitted
from launcher.spec.progress import working
from launcher.spec.records import StateRecord
from launcher.spec.variables import RESERVED_PREFIX
from launcher.supervise.host import disk_full, signal_supervisor, supervisor_alive, supervisor_gone
from launcher.supervise.process import end_processes, processes_of
from launcher.supervise.start import NotStartedError, start_supervisor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job

STORE = Store()
SENDING = "the process that submits it is still sending the job's code"
UNSENT = "it was not submitted, because `launcher` was ended before that; delete it and submit it again"
START_SECONDS = 20.0
"Timeout for the supervisor to take its lock. On an idle machine it takes well under a second."


class LocalScheduler(OneByOne):
    """Runs jobs on this machine. Handles are `local:<absolute run directory>`."""

    uses_this_python = True

    def handle(self, run: RunDir) -> str:
        return f"local:{run.path}"

    @classmethod
    def with_hardware(cls, cluster: Cluster, job: Job) -> Cluster:
        """Ask nvidia-smi for the GPUs, and the system for the memory that this process may use.

        A machine without nvidia-smi has no GPUs.
        """
        if cluster.node.gpu is None:
            cluster = _with_detected_gpus(cluster)
        if cluster.node.memory is not None:
            return cluster
        from launcher.rundir.host_memory import memory_limit

        return cluster.with_node(memory=memory_limit())

    def prepare(self, request: Request) -> Prepared:
        """Prepare every file and the command of the supervisor. Raises RenderError, SchedulerError."""
        from launcher.schedulers.prepare import ready

        request.existing_workdir()
        place, python = STORE.place(request), request.cluster.paths.python or sys.executable
        return ready(self, request, place, python, (python, "-m", "launcher.supervise", place.run_dir))

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        STORE.check(prepared.request)
        if prepared.command[0] == sys.executable and importlib.util.find_spec("torch") is None:
            raise SchedulerError(
                f"torch is not installed for {sys.executable}: install launcher's checkout with the extra "
                "`train` (pip install '.[train]' in it), or name another interpreter in paths.python "
                "of the cluster profile"
            )
        return ()

    def submit(self, prepared: Prepared) -> RunDir:
        """Start the supervisor. Raises SchedulerError with the reason if it does not start."""
        with writing(prepared.run_dir):
            run = write_run(prepared)
            remember_root(run.path.parent)
            try:
                run.append(Submitted(handle=self.handle(run), command=list(prepared.command)))
                with working("starting the supervisor"):
                    self._start(run, prepared.command)
            except OSError:  # there is no supervisor
                shutil.rmtree(run.path, ignore_errors=True)
                raise
        return run

    def resume(self, run: RunDir, again: Prepared | None = None) -> None:
        """Start another supervisor for the run, which continues from its last checkpoint.

        If the run was planned again, `again` takes effect from the next attempt on, and earlier files stay.
        Raises SchedulerError; then the run is as it was.
        """
        if supervisor_alive(run):
            raise SchedulerError(f"{run.id} is still running")
        if _is_unsent(run):
            raise SchedulerError(f"{run.id}: {SENDING if may_be_sent(run) else UNSENT}")
        cluster = (again.about if again is not None else run.read_about()).cluster
        if cluster.scheduler != "local":
            raise SchedulerError(
                f"{run.id} was rendered for {cluster.name} ({cluster.scheduler}): start its "
                f"scripts there again, they go on from the last checkpoint"
            )
        self._end_orphans(run)
        python = cluster.paths.python or sys.executable
        with in_force(run, again):
            run.cancel.unlink(missing_ok=True)
            run.append(Resubmitted(handle=self.handle(run)))
            self._start(run, (python, "-m", "launcher.supervise", str(run.path)))

    def status(self, run: RunDir) -> Status:
        """Return the state that the supervisor wrote last, or `lost` if it died without recording its end."""
        state = run.read_state()
        if not state.ended and supervisor_gone(run):
            state = run.read_state()  # it may have ended between the two checks
        name, reason, failure = state.state, state.reason, state.failure
        exists, unsent = run.run.exists(), _is_unsent(run)
        if unsent:
            name, reason = ("submitted", SENDING) if may_be_sent(run) else ("failed", UNSENT)
        elif name in LIVING and supervisor_gone(run):
            lost = {"state": "lost", "failure": "node-failed", "reason": _why_lost(run)}
            end = end_told(run) or lost
            name, failure, reason = end["state"] or name, end["failure"], end["reason"] or ""
        if not exists and not run.state.exists():  # the supervisor may still write other files
            name, failure, reason = "lost", "node-failed", f"{run.path} was deleted"
        elif name not in LIVING and run.damage:
            name, failure, reason = "damaged", None, run.damage
        elif name == "rendered":
            scheduler = scheduler_class(run.read_about().cluster.scheduler or "local")
            reason = f"written by `launcher render`, not started; {scheduler.by_hand(run.scripts)}"
        state = state.replace(state=name, reason=reason, failure=failure)
        return status_of(run, self.handle(run), state, resumable=exists and not unsent)

    def cancel(self, run: RunDir) -> None:
        """Ask the run to write a checkpoint and stop. A second call ends the ranks at once."""
        status = self.status(run)
        if status.ended:
            self._end_orphans(run)
            raise SchedulerError(f"{run.id} is not running: {status.state}")
        try:
            write_cancel_request(run.cancel)
        except OSError as error:  # if the disk is full, send a signal instead
            if not signal_supervisor(run, signal.SIGINT):
                raise SchedulerError(f"cannot write {run.cancel}: {error.strerror}") from None

    def remove(self, runs: Sequence[RunDir]) -> None:
        for run in runs:
            remove_shared(run)  # left behind if every process of the run was killed
            remove_here(run)

    def _end_orphans(self, run: RunDir) -> None:
        end_processes(lambda: processes_of(run.path), grace=3.0)

    def _start(self, run: RunDir, command: tuple[str, ...]) -> None:
        run.append(Starting(command=list(command)))
        earlier_state = run.read_state()
        replace_json(run.state, {"state": "submitted", "time": now()})
        try:
            start_supervisor(command, run.path, 0, _environment(), START_SECONDS)
        except NotStartedError as error:
            _record_failure(run, earlier_state, str(error))
            raise SchedulerError(str(error)) from None
        except KeyboardInterrupt:
            _record_failure(run, earlier_state, "interrupted by Ctrl-C as it started")
            raise


def _why_lost(run: RunDir) -> str:
    reason = "the supervisor was killed or this machine was restarted; its ranks ended with it"
    if disk_full(run.path):
        reason += f"; or it could not write how the run ended: less than 1 MiB is free in {run.path.parent}"
    return reason


def _is_unsent(run: RunDir) -> bool:
    """Return whether the run was written for another place, and no scheduler was asked for it."""
    elsewhere = run.read_about().cluster.scheduler not in (None, "local")
    return elsewhere and run.read_state().state == "submitted" and not was_sent(run)


def _record_failure(run: RunDir, earlier_state: StateRecord, reason: str) -> None:
    """Restore the run's earlier state, or `failed` for a new run, and add the reason."""
    state = "failed" if earlier_state.state == "submitted" else earlier_state.state
    replace_json(run.state, earlier_state.replace(state=state, reason=reason).as_json())


def _environment() -> dict[str, str]:
    """Our environment, without the variables that would assign the supervisor's children to another run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(RESERVED_PREFIX)}


def _with_detected_gpus(cluster: Cluster) -> Cluster:
    from launcher.spec.cluster import Gpu
    from launcher.supervise.gpus import GpusError, installed

    try:
        gpus = installed()
    except GpusError:
        return cluster
    sizes = [total for _, total in gpus if total is not None]
    if not sizes:
        return cluster
    return cluster.with_node(gpu=Gpu(type=gpus[0][0], count=len(gpus), memory=min(sizes) * 2**20))
