"""Where run directories are: in a folder of this host, or on another host with local copies."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from launcher.rundir.layout import RunDir
from launcher.rundir.stop import write_cancel_request
from launcher.schedulers.base import Prepared, Request, SchedulerError, Status
from launcher.schedulers.login import LocalLogin, Login, LoginError
from launcher.schedulers.rundir import write_run
from launcher.schedulers.wanted_files import Wanted

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a run and its code will be, as paths of the cluster."""

    run_dir: str
    workdir: str
    notes: tuple[str, ...] = ()
    "What the user should know about the code that is sent."


class Store:
    """Run directories, and a shell on the host that holds them.

    This class suits a folder of this host; `RemoteStore` is for another host (`remote`). There, each call of
    `run` is one round trip: it sends local changes to the directories of the selected runs, executes the
    script, and fetches the host's changes.
    """

    remote: ClassVar[bool] = False
    "Whether the runs are on another host. The answer to a request then also updates the local copies."
    login: Login
    "The same shell without the runs."

    def __init__(self, login: Login | None = None) -> None:
        self.login = login if login is not None else LocalLogin()
        self.name = self.login.name

    def run(
        self, script: str, *, stdin: bytes = b"", timeout: float = 60.0
    ) -> subprocess.CompletedProcess[bytes]:
        return self.login.run(script, stdin=stdin, timeout=timeout)

    def place(self, request: Request) -> Place:
        """Return where the run and its code will be. Raises SchedulerError, OSError."""
        return Place(str(request.runs_root.resolve() / request.run_id), str(request.workdir))

    def check(self, request: Request) -> None:
        """Check that this host has what the run needs. Raises SchedulerError."""
        from launcher.supervise.secrets import SecretError, read_secrets

        request.existing_workdir()
        try:
            read_secrets(request.job.secrets)
        except SecretError as error:
            raise SchedulerError(f"secrets: {error}") from None

    def write(self, prepared: Prepared) -> RunDir:
        """Write the run directory. Raises OSError."""
        return write_run(prepared)

    def path(self, run: RunDir, file: Path) -> str:
        """Return a file of a run directory, or the directory, as a path of the cluster."""
        return str(file)

    def select_runs(self, runs: Sequence[RunDir]) -> None:
        """Select the runs that the next round trips update."""
        return

    def sync(self) -> None:
        """Update the selected runs. Raises LoginError."""
        return

    def cached_status(self, run: RunDir, look: Callable[[], Status]) -> Status:
        """Return `look()`, or its last result if it is too early to ask again."""
        return look()

    def deliver(self, runs: Sequence[RunDir], checks: Sequence[str], then: Callable[[], T]) -> T:
        """Send the runs and their code if they are not there, then call `then`. Raises NotSentError.

        On another host, the shell commands `checks` must succeed before anything else is done.
        """
        return then()

    def ask_to_stop(
        self, runs: Sequence[RunDir], name: str, then: Callable[[], str | None], instead: Callable[[], str]
    ) -> str:
        """Write the requests to stop, call `then` and return its result: why it was refused, or "".

        If the requests cannot be written, as on a full disk, `instead` must stop the runs or return why it
        cannot. Messages call the runs `name`. Raises SchedulerError if the requests may not have arrived.
        """
        try:
            write_requests_to_stop(runs)
        except OSError as error:
            if refused := instead():
                raise SchedulerError(f"cannot write {error.filename}: {error.strerror}; {refused}") from None
            return ""
        try:
            return then() or ""
        except LoginError as error:
            return str(error)

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        """Update the copy of one run. Raises SchedulerError."""
        return

    def where(self, run: RunDir) -> str:
        """Return the run directory for people: `host:path` if it is on another host."""
        return str(run.path)

    def remove(self, runs: Sequence[RunDir], then: str = "") -> None:
        """Delete the runs on the other host if there is one, and run the shell text `then`.

        `run.path` itself stays. Raises SchedulerError.
        """
        if then and (done := self.run(then)).returncode:
            raise SchedulerError(done.stderr.decode(errors="replace").strip())


def write_requests_to_stop(runs: Sequence[RunDir]) -> None:
    """Write the file that a supervisor looks for. Raises OSError."""
    for run in runs:
        write_cancel_request(run.cancel)
