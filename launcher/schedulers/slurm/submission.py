"""Submit runs as a job or an array, and record the job in their events.

On this host a submission goes through submitit, whose folder programs may read. On another host it is text
that travels with the run directories in one round trip.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from shlex import quote

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import PreparedSweep
from launcher.schedulers.login import LoginError
from launcher.schedulers.slurm.handle import handle_of, job_of
from launcher.schedulers.slurm.jobs import (
    InterruptedSubmissionError,
    NotSubmittedError,
    jobs_of,
    submission_of,
    submit,
)
from launcher.schedulers.slurm.records import array_of
from launcher.schedulers.slurm.sweep import folder_text
from launcher.schedulers.store import Store
from launcher.spec.events import Refused, Submitting
from launcher.supervise.host import this_process


@dataclass(frozen=True)
class Submission:
    """The submission of one run, or of the runs of a sweep."""

    runs: Sequence[RunDir]
    event: str
    command: tuple[str, ...]
    sweep: PreparedSweep | None = None

    def send(self, store: Store) -> None:
        """Submit and record.

        Raises NotSubmittedError, and the runs' states are as before; UnclearError.
        """
        before = [(run, run.read_state()) for run in self.runs]
        try:
            job = self._as_text(store) if store.remote else self._through_submitit(store)
        except NotSubmittedError as error:
            for run, state in before:
                if self._is_recorded(run):
                    run.append(Refused(reason=str(error)))
                    replace_json(run.state, state.replace(reason=str(error)).as_json())
            if self.sweep is not None:
                with suppress(LoginError):
                    store.login.run(f"rm -rf {quote(str(self.sweep.folder))}")
            if isinstance(error, InterruptedSubmissionError):
                raise KeyboardInterrupt from None
            raise
        except BaseException:
            for run in filter(self._is_recorded, self.runs):  # there may be a job
                if (state := run.read_state()).submitter is not None:  # otherwise it has begun
                    replace_json(run.state, state.replace(submitter=None).as_json())
            raise
        for task, run in enumerate(self.runs):
            its_job = job if self.sweep is None else f"{job}_{task}"
            if store.remote and job_of(run) == its_job:
                continue  # the event came with the answer
            run.event(self.event, handle=handle_of(run, its_job), command=list(self.command))
            store.fetch(run)

    def _is_recorded(self, run: RunDir) -> bool:
        """Return whether the run's events contain the request for this submission's job."""
        return submission_of(run) == int(self.command[-1])

    def _record_request(self) -> None:
        """Record the request before it is sent: afterwards Slurm may have a job even if this process dies."""
        for run in self.runs:
            if not self._is_recorded(run):
                state = {"state": "submitted", "time": now(), "submitter": this_process()}
                replace_json(run.state, state)
                run.append(Submitting())

    def _through_submitit(self, store: Store) -> str:
        from launcher.schedulers.slurm.executor import ArrayExecutor, RunExecutor, Supervise

        started = [Supervise(str(run.path)) for run in self.runs]
        if (sweep := self.sweep) is None:
            self._record_request()
            return str(RunExecutor(self.runs[0], store.login).submit(started[0]).job_id)
        made = store.login.run(folder_text(sweep, self.runs))
        if made.returncode:
            message = made.stderr.decode(errors="replace").strip()
            raise NotSubmittedError(f"cannot write {sweep.folder}: {message}")
        assert sweep.script is not None
        self._record_request()
        executor = ArrayExecutor(sweep.folder, sweep.id, sweep.script.path, store.login)
        return array_of(str(executor.submit_array(started)[0].job_id))

    def _as_text(self, store: Store) -> str:
        """Send new code, then run directories, job and events in one round trip."""
        from launcher.schedulers.over_ssh.remote_store import NotSentError
        from launcher.schedulers.over_ssh.secret_checks import secret_checks

        comment = self.runs[0].id if self.sweep is None else self.sweep.id
        first = "" if self.sweep is None else folder_text(self.sweep, self.runs)
        earlier = set[str]().union(*map(jobs_of, self.runs))
        checks = dict.fromkeys(check for run in self.runs for check in secret_checks(run.read_about()))

        def with_code() -> str:
            self._record_request()
            then = self._record_script(store)
            return submit(store, self.command, comment, earlier=earlier, first=first, then=then)

        try:
            return store.deliver(self.runs, list(checks), with_code)
        except NotSentError as error:
            raise NotSubmittedError(str(error)) from None

    def _record_script(self, store: Store) -> str:
        """Return shell that records the job `$job` in each run's events."""
        record = {"event": self.event, "handle": handle_of(self.runs[0], "@"), "command": self.command}
        before, after = map(quote, json.dumps(record)[1:].split("@", 1))
        events = " ".join(quote(store.path(run, run.events)) for run in self.runs)
        task = "" if self.sweep is None else "_$i"
        event = f'\'{{"time": "%s", %s%s%s\\n\' "$now" {before} "${{job}}{task}" {after}'
        return (
            f"now=$(date -u +%Y-%m-%dT%H:%M:%S.%6NZ) i=0\nfor f in {events}; do\n"
            f'printf {event} >>"$f"\ni=$((i + 1))\ndone'
        )
