"""Slurm: a run in one job, or in several that follow each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.rundir.files import delete_folder
from launcher.rundir.find import remember_root
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Cancelled, Prepared, Request, Scheduler, SchedulerError, Status
from launcher.schedulers.login import LoginError, ask
from launcher.schedulers.rundir import in_force, may_start
from launcher.schedulers.slurm.cancel_all import asked_before, cancel_job, cancel_jobs, see_off
from launcher.schedulers.slurm.handle import handle_of, job_in
from launcher.schedulers.slurm.identity import another, is_of
from launcher.schedulers.slurm.jobs import (
    QUEUE,
    begun,
    found,
    jobs_of,
    sbatch_command,
    submission_of,
)
from launcher.schedulers.slurm.login import store_of
from launcher.schedulers.slurm.pending import needs_site
from launcher.schedulers.slurm.query_interval import Pace
from launcher.schedulers.slurm.records import Records, look_up
from launcher.schedulers.slurm.run_state import judged, lives
from launcher.schedulers.slurm.site import Site, questions, site
from launcher.schedulers.slurm.submission import Submission
from launcher.schedulers.slurm.sweep import forget_text
from launcher.schedulers.store import Folder, Store

if TYPE_CHECKING:
    from launcher.render.render import RenderedFile
    from launcher.render.values import Target
    from launcher.schedulers.base import PreparedSweep
    from launcher.schedulers.wanted import Wanted

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

    def __init__(self, store: Store | None = None) -> None:
        """`store` is where Slurm's commands run and run directories are; by default this host."""
        self.store: Store = store if store is not None else Folder()
        self._seen: Seen | None = None

    @classmethod
    def at(cls, cluster: Mapping[str, Any]) -> SlurmScheduler:
        return cls(store_of(cluster))

    @classmethod
    def place(cls, cluster: Mapping[str, Any]) -> Hashable:
        login, clusters = cluster.get("login"), (cluster.get("slurm") or {}).get("clusters")
        runs = (cluster.get("paths") or {}).get("runs") if login is not None else None
        return (login, runs, clusters) if login or clusters else None

    def handle(self, run: RunDir) -> str:
        return str(handle_of(run))

    def prepare(self, request: Request) -> Prepared:
        """Prepare a run with the code as it is now. Raises RenderError, SchedulerError, OSError."""
        from launcher.schedulers.prepare import ready

        place = self.store.place(request)
        if re.search("%[jAat]", place.run_dir):
            raise SchedulerError(f"{place.run_dir}: Slurm puts a job's id in the place of %j, %A, %a and %t")
        command = sbatch_command(f"{place.run_dir}/scripts/job.sbatch")
        return ready(self, request, place, request.cluster.paths.python or DEFAULT_PYTHON, command)

    @classmethod
    def scripts(cls, target: Target) -> tuple[RenderedFile, ...]:
        from launcher.schedulers.slurm.scripts import scripts

        return scripts(target)

    @classmethod
    def notes(cls, target: Target) -> tuple[str, ...]:
        from launcher.schedulers.slurm.scripts import cpus_note

        note = cpus_note(target)
        return (*([note] if note is not None else []), *super().notes(target))

    @classmethod
    def by_hand(cls, scripts: Path) -> str:
        return f"`sbatch {scripts / 'job.sbatch'}` starts it"

    def check(self, prepared: Prepared, tasks: int = 1) -> tuple[str, ...]:
        """Check the job before it is queued. `tasks` is the number of such jobs in an array."""
        from launcher.schedulers.slurm.checks import problems

        request = prepared.request
        self.store.check(request)
        script = next(file.text for file in prepared.files if file.path == "job.sbatch")
        found = problems(self.store.login, request.cluster, request.job, request.plan, script, tasks)
        if found.refusals:
            raise SchedulerError("\n".join(found.refusals))
        return found.warnings

    def submit(self, prepared: Prepared) -> RunDir:
        """Submit the run. Raises SchedulerError; if there is certainly no job, nothing is left behind."""
        return self._submit([prepared], prepared.command)[0]

    def prepare_sweep(
        self, sweep_id: str, runs: Sequence[tuple[Prepared, tuple[str, ...]]], at_once: int | None = None
    ) -> PreparedSweep:
        from launcher.schedulers.slurm.sweep import prepare

        return prepare(sweep_id, runs, at_once)

    def check_sweep(self, sweep: PreparedSweep) -> tuple[str, ...]:
        return self.check(sweep.runs[0], len(sweep.runs))

    def submit_sweep(self, sweep: PreparedSweep) -> list[RunDir]:
        return self._submit(sweep.runs, sweep.command, sweep)

    def _submit(
        self, prepared: Sequence[Prepared], command: tuple[str, ...], sweep: PreparedSweep | None = None
    ) -> list[RunDir]:
        runs: list[RunDir] = []
        try:
            for one in prepared:
                try:
                    runs.append(self.store.write(one))
                except OSError as error:
                    raise SchedulerError(f"cannot write {one.run_dir}: {error.strerror}") from None
            remember_root(runs[0].path.parent)
            Submission(runs, "submitted", command, sweep).send(self.store)
        except BaseException:
            if runs and not all(map(may_start, runs)):  # Slurm is asked when all have recorded it
                with suppress(SchedulerError):  # on another host, they may stay on both sides
                    self.remove(runs)
            raise
        return runs

    def resume(self, run: RunDir, again: Prepared | None = None) -> None:
        """Submit a new job for the run, which continues from its last checkpoint."""
        status = self.status(run)
        if not status.ended:
            raise SchedulerError(f"{run.id} is still {_doing(status)}")
        with in_force(run, again):
            run.cancel.unlink(missing_ok=True)
            for name in ("slurm-excluded", "slurm-unfit"):  # the nodes may have been repaired
                (run.path / name).unlink(missing_ok=True)
            script = self.store.path(run, run.scripts / "job.sbatch")
            command = sbatch_command(script, submission_of(run) + 1)
            Submission([run], "resubmitted", command).send(self.store)

    def status(self, run: RunDir) -> Status:
        return self.store.lately(run, lambda: self.statuses([run])[0])

    def statuses(self, runs: Sequence[RunDir]) -> list[Status]:
        """Query Slurm for all runs that have not ended by their own records, in one round trip.

        Jobs that the controller does not know or that ended badly take a second one.
        """
        jobs: dict[Path, str | None] = {}
        for run in runs:
            if lives(run.read_state()):
                jobs[run.path] = handle_of(run).job
        self.store.look_along([run for run in runs if run.path in jobs])
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
            answer = ask(self.store, {"queue": QUEUE})["queue"]
        except LoginError as error:
            return {}, str(error)
        if answer.code:
            return {}, f"Slurm does not answer: {answer.err.strip()}"
        # A job may have begun, and recorded itself, while Slurm was queried.
        named = found(answer, set[str]().union(*map(jobs_of, runs)))
        return {run.path: handle_of(run).job or _named_job(run, named) for run in runs}, ""

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self.store.fetch(run, wanted)

    def where(self, run: RunDir) -> str:
        return self.store.where(run)

    def remove(self, runs: Sequence[RunDir]) -> None:
        self.store.remove(runs, forget_text(runs, self.store))
        for run in runs:
            delete_folder(run.path)

    def logs(self, run: RunDir, since: int) -> bytes:
        """The output of the batch scripts and supervisors of all jobs, from byte `since` on."""
        parts = [file.read_bytes() for file in run.path.glob("slurm-*.out")]
        return b"".join(parts)[since:]

    def cancel(self, run: RunDir) -> None:
        """Cancel a pending job. Ask a running one for a checkpoint; a second call ends it."""
        if not (job := self._to_stop([run]).get(run)):
            raise SchedulerError(f"{run.id} is not running: {self.status(run).state}")
        again, foreign = run.cancel.exists(), self._foreign(run, job)
        refused = self.store.ask_to_stop(
            [run],
            run.id,
            lambda: foreign or cancel_job(self.store, job, again=again),
            lambda: foreign or cancel_job(self.store.login, job, again=True),
        )
        self._seen = None
        if self.store.far and not lives(run.read_state()):
            raise SchedulerError(f"{run.id} is not running: {run.read_state().get('state')}")
        if self.store.far and handle_of(run).job != job:  # the run has moved to a linked job
            return self.cancel(run)
        if not refused and not begun(run):
            self.statuses([run])  # record what Slurm says, because it forgets jobs
        elif refused and begun(run):
            print(f"launcher: {refused}; {run.id} has begun, and stops anyway", file=sys.stderr)
        elif refused:
            run.cancel.unlink(missing_ok=True)  # otherwise the next request would count as the second
            with suppress(SchedulerError):  # the next round trip about the run sends it anyway
                self.store.fetch(run)
            raise SchedulerError(f"{refused}; {run.id} has not begun and was not cancelled: cancel it again")
        return None

    def cancel_all(self, runs: Sequence[RunDir], name: str) -> Cancelled:
        """Cancel every run that has not ended, with one call to scancel. `name` says what the runs are.

        Raises SchedulerError.
        """
        if not (jobs := self._to_stop(runs)):
            return Cancelled()
        for run, job in jobs.items():
            if foreign := self._foreign(run, job):
                raise SchedulerError(f"{run.id} was not asked to stop: {foreign}")
        again = asked_before(jobs)
        refused = self.store.ask_to_stop(
            list(jobs),
            name,
            lambda: cancel_jobs(self.store, jobs, again),
            lambda: cancel_jobs(self.store.login, jobs, list(jobs)),
        )
        self._seen = None
        if self.store.far:
            jobs = {run: job for run, job in jobs.items() if lives(run.read_state())}
        waiting = [run for run in jobs if not begun(run)]
        see_off(waiting, refused)
        if not self.store.far:  # record what Slurm says of these, because it forgets jobs
            ended = zip(waiting, self.statuses(waiting), strict=True)
            waiting = [run for run, status in ended if status.ended]
        return Cancelled.of(jobs, again, waiting)

    def _to_stop(self, runs: Sequence[RunDir]) -> dict[RunDir, str]:
        """The latest job of each run that has not ended. Raises SchedulerError if a job is not known.

        If the runs are on another host and their records here name every job, Slurm is not asked: what comes
        with the answer to the request shows which runs had ended.
        """
        if self.store.far:
            jobs = {run: handle_of(run).job or "" for run in runs if lives(run.read_state())}
            if all(jobs.values()):
                return jobs
        found = list(zip(runs, self.statuses(runs), strict=True))
        for run, status in found:
            if not status.ended and not job_in(status.handle):
                raise SchedulerError(f"{run.id} was not asked to stop: {status.reason}")
        return {run: job_in(status.handle) for run, status in found if not status.ended}

    def _foreign(self, run: RunDir, job: str) -> str:
        """Why this job id is not the run's, by the last answer; empty if it is or may be."""
        record = self._seen.known.get(job) if self._seen is not None else None
        return another(job, record) if record is not None and not is_of(record, run) else ""

    def _see(self, runs: Sequence[RunDir], ids: Sequence[str]) -> Seen:
        """Query Slurm for the jobs, at most as often as `Pace` allows. Raises LoginError."""
        if self._seen is not None and self._seen.ids == ids:
            now = self._seen.pace.look()
            if now is False:
                self.store.bring()
            if not now:
                return self._seen
        pace = self._seen.pace if self._seen is not None and self._seen.ids == ids else Pace(runs)
        stopped = [job for run, job in zip(runs, ids, strict=True) if run.cancel.exists()]
        put = partial(ask, self.store)
        known = look_up(put, ids, stopped)
        alone = known.get(ids[0]) if len(ids) == 1 else None
        here = site(put(questions())) if alone is not None and needs_site(alone) else None
        self._seen = Seen(ids, pace, known, here)
        return self._seen


def _doing(status: Status) -> str:
    return "in the queue" if status.state == "submitted" else status.state


def _named_job(run: RunDir, named: Mapping[str, str]) -> str | None:
    sweep = run.read_about().get("sweep", {})
    if (array := named.get(sweep.get("id", ""))) is not None:
        return f"{array}_{sweep['task']}"
    return named.get(run.id)
