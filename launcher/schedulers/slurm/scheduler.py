"""Slurm: a run in one job, or in several that follow each other."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.rundir.files import replace_json, replace_text
from launcher.rundir.find import remember_root
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import (
    Cancelled,
    Prepared,
    Request,
    Scheduler,
    SchedulerError,
    Status,
)
from launcher.schedulers.over_ssh.login import Answer, Here, Login, LoginError, ask
from launcher.schedulers.rundir import in_force, write_run
from launcher.schedulers.slurm.cancel_all import (
    ask_all_to_stop,
    asked_before,
    counted,
    out_of_queue,
    see_off,
)
from launcher.schedulers.slurm.handle import Handle, handle_of, job_in
from launcher.schedulers.slurm.identity import another, is_of
from launcher.schedulers.slurm.jobs import (
    BY_HAND,
    QUEUE,
    NotSubmittedError,
    begun,
    found,
    jobs_of,
    sbatch_command,
    submission_of,
)
from launcher.schedulers.slurm.judged import judged, lives
from launcher.schedulers.slurm.pace import Pace
from launcher.schedulers.slurm.pending import needs_site
from launcher.schedulers.slurm.records import Records, look_up
from launcher.schedulers.slurm.site import Site, questions, site
from launcher.spec.events import Refused, Submitting

if TYPE_CHECKING:
    from launcher.render.render import RenderedFile
    from launcher.render.values import Target
    from launcher.schedulers.base import PreparedSweep

DEFAULT_PYTHON = "python3"


@dataclass(frozen=True)
class Seen:
    """What Slurm last reported about some jobs, cached for callers that ask several times a second."""

    ids: Sequence[str]
    pace: Pace
    known: Records
    here: Site | None
    "Set if the only job is pending for a reason that depends on the site."


class SlurmScheduler(Scheduler):
    """Runs jobs through Slurm. The run directory must be on a file system that the nodes share."""

    multi_node = True

    def __init__(self, clusters: str | None = None) -> None:
        """`clusters` selects one of a site's clusters; None for the default."""
        self.login: Login = Here(asking(clusters))
        self._seen: Seen | None = None

    @classmethod
    def at(cls, cluster: Mapping[str, Any]) -> SlurmScheduler:
        """A scheduler on this host, or one that works through a login node."""
        clusters = (cluster.get("slurm") or {}).get("clusters")
        if (login := cluster.get("login")) is None:
            return SlurmScheduler(clusters)
        from launcher.schedulers.slurm.remote import RemoteSlurm

        return RemoteSlurm(login, (cluster.get("paths") or {}).get("runs"), clusters)

    @classmethod
    def place(cls, cluster: Mapping[str, Any]) -> Hashable:
        login, clusters = cluster.get("login"), (cluster.get("slurm") or {}).get("clusters")
        runs = (cluster.get("paths") or {}).get("runs") if login is not None else None
        return (login, runs, clusters) if login or clusters else None

    def handle(self, run: RunDir) -> str:
        return str(handle_of(run))

    def prepare(self, request: Request) -> Prepared:
        """Raises RenderError, SchedulerError."""
        run_dir = str(request.runs_root.resolve() / request.run_id)
        if re.search("%[jAat]", run_dir):
            raise SchedulerError(f"{run_dir}: submitit puts a job's id in the place of %j, %A, %a and %t")
        return self._prepared(request, run_dir, str(request.workdir))

    def _prepared(self, request: Request, run_dir: str, workdir: str) -> Prepared:
        """Prepare a run with paths as the nodes see them."""
        from launcher.schedulers.prepare import about, look_at_code, target

        look_at_code(request.workdir)
        python = request.cluster.paths.python or DEFAULT_PYTHON
        where = target(request, run_dir, workdir, python, {})
        return Prepared(
            request=request,
            run_dir=run_dir,
            files=self.scripts(where),
            target=where,
            command=sbatch_command(f"{run_dir}/scripts/job.sbatch"),
            about={**about(request), "workdir": workdir},
            warnings=(*request.plan.warnings, *self.notes(where)),
        )

    @classmethod
    def scripts(cls, target: Target) -> tuple[RenderedFile, ...]:
        from launcher.schedulers.slurm.scripts import scripts

        return scripts(target)

    @classmethod
    def notes(cls, target: Target) -> tuple[str, ...]:
        from launcher.schedulers.slurm.scripts import cpus_note

        note = cpus_note(target)
        return (*([note] if note is not None else []), *super().notes(target))

    def submit(self, prepared: Prepared) -> RunDir:
        """Submit the run. Raises SchedulerError; if there is certainly no job, nothing is left behind."""
        try:
            run = self.write(prepared)
        except OSError as error:
            raise SchedulerError(f"cannot write {prepared.run_dir}: {error.strerror}") from None
        remember_root(run.path.parent)
        try:
            self._send(run, "submitted")
        except NotSubmittedError:
            self.withdraw([run])
            raise
        return run

    def check(self, prepared: Prepared, tasks: int = 1) -> tuple[str, ...]:
        """Check the job before it is queued. `tasks` is the number of such jobs in an array."""
        from launcher.supervise.secrets import SecretError, read_secrets

        if not prepared.request.workdir.is_dir():
            raise SchedulerError(f"workdir: {prepared.request.workdir} is no directory")
        if shutil.which("sbatch") is None:
            raise SchedulerError(f"there is no Slurm on {self.login.name}{BY_HAND}")
        try:
            read_secrets(prepared.request.job.secrets)
        except SecretError as error:
            raise SchedulerError(f"secrets: {error}") from None
        return self._ask_before_the_queue(prepared, self.login, tasks)

    def prepare_sweep(
        self, sweep_id: str, runs: Sequence[tuple[Prepared, tuple[str, ...]]], at_once: int | None = None
    ) -> PreparedSweep:
        from launcher.schedulers.slurm.sweep import prepare

        return prepare(sweep_id, runs, at_once)

    def check_sweep(self, sweep: PreparedSweep) -> tuple[str, ...]:
        return self.check(sweep.runs[0], len(sweep.runs))

    def submit_sweep(self, sweep: PreparedSweep) -> list[RunDir]:
        from launcher.schedulers.slurm.sweep import submit

        return submit(sweep, self)

    def _ask_before_the_queue(self, prepared: Prepared, login: Login, tasks: int) -> tuple[str, ...]:
        from launcher.schedulers.slurm.checks import problems

        request = prepared.request
        script = next(file.text for file in prepared.files if file.path == "job.sbatch")
        found = problems(login, request.cluster, request.job, request.plan, script, tasks)
        if found.refusals:
            raise SchedulerError("\n".join(found.refusals))
        return found.warnings

    def write(self, prepared: Prepared) -> RunDir:
        """Write the run directory. Raises OSError."""
        return write_run(prepared)

    def withdraw(self, runs: Sequence[RunDir]) -> None:
        """Delete what was written for a submission that Slurm has refused."""
        for run in runs:
            shutil.rmtree(run.path)

    def resume(self, run: RunDir, again: Prepared | None = None) -> None:
        """Submit a new job for the run, which continues from its last checkpoint."""
        status = self.status(run)
        if not status.ended:
            raise SchedulerError(f"{run.id} is still {_doing(status)}")
        if status.state == "succeeded":
            raise SchedulerError(f"{run.id} has succeeded: there is nothing to go on with")
        with in_force(run, again):
            run.cancel.unlink(missing_ok=True)
            for name in ("slurm-excluded", "slurm-unfit"):  # the nodes may have been repaired
                (run.path / name).unlink(missing_ok=True)
            self._send(run, "resubmitted")

    def status(self, run: RunDir) -> Status:
        return self.statuses([run])[0]

    def statuses(self, runs: Sequence[RunDir]) -> list[Status]:
        """Query Slurm for all runs that have not ended by their own records, in one round trip.

        Jobs that the controller does not know or that ended badly take a second one.
        """
        jobs: dict[Path, str | None] = {}
        for run in runs:
            if lives(run.read_state()):
                jobs[run.path] = handle_of(run).job
        known, trouble = Records(), ""
        here: Site | None = None
        if unknown := [run for run in runs if jobs.get(run.path, "") is None]:
            found_now, trouble = self._by_comment(unknown)
            jobs |= found_now
        if any(jobs.values()):
            try:
                asked = [run for run in runs if jobs.get(run.path) is not None]
                seen = self._see(asked, [jobs[run.path] or "" for run in asked])
            except LoginError as error:
                trouble = str(error)
            else:
                known, here = seen.known, seen.here
                trouble = known.controller
        # A run may have moved to a linked job while Slurm was queried.
        moved = [
            run
            for run in runs
            if not trouble and run not in unknown and jobs.get(run.path) not in (None, handle_of(run).job)
        ]
        later = {status.path: status for status in self.statuses(moved)} if moved else {}
        return [
            later.get(str(run.path)) or judged(run, jobs.get(run.path), known, trouble, here) for run in runs
        ]

    def _by_comment(self, runs: Sequence[RunDir]) -> tuple[dict[Path, str | None], str]:
        """Find the jobs of runs for which sbatch's answer was lost. Also return why Slurm did not answer."""
        try:
            answer = ask(self.login, {"queue": QUEUE})["queue"]
        except LoginError as error:
            return {}, str(error)
        if answer.code:
            return {}, f"Slurm does not answer: {answer.err.strip()}"
        named = found(answer, set[str]().union(*map(jobs_of, runs)))
        return {run.path: _named_job(run, named) for run in runs}, ""

    def remove(self, runs: Sequence[RunDir]) -> None:
        from launcher.schedulers.slurm.sweep import forget

        forget(runs)
        for run in runs:
            shutil.rmtree(run.path)

    def logs(self, run: RunDir, since: int) -> bytes:
        """The output of the batch scripts and supervisors of all jobs, from byte `since` on."""
        parts = [file.read_bytes() for file in run.path.glob("slurm-*.out")]
        return b"".join(parts)[since:]

    def cancel(self, run: RunDir) -> None:
        """Cancel a pending job. Ask a running one for a checkpoint; a second call ends it."""
        status = self.status(run)
        if status.ended:
            raise SchedulerError(f"{run.id} is not running: {status.state}")
        if not (job := job_in(status.handle)):
            raise SchedulerError(f"{run.id} was not asked to stop: {status.reason}")
        try:
            refused = self._ask_to_stop(run, job)
        except LoginError as error:
            refused = str(error)
        self._see_it_off(run, refused, waits=status.state == "submitted")

    def _ask_to_stop(self, run: RunDir, job: str) -> str:
        """Request the stop. Return why Slurm refused, or "". A run that has begun only needs the file."""
        again, foreign = run.cancel.exists(), self._foreign(run, job)
        replace_text(run.cancel, f"{time.time()}\n")
        if foreign:
            return foreign
        asked = ["scancel", job] if again else out_of_queue(job)
        self._seen = None
        answer = ask(self.login, {"scancel": asked})["scancel"]
        return "scancel: " + (answer.err.strip() or f"exit code {answer.code}") if answer.code else ""

    def _foreign(self, run: RunDir, job: str) -> str:
        """Why this job id is not the run's, by the last answer; empty if it is or may be."""
        record = self._seen.known.get(job) if self._seen is not None else None
        return another(job, record) if record is not None and not is_of(record, run) else ""

    def _see_it_off(self, run: RunDir, refused: str, *, waits: bool) -> None:
        """Finish the cancellation of a job that was to leave the queue.

        If Slurm removed it, record its status now, because Slurm forgets jobs. If Slurm refused and the run
        has not begun, withdraw the request; otherwise the next one would count as the second.
        """
        if refused and begun(run):
            print(f"launcher: {refused}; {run.id} has begun, and stops all the same", file=sys.stderr)
        elif refused:
            self._take_back(run)
            raise SchedulerError(f"{refused}; {run.id} has not begun and was not cancelled: cancel it again")
        elif waits:
            self.statuses([run])

    def _take_back(self, run: RunDir) -> None:
        run.cancel.unlink(missing_ok=True)

    def cancel_all(self, runs: Sequence[RunDir], name: str) -> Cancelled:
        """Cancel every run that has not ended, with one call to scancel. `name` says what the runs are.

        Raises SchedulerError.
        """
        jobs, waiting = self._jobs(runs)
        again = asked_before(jobs)
        try:
            refused = ask_all_to_stop(self.login, jobs, again)
        except LoginError as error:
            refused = str(error)
        self._seen = None
        see_off([run for run in waiting if not begun(run)], refused)
        self.statuses(waiting)  # record what Slurm says of those, because it forgets jobs
        return counted(jobs, again, waiting)

    def _jobs(self, runs: Sequence[RunDir]) -> tuple[dict[RunDir, str], list[RunDir]]:
        """The latest job of each run that has not ended, and the runs that are pending.

        Raises SchedulerError.
        """
        found = {
            run: status for run, status in zip(runs, self.statuses(runs), strict=True) if not status.ended
        }
        jobs = {run: job_in(status.handle) for run, status in found.items()}
        for run, job in jobs.items():
            if not job or self._foreign(run, job):
                raise SchedulerError(f"{run.id} was not asked to stop: {found[run].reason}")
        return jobs, [run for run, status in found.items() if status.state == "submitted"]

    def _see(self, runs: Sequence[RunDir], ids: Sequence[str]) -> Seen:
        """Query Slurm for the jobs, at most as often as `Pace` allows. Raises LoginError."""
        if self._seen is not None and self._seen.ids == ids:
            now = self._seen.pace.look()
            if now is False:
                self._bring()
            if not now:
                return self._seen
        pace = self._seen.pace if self._seen is not None and self._seen.ids == ids else Pace(runs)
        stopped = [job for run, job in zip(runs, ids, strict=True) if run.cancel.exists()]
        known = look_up(self._put, ids, stopped)
        alone = known.get(ids[0]) if len(ids) == 1 else None
        here = site(self._put(questions())) if alone is not None and needs_site(alone) else None
        self._seen = Seen(ids, pace, known, here)
        return self._seen

    def _put(self, questions: Mapping[str, Sequence[str]]) -> Mapping[str, Answer]:
        return ask(self.login, questions)

    def _bring(self) -> None:
        """Fetch what the runs have written if that is on another host. Slurm is not queried for it."""

    def _send(self, run: RunDir, event: str) -> None:
        before = run.read_state()
        replace_json(run.state, {"state": "submitted", "time": now()})
        run.append(Submitting())
        try:
            job = self._sbatch(run, event)
        except NotSubmittedError as error:
            run.append(Refused(reason=str(error)))
            replace_json(run.state, {**before, "reason": str(error)})
            raise
        handle = str(Handle(run.read_about()["cluster"]["name"], job))
        self.record(run, event, handle, self._command(run))

    def _command(self, run: RunDir) -> tuple[str, ...]:
        return sbatch_command(run.scripts / "job.sbatch", submission_of(run))

    def record(self, run: RunDir, event: str, handle: str, command: tuple[str, ...]) -> None:
        run.event(event, handle=handle, command=list(command))

    def _sbatch(self, run: RunDir, event: str) -> str:
        from launcher.schedulers.slurm.executor import RunExecutor, Supervise

        return str(RunExecutor(run, self.login).submit(Supervise(str(run.path))).job_id)

    def send_array(self, sweep: PreparedSweep, runs: Sequence[RunDir]) -> str:
        """Submit the array and return its id. Raises SchedulerError."""
        from launcher.schedulers.slurm.executor import ArrayExecutor, Supervise
        from launcher.schedulers.slurm.sweep import write_folder

        write_folder(sweep, runs)
        executor = ArrayExecutor(sweep.folder, sweep.id, sweep.script.path, self.login)
        try:
            jobs = executor.submit_array([Supervise(str(run.path)) for run in runs])
        except NotSubmittedError:
            shutil.rmtree(sweep.folder)
            raise
        return str(jobs[0].job_id).partition("_")[0]


def asking(clusters: str | None) -> str:
    """Shell after which Slurm's commands query this cluster.

    sacct does not read the variable by itself. If the cluster is the host's own, nothing is set: with the
    variable each command queries slurmdbd first, and hangs if that hangs.
    """
    if not clusters:
        return ""
    own = "$(scontrol show config 2>/dev/null | sed -n 's/^ClusterName *= *//p')"
    return f'[ "{own}" = {shlex.quote(clusters)} ] || export SLURM_CLUSTERS={shlex.quote(clusters)}\n'


def _doing(status: Status) -> str:
    return "in the queue" if status.state == "submitted" else status.state


def _named_job(run: RunDir, named: Mapping[str, str]) -> str | None:
    sweep = run.read_about().get("sweep", {})
    if (array := named.get(sweep.get("id", ""))) is not None:
        return f"{array}_{sweep['task']}"
    return named.get(run.id)
