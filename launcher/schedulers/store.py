"""Stores of run directories: a folder of this host, or another host with local copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from launcher.rundir.files import replace_text
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError, Status
from launcher.schedulers.login import LocalLogin, Login, LoginError
from launcher.schedulers.rundir import write_run

if TYPE_CHECKING:
    from launcher.schedulers.base import Prepared, Request
    from launcher.schedulers.wanted import Wanted

T = TypeVar("T")


class NotSentError(SchedulerError):
    """Nothing was started, because the code or the run directory could not be written on the host."""


@dataclass(frozen=True)
class Place:
    """Where a run and its code will be, as paths of the cluster."""

    run_dir: str
    workdir: str
    notes: tuple[str, ...] = ()
    "What the user should know about the code that is sent."


class Store(Login, Protocol):
    """Run directories, and a shell on the host that holds them.

    `run` executes a script on that host. If it is another host (`remote`), each call is one round trip: it
    sends local changes to the directories of the selected runs, executes the script, and fetches the host's
    changes.
    """

    login: Login
    "The same shell without the runs."
    remote: bool
    "Whether the runs are on another host. The answer to a request then also updates the local copies."

    def place(self, request: Request) -> Place:
        """Return where the run and its code will be. Raises SchedulerError, OSError."""
        ...

    def check(self, request: Request) -> None:
        """Check that this host has what the run needs. Raises SchedulerError."""
        ...

    def write(self, prepared: Prepared) -> RunDir:
        """Write the run directory. Raises OSError."""
        ...

    def path(self, run: RunDir, file: Path) -> str:
        """Return a file of a run directory, or the directory, as a path of the cluster."""
        ...

    def select_runs(self, runs: Sequence[RunDir]) -> None:
        """Select the runs that the next round trips update."""
        ...

    def sync(self) -> None:
        """Update the selected runs. Raises LoginError."""
        ...

    def cached_status(self, run: RunDir, look: Callable[[], Status]) -> Status:
        """Return `look()`, or its last result if it is too early to ask again."""
        ...

    def deliver(self, runs: Sequence[RunDir], checks: Sequence[str], then: Callable[[], T]) -> T:
        """Send the runs and their code if they are not there, then call `then`. Raises NotSentError.

        On another host, the shell commands `checks` must succeed before anything else is done.
        """
        ...

    def ask_to_stop(
        self, runs: Sequence[RunDir], name: str, then: Callable[[], str], instead: Callable[[], str]
    ) -> str:
        """Write the requests to stop, call `then` and return its result: why it was refused, or "".

        If the requests cannot be written, as on a full disk, `instead` must stop the runs or return why it
        cannot. Messages call the runs `name`. Raises SchedulerError if the requests may not have arrived.
        """
        ...

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        """Update the copy of one run. Raises SchedulerError."""
        ...

    def where(self, run: RunDir) -> str:
        """Return the run directory for people: `host:path` if it is on another host."""
        ...

    def remove(self, runs: Sequence[RunDir], first: str = "") -> None:
        """Run the shell text `first`, then delete the runs on the other host if there is one.

        `run.path` itself stays. Raises SchedulerError.
        """
        ...


def write_requests_to_stop(runs: Sequence[RunDir]) -> None:
    """Write the file that a supervisor looks for. Raises OSError."""
    for run in runs:
        replace_text(run.cancel, f"{time.time()}\n")


class Folder:
    """A `Store` that is a folder of this host."""

    remote = False

    def __init__(self, login: Login | None = None) -> None:
        self.login: Login = login if login is not None else LocalLogin()
        self.name, self.run = self.login.name, self.login.run

    def place(self, request: Request) -> Place:
        return Place(str(request.runs_root.resolve() / request.run_id), str(request.workdir))

    def check(self, request: Request) -> None:
        from launcher.supervise.secrets import SecretError, read_secrets

        if not request.workdir.is_dir():
            raise SchedulerError(f"workdir: {request.workdir} is not a directory")
        try:
            read_secrets(request.job.secrets)
        except SecretError as error:
            raise SchedulerError(f"secrets: {error}") from None

    def write(self, prepared: Prepared) -> RunDir:
        return write_run(prepared)

    def path(self, run: RunDir, file: Path) -> str:
        return str(file)

    def select_runs(self, runs: Sequence[RunDir]) -> None:
        return

    def sync(self) -> None:
        return

    def cached_status(self, run: RunDir, look: Callable[[], Status]) -> Status:
        return look()

    def deliver(self, runs: Sequence[RunDir], checks: Sequence[str], then: Callable[[], T]) -> T:
        return then()

    def ask_to_stop(
        self, runs: Sequence[RunDir], name: str, then: Callable[[], str], instead: Callable[[], str]
    ) -> str:
        try:
            write_requests_to_stop(runs)
        except OSError as error:
            if refused := instead():
                raise SchedulerError(f"cannot write {error.filename}: {error.strerror}; {refused}") from None
            return ""
        try:
            return then()
        except LoginError as error:
            return str(error)

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        return

    def where(self, run: RunDir) -> str:
        return str(run.path)

    def remove(self, runs: Sequence[RunDir], first: str = "") -> None:
        if first and (done := self.run(first)).returncode:
            raise SchedulerError(done.stderr.decode(errors="replace").strip())
