"""The Slurm scheduler: a run is one job, or several that follow each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.rundir.files import delete_folder
from launcher.rundir.find import remember_root
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Cancelled, Prepared, Request, Scheduler, SchedulerError, Status
from launcher.schedulers.login import Login, LoginError, ask
from launcher.schedulers.rundir import in_force, is_being_submitted, may_start, writing
from launcher.schedulers.slurm.cancel_all import cancel_jobs
from launcher.schedulers.slurm.handle import handle_of, job_in, job_of
from launcher.schedulers.slurm.identity import belongs_to, message_of_foreign_job
from launcher.schedulers.slurm.jobs import (
    NotYetError,
    begun,
    jobs_of,
    newest_jobs,
    sbatch_command,
    submission_of,
)
from launcher.schedulers.slurm.login import store_of
from launcher.schedulers.slurm.pending import needs_site
from launcher.schedulers.slurm.query_interval import Pace
from launcher.schedulers.slurm.records import Records, look_up
from launcher.schedulers.slurm.run_state import lives, status_from_slurm
from launcher.schedulers.slurm.site import Site, questions, site
from launcher.schedulers.slurm.submission import Submission
from launcher.schedulers.slurm.sweep import forget_text, prepare_array
from launcher.schedulers.store import Store
from launcher.schedulers.wanted_files import Wanted
from launcher.spec.records import ClusterRecord

if TYPE_CHECKING:
    from launcher.render.render import RenderedFile
    from launcher.render.values import Target
    from launcher.schedulers.base import PreparedSweep

DEFAULT_PYTHON = "python3"


@dataclass(frozen=True)
class LastQuery:
    """Slurm's last answer about some jobs, cached for callers that query several times a second."""

    ids: Sequence[str]
    pace: Pace
    records: Records
    site: Site | None
    "Set if there is one job, and it is pending for a reason that depends on the site."


