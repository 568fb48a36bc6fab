"""Where run directories are: in a folder of this host, or on another host with copies of them here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from launcher.rundir.files import replace_text
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError, Status
from launcher.schedulers.login import Here, Login, LoginError
from launcher.schedulers.rundir import write_run

if TYPE_CHECKING:
    from launcher.schedulers.base import Prepared, Request
    from launcher.schedulers.wanted import Wanted

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a run and its code will be, as paths of the cluster."""

    run_dir: str
    workdir: str
    notes: tuple[str, ...] = ()
    "What the user should know about the code that is sent."


class Store(Login, Protocol):
    """Run directories, and a shell beside them.

    `run` executes a script where the runs are. If they are on another host (`far`), each call is one round
    trip, which first sends what was written here into the directories of the chosen runs, and then fetches
    what was written there.
    """

    login: Login
    "The same shell without the runs."
    far: bool
    "Whether the runs are on another host. The answer to a request is then also the news of its runs."

    def place(self, request: Request) -> Place:
        """Return where the run and its code will be. Raises SchedulerError, OSError."""
        ...

    def check(self, request: Request) -> None:
        """Look for what the run needs and this host lacks. Raises SchedulerError."""
        ...

    def write(self, prepared: Prepared) -> RunDir:
        """Write the run directory. Raises OSError."""
        ...

    def path(self, run: RunDir, file: Path) -> str:
        """Return a file of a run directory, or the directory, as a path of the cluster."""
        ...

    def look_along(self, runs: Sequence[RunDir]) -> None:
        """Choose the runs that the next scripts bring up to date."""
        ...

    def bring(self) -> None:
        """Bring the chosen runs up to date. Raises LoginError."""
        ...

    def lately(self, run: RunDir, look: Callable[[], Status]) -> Status:
        """Return `look()`, or its last result if it is too early to ask again."""
        ...

    def deliver(self, runs: Sequence[RunDir], checks: Sequence[str], then: Callable[[], T]) -> T:
        """Call `then` with the runs and their code in place. Raises NotSentError.

        `checks` is shell that must succeed on another host before anything else is done there.
        """
        ...

    def ask_to_stop(
        self, runs: Sequence[RunDir], name: str, then: Callable[[], str], instead: Callable[[], str]
    ) -> str:
        """Write the requests to stop, and return why `then` was refused, or "". `name` is for messages.

        `instead` stops the runs if the requests cannot be written, as on a full disk; it returns why not.
        Raises SchedulerError if the requests may not have arrived.
        """
        ...

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        """Bring one run up to date. Raises SchedulerError."""
        ...

    def where(self, run: RunDir) -> str:
        """Return the run directory as a person finds it."""
        ...

    def remove(self, runs: Sequence[RunDir], first: str = "") -> None:
        """Run `first` where the runs are, and delete there what is not at `run.path`.

        Raises SchedulerError.
        """
        ...


def write_requests_to_stop(runs: Sequence[RunDir]) -> None:
    """Write the file that a supervisor looks for. Raises OSError."""
    for run in runs:
        replace_text(run.cancel, f"{time.time()}\n")


class Folder:
    """A folder of this host. Every method is what `Store` says; most have nothing to do."""

    far = False

    def __init__(self, login: Login | None = None) -> None:
        self.login: Login = login if login is not None else Here()
        self.name, self.run = self.login.name, self.login.run

    def place(self, request: Request) -> Place:
        return Place(str(request.runs_root.resolve() / request.run_id), str(request.workdir))

    def check(self, request: Request) -> None:
        from launcher.supervise.secrets import SecretError, read_secrets

        if not request.workdir.is_dir():
            raise SchedulerError(f"workdir: {request.workdir} is no directory")
        try:
            read_secrets(request.job.secrets)
        except SecretError as error:
            raise SchedulerError(f"secrets: {error}") from None

    def write(self, prepared: Prepared) -> RunDir:
        return write_run(prepared)

    def path(self, run: RunDir, file: Path) -> str:
        return str(file)

    def look_along(self, runs: Sequence[RunDir]) -> None:
        return

    def bring(self) -> None:
        return

    def lately(self, run: RunDir, look: Callable[[], Status]) -> Status:
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
