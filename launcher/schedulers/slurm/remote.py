"""Slurm behind a login node: the Slurm scheduler, working on local copies of the remote run directories."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Cancelled, SchedulerError, Status
from launcher.schedulers.over_ssh.copies import Copies, NotSentError, absolute
from launcher.schedulers.over_ssh.exchange import Wanted
from launcher.schedulers.over_ssh.login import LoginError
from launcher.schedulers.over_ssh.rsh import quote
from launcher.schedulers.over_ssh.ssh import Over, login_environment
from launcher.schedulers.slurm.cancel_all import ask_all_to_stop, asked_before, counted, see_off
from launcher.schedulers.slurm.handle import Handle, handle_of
from launcher.schedulers.slurm.jobs import (
    NotSubmittedError,
    begun,
    jobs_of,
    sbatch_command,
    submission_of,
    submit,
)
from launcher.schedulers.slurm.judged import lives
from launcher.schedulers.slurm.scheduler import SlurmScheduler, asking
from launcher.schedulers.slurm.sweep import folder_text, forget_text
from launcher.supervise.secret_file import LONGEST

if TYPE_CHECKING:
    from launcher.schedulers.base import Prepared, PreparedSweep, Request


class RemoteSlurm(SlurmScheduler):
    """Submits through a login node. `runs` is a folder on a file system that it shares with the nodes."""

    def __init__(self, login: str, runs: str | None, clusters: str | None = None) -> None:
        super().__init__()
        self.there = absolute(runs, f"login {login}")
        self.copies = Copies(login_node(login, clusters), self.there)
        self.login = self.copies.mirror

    def prepare(self, request: Request) -> Prepared:
        """Prepare a run with the code as it is now. Raises RenderError, SchedulerError, OSError."""
        workdir, warnings = self.copies.take_code(request)
        ready = self._prepared(request, f"{self.there}/{request.run_id}", workdir)
        return replace(ready, warnings=(*ready.warnings, *warnings))

    def status(self, run: RunDir) -> Status:
        return self.copies.lately(run, lambda: super(RemoteSlurm, self).status(run))

    def statuses(self, runs: Sequence[RunDir]) -> list[Status]:
        living = [run for run in runs if lives(run.read_state())]
        self.copies.mirror.choose(living, self.copies.wanted)
        return super().statuses(runs)

    def _bring(self) -> None:
        self.login.run(":")

    def cancel(self, run: RunDir) -> None:
        """Cancel in one round trip, which also reports whether the run was still going.

        A pending job takes two.
        """
        job = handle_of(run).job
        if job is None or not lives(run.read_state()):  # sbatch's answer was lost, or the run has ended
            with self.copies.asking_to_stop(run):
                return super().cancel(run)
        with self.copies.asking_to_stop(run), self.copies.strictly([run]):
            refused = self._ask_to_stop(run, job)
        if not lives(state := run.read_state()):
            raise SchedulerError(f"{run.id} is not running: {state.get('state')}")
        if handle_of(run).job != job:  # the run moved to a linked job in the meantime
            return self.cancel(run)
        self._see_it_off(run, refused, waits=not begun(run))
        return None

    def _take_back(self, run: RunDir) -> None:
        super()._take_back(run)
        with suppress(SchedulerError):  # the next round trip about the run does it anyway
            self.fetch(run)

    def cancel_all(self, runs: Sequence[RunDir], name: str) -> Cancelled:
        """Cancel in one round trip. The local copies tell which runs are still going."""
        jobs = {run: handle_of(run).job or "" for run in runs if lives(run.read_state())}
        if not all(jobs.values()):  # an answer of sbatch was lost
            jobs = self._jobs(list(jobs))[0]
        if not jobs:
            return Cancelled()
        again = asked_before(jobs)
        with self.copies.asking_all_to_stop(list(jobs), name), self.copies.strictly(list(jobs)):
            refused = ask_all_to_stop(self.login, jobs, again)
        jobs = {run: job for run, job in jobs.items() if lives(run.read_state())}
        waiting = [run for run in jobs if not begun(run)]
        see_off(waiting, refused)
        return counted(jobs, again, waiting)

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self.copies.fetch(run, wanted)

    def where(self, run: RunDir) -> str:
        return self.copies.where(run)

    def remove(self, runs: Sequence[RunDir]) -> None:
        self.copies.remove(runs, forget_text(runs, self.there))
        super().remove(runs)

    def check(self, prepared: Prepared, tasks: int = 1) -> tuple[str, ...]:
        return self._ask_before_the_queue(prepared, self.copies.ssh, tasks)

    def write(self, prepared: Prepared) -> RunDir:
        return self.copies.write(prepared)

    def withdraw(self, runs: Sequence[RunDir]) -> None:
        with suppress(SchedulerError):  # otherwise they stay on both sides
            self.remove(runs)

    def _command(self, run: RunDir) -> tuple[str, ...]:
        script = f"{self.there}/{run.scripts.relative_to(run.path.parent)}/job.sbatch"
        return sbatch_command(script, submission_of(run))

    def _sbatch(self, run: RunDir, event: str) -> str:
        return self._submit([run], run.id, Submission(event, self._command(run)))

    def send_array(self, sweep: PreparedSweep, runs: Sequence[RunDir]) -> str:
        array = Submission("submitted", sweep.command, folder_text(sweep, runs), task="_$i")
        try:
            return self._submit(runs, sweep.id, array)
        except NotSubmittedError:
            with suppress(LoginError):
                self.copies.ssh.run(f"rm -rf {quote(str(sweep.folder))}")
            raise

    def _submit(self, runs: Sequence[RunDir], comment: str, what: Submission) -> str:
        """Send run directories, job and events in one round trip, after the code if that is new there."""
        abouts = [run.read_about() for run in runs]
        secrets = [
            check
            for about in abouts
            for check in _secret_checks(about["job"]["secrets"], bool(about["cluster"]["setup"]))
        ]
        then = what.then(self.there, runs, abouts[0]["cluster"]["name"])
        earlier = set[str]().union(*map(jobs_of, runs))
        try:
            return self.copies.deliver(
                runs,
                list(dict.fromkeys(secrets)),
                lambda: submit(
                    self.login, what.command, comment, earlier=earlier, first=what.first, then=then
                ),
            )
        except NotSentError as error:
            raise NotSubmittedError(str(error)) from None

    def record(self, run: RunDir, event: str, handle: str, command: tuple[str, ...]) -> None:
        if str(handle_of(run)) != handle:  # the job was found in the queue, because sbatch's answer was lost
            super().record(run, event, handle, command)
            self.fetch(run)


@dataclass(frozen=True)
class Submission:
    """The submission of a job or an array."""

    event: str
    command: tuple[str, ...]
    first: str = ""
    "Shell that runs before the submission."
    task: str = ""
    "Suffix of the job id in a run's handle, for the run number `$i`."

    def then(self, root: str, runs: Sequence[RunDir], cluster: str) -> str:
        """Shell that records the job in each run's events."""
        record = {"event": self.event, "handle": str(Handle(cluster, "@")), "command": self.command}
        before, after = map(quote, json.dumps(record)[1:].split("@", 1))
        ids = " ".join(quote(run.id) for run in runs)
        event = f'\'{{"time": "%s", %s%s%s\\n\' "$now" {before} "${{job}}{self.task}" {after}'
        return (
            f"now=$(date -u +%Y-%m-%dT%H:%M:%S.%6NZ) i=0\nfor r in {ids}; do\n"
            f'printf {event} >>{quote(root)}/"$r"/events.jsonl\ni=$((i + 1))\ndone'
        )