class SlurmScheduler(Scheduler):
    """Runs jobs through Slurm. The run directory must be on a file system that the nodes share."""

    multi_node = True
    own_logs = "slurm-*.out"

    def __init__(self, store: Store | None = None) -> None:
        """`store` is where Slurm's commands run and run directories are; by default this host."""
        self.store = store if store is not None else Store()
        self._last_query: LastQuery | None = None

    @classmethod
    def at(cls, cluster: ClusterRecord) -> SlurmScheduler:
        return cls(store_of(cluster))

    @classmethod
    def place(cls, cluster: ClusterRecord) -> Hashable:
        login, clusters = cluster.login, cluster.slurm.clusters
        runs = cluster.paths.runs if login is not None else None
        return (login, runs, clusters) if login or clusters else None

    def handle(self, run: RunDir) -> str:
        return handle_of(run, job_of(run))

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

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        return self._check([("", prepared)])

    def _check(self, runs: Sequence[tuple[str, Prepared]]) -> tuple[str, ...]:
        """Check runs before they are queued, each with its values: one, or those of an array, which ask for
        the same resources."""
        from launcher.schedulers.slurm.checks import problems

        _, first = runs[0]
        self.store.check(first.request)
        script = next(file.text for file in first.files if file.path == "job.sbatch")
        jobs = [(values, run.request.job, run.request.plan) for values, run in runs]
        findings = problems(self.store.login, first.request.cluster, jobs, script)
        if findings.refusals:
            raise SchedulerError("\n".join(findings.refusals))
        return findings.warnings

    def submit(self, prepared: Prepared) -> RunDir:
        """Submit the run. Raises SchedulerError; if there is certainly no job, nothing is left behind."""
        return self._submit([prepared], prepared.command)[0]

    def prepare_sweep(
        self, sweep_id: str, runs: Sequence[tuple[Prepared, tuple[str, ...]]], at_once: int | None = None
    ) -> PreparedSweep:
        return prepare_array(sweep_id, runs, at_once)

    def check_sweep(self, sweep: PreparedSweep) -> tuple[str, ...]:
        return self._check(sweep.by_values)

    def submit_sweep(self, sweep: PreparedSweep) -> list[RunDir]:
        return self._submit(sweep.runs, sweep.command, sweep)

    def _submit(
        self, prepared: Sequence[Prepared], command: tuple[str, ...], sweep: PreparedSweep | None = None
    ) -> list[RunDir]:
        runs: list[RunDir] = []
        try:
            for run in prepared:
                with writing(run.run_dir):
                    runs.append(self.store.write(run))
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
        return self.store.cached_status(run, lambda: self.statuses([run])[0])

    def statuses(self, runs: Sequence[RunDir]) -> list[Status]:
        """Query Slurm for all runs that have not ended by their own records, in one round trip.

        Jobs that the controller does not know or that ended badly take a second one.
        """
        jobs = {run: job_of(run) for run in runs if lives(run.read_state())}
        self.store.select_runs(list(jobs))
        records, trouble = Records(), ""
        site_: Site | None = None
        if unknown := [run for run, job in jobs.items() if job is None]:
            found_jobs, trouble = self._by_comment(unknown)
            jobs |= found_jobs
        if with_job := {run: job for run, job in jobs.items() if job is not None}:
            try:
                query = self._query(list(with_job), list(with_job.values()))
            except LoginError as error:
                trouble = str(error)
            else:
                records, site_ = query.records, query.site
                trouble = records.controller
        # A run may have moved to a linked job while Slurm was queried.
        known = {run: job for run, job in with_job.items() if run not in unknown}
        moved = [run for run, job in known.items() if not trouble and job != job_of(run)]
        moved_statuses = dict(zip(moved, self.statuses(moved), strict=True)) if moved else {}
        return [
            moved_statuses.get(run) or status_from_slurm(run, jobs.get(run), records, trouble, site_)
            for run in runs
        ]

    def _by_comment(self, runs: Sequence[RunDir]) -> tuple[dict[RunDir, str | None], str]:
        """Find the jobs of runs for which sbatch's answer was lost. Also return why Slurm did not answer."""
        try:
            named = newest_jobs(self.store, set[str]().union(*map(jobs_of, runs)))
        except NotYetError as error:
            return {}, f"Slurm does not answer: {error}"
        # A job may have begun, and recorded itself, while Slurm was queried.
        return {run: job_of(run) or _named_job(run, named) for run in runs}, ""

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self.store.fetch(run, wanted)

    def where(self, run: RunDir) -> str:
        return self.store.where(run)

    def remove(self, runs: Sequence[RunDir]) -> None:
        self.store.remove(runs, forget_text(runs, self.store))
        for run in runs:
            delete_folder(run.path)

    def cancel(self, run: RunDir) -> None:
        """Cancel a pending job. Ask a running one for a checkpoint; a second call ends it."""
        if self.cancel_all([run], run.id) == Cancelled():
            raise SchedulerError(f"{run.id} is not running: {self.status(run).state}")

    def cancel_all(self, runs: Sequence[RunDir], name: str) -> Cancelled:
        """Cancel every run that has not ended, with one call to scancel. Messages call the runs `name`.

        Raises SchedulerError.
        """
        if not (jobs := self._jobs_to_stop(runs)):
            return Cancelled()
        again = {run for run in jobs if run.cancel.exists()}  # a second request ends the ranks at once
        foreign = {run: why for run, job in jobs.items() if (why := self._why_foreign(run, job))}
        own = {run: job for run, job in jobs.items() if job and run not in foreign}

        def cancel(login: Login, again: Collection[RunDir]) -> str:
            refused = cancel_jobs(login, own, [run for run in own if run in again])
            return "; ".join(filter(None, [*foreign.values(), refused]))

        refused = self.store.ask_to_stop(
            list(jobs),
            name,
            lambda: cancel(self.store, again),
            lambda: cancel(self.store.login, own),
        )
        self._last_query = None
        ends = {run: run.read_state() for run in jobs}  # some may have stopped already
        living = [run for run, state in ends.items() if lives(state) or state.state == "cancelled"]
        latest = {run: job_of(run) or jobs[run] for run in living}
        if moved := {run: job for run, job in latest.items() if job != jobs[run]}:  # to a linked job
            refused = refused or cancel_jobs(self.store, moved, again & moved.keys())
        waiting = [run for run in living if not begun(run)]
        one = len(jobs) == 1
        if refused and not waiting:
            anyway = f"{name} has begun, and stops anyway" if one else "all have begun, and stop anyway"
            print(f"launcher: {refused}; {anyway}", file=sys.stderr)
        elif refused:
            self._withdraw_requests(waiting)
            not_begun = f"{name} has not begun and was not cancelled: cancel it again"
            several = f"{len(waiting)} runs have not begun and were not cancelled: cancel them again"
            raise SchedulerError(f"{refused}; {not_begun if one else several}")
        if one or not self.store.remote:  # this records what Slurm reports, because Slurm forgets jobs
            ended = zip(waiting, self.statuses(waiting), strict=True)
            waiting = [run for run, status in ended if status.ended]
        return Cancelled.of(living, again, waiting)

    def _withdraw_requests(self, runs: Sequence[RunDir]) -> None:
        """Withdraw requests to stop, because the next one would count as the second."""
        for run in runs:
            run.cancel.unlink(missing_ok=True)
        self.store.select_runs(runs)
        with suppress(SchedulerError):  # the next round trip about the runs sends it anyway
            self.store.sync()

    def _jobs_to_stop(self, runs: Sequence[RunDir]) -> dict[RunDir, str]:
        """Return the latest job of each run that has not ended. Raises SchedulerError if a job is not known.

        The job of a run that was sent is "" if Slurm has none yet: sbatch may still be running, also after
        the process that started it was killed, and the job must find the request to stop.

        If the runs are on another host and their local records name every job, Slurm is not queried: the
        answer to the request shows which runs had ended.
        """
        if self.store.remote:
            jobs = {run: job_of(run) or "" for run in runs if lives(run.read_state())}
            if all(jobs.values()):
                return jobs
        jobs = {}
        for run, status in zip(runs, self.statuses(runs), strict=True):
            job = job_in(status.handle)
            may_get_one = not job and may_start(run) and (status.state == "lost" or is_being_submitted(run))
            if not status.ended and not job and not may_get_one:
                raise SchedulerError(f"{run.id} was not asked to stop: {status.reason}")
            if not status.ended or may_get_one:
                jobs[run] = job
        return jobs

    def _why_foreign(self, run: RunDir, job: str) -> str:
        """Return why this job id is not the run's, according to the last answer, or "" if it is or may be."""
        record = self._last_query.records.get(job) if self._last_query is not None else None
        return (
            message_of_foreign_job(job, record) if record is not None and not belongs_to(record, run) else ""
        )

    def _query(self, runs: Sequence[RunDir], ids: Sequence[str]) -> LastQuery:
        """Query Slurm for the jobs, at most as often as `Pace` allows. Raises LoginError."""
        last = self._last_query
        pace = last.pace if last is not None and last.ids == ids else Pace(runs)
        if last is not None and pace is last.pace:
            now = pace.is_due()
            if now is False:
                self.store.sync()
            if not now:
                return last
        stopped = [job for run, job in zip(runs, ids, strict=True) if run.cancel.exists()]
        run_commands = partial(ask, self.store)
        records = look_up(run_commands, ids, stopped)
        only = records.get(ids[0]) if len(ids) == 1 else None
        site_ = site(run_commands(questions())) if only is not None and needs_site(only) else None
        self._last_query = LastQuery(ids, pace, records, site_)
        return self._last_query


def _doing(status: Status) -> str:
    return "in the queue" if status.state == "submitted" else status.state


def _named_job(run: RunDir, named: Mapping[str, str]) -> str | None:
    """Return the run's job by the jobs' names. A job of the run alone is later than its sweep's array."""
    sweep = run.read_about().sweep
    array = named.get(sweep.id) if sweep is not None else None
    return named.get(run.id) or (f"{array}_{sweep.task}" if sweep is not None and array else None)
