"""Slurm behind a login node: the scheduler of this host, on copies of the run directories over there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launcher.runs.files import replace_text
from launcher.runs.find import default_root
from launcher.runs.layout import RunDir
from launcher.schedulers.base import Capabilities, SchedulerError, Status
from launcher.schedulers.over_ssh import snapshot
from launcher.schedulers.over_ssh.exchange import Wanted
from launcher.schedulers.over_ssh.login import LoginError, ask
from launcher.schedulers.over_ssh.mirror import Mirrored, RefusedError
from launcher.schedulers.over_ssh.rsh import quote
from launcher.schedulers.over_ssh.ssh import Over
from launcher.schedulers.rundir import copies, write_run
from launcher.schedulers.slurm.jobs import NotSubmittedError, jobs_of, sbatch_command, submission_of, submit
from launcher.schedulers.slurm.scheduler import Handle, SlurmScheduler, handle_of, lives
from launcher.schedulers.slurm.sweep import folder_text

if TYPE_CHECKING:
    from launcher.schedulers.base import Prepared, Request
    from launcher.schedulers.slurm.sweep import Sweep

LOOK_SECONDS = 1.0
"Between two looks at a run that goes on; one that waits in the queue is looked at ten times as seldom."
SENT = ".sent"
"Beside the copies: the snapshots that were sent, the newest last."


class RemoteSlurm(SlurmScheduler):
    """`runs` is a folder on a file system that the login node shares with the nodes."""

    capabilities = Capabilities(submit=True, multi_node=True, arrays=True)

    def __init__(self, login: str, runs: str | None) -> None:
        super().__init__()
        if runs is None or not runs.startswith("/"):
            raise SchedulerError(
                f"login {login}: name the folder for the runs in the profile, as an absolute path on a disk "
                "that its nodes share, for example `paths: {runs: /scratch/you/runs}`"
            )
        self.there = runs.rstrip("/")
        self.ssh = Over(login)
        self.mirror = Mirrored(self.ssh, copies(login, self.there), self.there)
        self.login = self.mirror
        self._wanted: Wanted | None = None
        self._snapshots: dict[str, snapshot.Snapshot] = {}
        self._last: tuple[float, Status] | None = None
        "When to look again, and what was seen."

    def prepare(self, request: Request) -> Prepared:
        """The code as it is now is part of it. Raises RenderError, SchedulerError, OSError."""
        if not request.workdir.is_dir():
            raise SchedulerError(f"workdir: {request.workdir} is no directory")
        code = snapshot.take(request.workdir, leave_out=[default_root().resolve()])
        self._snapshots[code.digest] = code
        return self._prepared(
            request, f"{self.there}/{request.run_id}", snapshot.place(self.there, code.digest)
        )

    def status(self, handle: str) -> Status:
        """What was seen last, for a moment: a follower asks more often than there is news."""
        if self._last is not None and self._last[0] > time.monotonic() and self._last[1].handle == handle:
            return self._last[1]
        began = time.monotonic()
        found = super().status(handle)
        pause = LOOK_SECONDS * (10 if found.state == "submitted" else 1)
        self._last = (time.monotonic() + max(pause, 5 * (time.monotonic() - began)), found)
        return found

    def statuses(self, runs: Iterable[RunDir]) -> list[Status]:
        chosen = list(runs)
        self.mirror.choose([run for run in chosen if lives(run.read_state())], self._wanted)
        return super().statuses(chosen)

    def cancel(self, handle: str) -> None:
        """In one round trip, in which also comes whether the run was still going on."""
        run = self.run_of(handle)
        job, again = handle_of(run).job, run.cancel.exists()
        if job is None or not lives(
            run.read_state()
        ):  # the answer of sbatch was lost; there is nothing to do
            return super().cancel(handle)
        self._last = None
        replace_text(run.cancel, f"{time.time()}\n")
        with self._strictly([run]):
            command = ["scancel", *([] if again else ["--state=PENDING"]), job]
            answer = ask(self.login, {"scancel": command})["scancel"]
        if not lives(state := run.read_state()):
            raise SchedulerError(f"{run.id} is not running: {state.get('state')}")
        if handle_of(run).job != job:  # it went on in a linked job meanwhile
            return self.cancel(str(handle_of(run)))
        if answer.code:
            raise SchedulerError(f"scancel: {answer.err.strip() or f'exit code {answer.code}'}")
        return None

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self._wanted, self._last = wanted, None
        self.mirror.choose([run], wanted)
        self.mirror.run(":")
        if run.id in self.mirror.lost:
            where = f"{self.there}/{run.id} is not on {self.ssh.name} any more"
            raise SchedulerError(f"{where}; what was copied of it is in {run.path}")

    def where(self, run: RunDir) -> str:
        return f"{self.ssh.name}:{self.there}/{run.id}"

    def remove(self, runs: Sequence[RunDir]) -> None:
        done = self.ssh.run(
            "rm -rf " + " ".join(quote(f"{self.there}/{run.id}") for run in runs), timeout=600
        )
        if done.returncode:
            raise SchedulerError(f"{self.ssh.name}: {done.stderr.decode(errors='replace').strip()}")
        super().remove(runs)

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        return self._ask_before_the_queue(prepared, self.ssh)

    def write(self, prepared: Prepared) -> RunDir:
        return write_run(replace(prepared, run_dir=str(self.mirror.here / prepared.request.run_id)))

    def withdraw(self, runs: Sequence[RunDir]) -> None:
        with suppress(SchedulerError):  # then they stay on both sides
            self.remove(runs)

    def _command(self, run: RunDir) -> tuple[str, ...]:
        script = f"{self.there}/{run.scripts.relative_to(run.path.parent)}/job.sbatch"
        return sbatch_command(script, submission_of(run))

    def _sbatch(self, run: RunDir, event: str) -> str:
        return self._submit([run], run.id, Submission(event, self._command(run)))

    def send_array(self, sweep: Sweep, runs: Sequence[RunDir]) -> str:
        array = Submission("submitted", sweep.command, folder_text(sweep, runs), task="_$i")
        try:
            return self._submit(runs, sweep.id, array)
        except NotSubmittedError:
            with suppress(LoginError):
                self.ssh.run(f"rm -rf {quote(str(sweep.folder))}")
            raise

    def _submit(self, runs: Sequence[RunDir], comment: str, what: Submission) -> str:
        """Run directories, job and their events in one round trip, after the code where that is new there."""
        self._last = None
        digests = sorted({run.read_about()["workdir"].rpartition("/")[2] for run in runs})
        codes = [self._snapshots[digest] for digest in digests if digest in self._snapshots]
        for code in codes:
            if code.digest not in self._sent():
                self._send_code(code)
        try:
            return self._submit_once(runs, comment, what, digests)
        except RefusedError as error:
            if not codes or snapshot.MISSING not in str(error):
                raise NotSubmittedError(str(error)) from None
        for code in codes:
            self._send_code(code)  # somebody has cleaned up there
        try:
            return self._submit_once(runs, comment, what, digests)
        except RefusedError as error:
            raise NotSubmittedError(str(error)) from None

    def _submit_once(
        self, runs: Sequence[RunDir], comment: str, what: Submission, digests: Sequence[str]
    ) -> str:
        abouts = [run.read_about() for run in runs]
        secrets = [
            check
            for about in abouts
            for check in _secret_checks(about["job"]["secrets"], bool(about["cluster"]["setup"]))
        ]
        checks = [*dict.fromkeys(secrets), *(snapshot.adopt(self.there, digest) for digest in digests)]
        cluster = abouts[0]["cluster"]["name"]
        with self._strictly(runs, " &&\n".join(checks)):
            return submit(
                self.login,
                what.command,
                comment,
                earlier=set().union(*map(jobs_of, runs)),
                first=what.first,
                then=what.then(self.there, runs, cluster),
            )

    @contextmanager
    def _strictly(self, runs: Sequence[RunDir], first: str = "") -> Iterator[None]:
        """What is done depends on what was written here."""
        self.mirror.choose(runs)
        self.mirror.first, self.mirror.strict = first, True
        try:
            yield
        finally:
            self.mirror.first, self.mirror.strict = "", False

    def _sent(self) -> list[str]:
        try:
            return (self.mirror.here / SENT).read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return []

    def _send_code(self, code: snapshot.Snapshot) -> None:
        sent = [digest for digest in self._sent() if digest != code.digest]
        try:
            snapshot.send(code, self.ssh, self.there, before=sent[-1] if sent else None)
        except SchedulerError as error:
            raise NotSubmittedError(str(error)) from None
        self.mirror.here.mkdir(parents=True, exist_ok=True)
        replace_text(self.mirror.here / SENT, "\n".join([*sent[-99:], code.digest]) + "\n")

    def record(self, run: RunDir, event: str, handle: str, command: tuple[str, ...]) -> None:
        if str(handle_of(run)) != handle:  # the job was found in the queue: sbatch's answer was lost
            super().record(run, event, handle, command)
            self.fetch(run)


@dataclass(frozen=True)
class Submission:
    """One job, or an array."""

    event: str
    command: tuple[str, ...]
    first: str = ""
    "Shell, before it."
    task: str = ""
    "Behind the job's id in a run's handle, for the run number `$i`."

    def then(self, root: str, runs: Sequence[RunDir], cluster: str) -> str:
        """Shell that tells each run of its job."""
        told = {"event": self.event, "handle": str(Handle(cluster, "@")), "command": self.command}
        before, after = map(quote, json.dumps(told)[1:].split("@", 1))
        ids = " ".join(quote(run.id) for run in runs)
        event = f'\'{{"time": "%s", %s%s%s\\n\' "$now" {before} "${{job}}{self.task}" {after}'
        return (
            f"now=$(date -u +%Y-%m-%dT%H:%M:%S.%6NZ) i=0\nfor r in {ids}; do\n"
            f'printf {event} >>{quote(root)}/"$r"/events.jsonl\ni=$((i + 1))\ndone'
        )


def _secret_checks(secrets: Sequence[Mapping[str, Any]], setup: bool) -> list[str]:
    """Shell. A secret's value is read on the cluster and never goes there: its source must be there. What the
    profile's own `setup:` lines set is seen only when they run."""
    checks = []
    for secret in secrets:
        name, file = secret["name"], secret.get("file")
        if file is not None:
            path = f'"$HOME"/{quote(file[2:])}' if file.startswith("~/") else quote(file)
            wrong = f"{name}: its file {file} cannot be read there"
            checks.append(f"{{ [ -r {path} ] || {{ echo {quote(f'secrets: {wrong}')}; false; }}; }}")
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