def login_node(host: str, clusters: str | None = None) -> Over:
    """Connection to a login node. Many sites add Slurm's commands to the PATH of login shells only."""
    return Over(host, login_environment(unless="squeue") + asking(clusters))


def _secret_checks(secrets: Sequence[Mapping[str, Any]], setup: bool) -> list[str]:
    """Shell that checks that each secret's source exists on the cluster.

    A secret's value is read there and never sent. Variables that the profile's `setup:` sets cannot be
    checked, because those lines run only in the job.
    """
    checks = []
    for secret in secrets:
        name, file = secret["name"], secret.get("file")
        if file is not None:
            path = f'"$HOME"/{quote(file[2:])}' if file.startswith("~/") else quote(file)
            wrong = (
                f"{name}: its file {file} is not there, cannot be read, or is no UTF-8 text of at most "
                f"{LONGEST // 1024} KiB without NUL bytes"
            )
            usable = _usable(path, LONGEST - len(name) - 2)
            checks.append(f"{{ {usable} || {{ echo {quote(f'secrets: {wrong}')}; false; }}; }}")
        elif not setup:
            source = secret.get("env") or name
            wrong = (
                f"{name}: the environment variable {source} is not set there; secrets are never sent: export "
                "it in a start-up file of yours there, or name a `file:` there"
            )
            checks.append(
                f'{{ [ -n "${{{source}+x}}" ] || {{ echo {quote(f"secrets: {wrong}")}; false; }}; }}'
            )
    return checks


def _usable(path: str, longest: int) -> str:
    """Shell that checks, like `read_secret_file`, whether a process can receive what is in a file.

    `path` is quoted.
    """
    without_nul = f"$(head -c {longest} {path} | tr -d '\\000' | wc -c)"
    utf8 = f"{{ ! command -v iconv >/dev/null || iconv -f UTF-8 -t UTF-8 {path} >/dev/null 2>&1; }}"
    whole = f'[ "{without_nul}" -eq "$(wc -c <{path})" ]'
    return f"{{ [ -f {path} ] && [ -r {path} ] && [ -s {path} ] && {whole} && {utf8}; }}"
