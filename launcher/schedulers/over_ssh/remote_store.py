"""A store of runs on a host reached over ssh, with local copies. It sends each version of the code once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TypeVar

from launcher.rundir.files import replace_text
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Prepared, Request, SchedulerError, Status
from launcher.schedulers.local_copies import copies_folder, private_folder, write_copy
from launcher.schedulers.over_ssh import snapshot
from launcher.schedulers.over_ssh.mirror import ChangedThereError, Mirrored, RefusedError
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.rundir import asking_to_stop
from launcher.schedulers.store import Place, Store, write_requests_to_stop
from launcher.schedulers.wanted_files import Wanted

LOOK_SECONDS = 1.0
"Minimum pause between two queries about a running run; ten times that for a queued one."
SENT = ".sent"
"File next to the copies that lists the sent snapshots, newest last."

T = TypeVar("T")


class NotSentError(SchedulerError):
    """Nothing was started, because the code or the run directory could not be written on the host."""


class RemoteStore(Mirrored, Store):
    """Runs on another host, with local copies.

    `remote_root` is the folder of the runs on the host. `codes` has the snapshots taken so far, and several
    hosts may share it. `wanted` is what each query fetches besides the records.
    """

    remote = True
    login: SshLogin

    def __init__(
        self, login: SshLogin, remote_root: str, codes: dict[str, snapshot.Snapshot] | None = None
    ) -> None:
        super().__init__(login, copies_folder(login.name, remote_root), remote_root)
        self.wanted = Wanted()
        self._codes = codes if codes is not None else {}
        self._last: tuple[float, Status] | None = None
        "(when to query again, last status)."

    def place(self, request: Request) -> Place:
        """Take a snapshot of the working directory. Raises SchedulerError, OSError."""
        code = snapshot.of_request(request)
        self._codes[code.digest] = code
        workdir = snapshot.place(self.remote_root, code.digest)
        return Place(f"{self.remote_root}/{request.run_id}", workdir, code.notes)

    def check(self, request: Request) -> None:
        """Do nothing: what the run needs is on the host."""

    def write(self, prepared: Prepared) -> RunDir:
        """Write the local copy of the run directory, which the next round trip sends. Raises OSError."""
        return write_copy(prepared, self.local_root)

    def path(self, run: RunDir, file: Path) -> str:
        return f"{self.remote_root}/{file.relative_to(run.path.parent)}"

    def select_runs(self, runs: Sequence[RunDir]) -> None:
        self.choose(runs, self.wanted)

    def sync(self) -> None:
        self.run(":")

    def cached_status(self, run: RunDir, look: Callable[[], Status]) -> Status:
        """Return the last status until its pause is over, because callers ask more often than it changes."""
        if (
            self._last is not None
            and self._last[0] > time.monotonic()
            and self._last[1].path == str(run.path)
        ):
            return self._last[1]
        began = time.monotonic()
        status = look()
        pause = LOOK_SECONDS * (10 if status.state == "submitted" else 1)
        self._last = (time.monotonic() + max(pause, 5 * (time.monotonic() - began)), status)
        return status

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self.wanted, self._last = wanted or Wanted(), None
        self.select_runs([run])
        self.sync()
        if run.id in self.lost:
            lost = f"{self.remote_root}/{run.id} no longer exists on {self.name}"
            raise SchedulerError(f"{lost}; a local copy is in {run.path}")

    def where(self, run: RunDir) -> str:
        return f"{self.name}:{self.remote_root}/{run.id}"

    def remove(self, runs: Sequence[RunDir], then: str = "") -> None:
        folders = " ".join(quote(f"{self.remote_root}/{run.id}") for run in runs)
        done = self.login.run(f"rm -rf {folders} || exit\n{then}", timeout=600)
        if done.returncode:
            raise SchedulerError(f"{self.name}: {done.stderr.decode(errors='replace').strip()}")

    @contextmanager
    def strict_round_trips(self, runs: Sequence[RunDir], first: str = "") -> Iterator[None]:
        """Make the block's round trips fail if local changes cannot be written on the host."""
        self._last = None
        self.choose(runs)
        self.first, self.strict = first, True
        try:
            yield
        finally:
            self.first, self.strict = "", False

    def ask_to_stop(
        self, runs: Sequence[RunDir], name: str, then: Callable[[], str | None], instead: Callable[[], str]
    ) -> str:
        with asking_to_stop(runs, self.has_sent, name), self.strict_round_trips(runs):
            write_requests_to_stop(runs)
            try:
                return then() or ""
            except ChangedThereError:
                raise
            except RefusedError as error:
                if refused := instead():
                    raise SchedulerError(f"{error}; {refused}") from None
                for run in runs:
                    run.cancel.unlink()
                return ""

    def deliver(
        self, runs: Sequence[RunDir], checks: Sequence[str], then: Callable[[], T], *, copied: bool = True
    ) -> T:
        """Send the runs' code if it is new on the host, then call `then`.

        The first round trip of `then` sends the run directories if they are `copied`. `checks` is shell that
        must succeed first. Raises NotSentError.
        """
        digests = sorted({run.read_about().code_digest for run in runs})
        snapshots = [self._codes[digest] for digest in digests if digest in self._codes]
        first = " &&\n".join([*checks, *(snapshot.adopt(self.remote_root, digest) for digest in digests)])
        missing = [code for code in snapshots if code.digest not in self._sent_digests()]
        while True:
            for code in missing:
                self._send_code(code)
            try:
                with self.strict_round_trips(runs if copied else (), first):
                    return then()
            except RefusedError as error:
                if not snapshots or snapshot.MISSING not in str(error):
                    raise NotSentError(str(error)) from None
            missing, snapshots = snapshots, []  # the code was deleted on the host

    def _sent_digests(self) -> list[str]:
        try:
            return (self.local_root / SENT).read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return []

    def _send_code(self, code: snapshot.Snapshot) -> None:
        sent = [digest for digest in self._sent_digests() if digest != code.digest]
        try:
            snapshot.send(code, self.login, self.remote_root, before=sent[-1] if sent else None)
        except SchedulerError as error:
            raise NotSentError(str(error)) from None
        replace_text(private_folder(self.local_root) / SENT, "\n".join([*sent[-99:], code.digest]) + "\n")


def absolute_runs_folder(runs: str | None, where: str) -> str:
    """Check `paths.runs` of a profile whose runs are on another host. Raises SchedulerError."""
    if runs is None or not runs.startswith("/"):
        raise SchedulerError(
            f"{where}: name the folder for the runs in the profile, as an absolute path on a disk "
            "that its nodes share, for example `paths: {runs: /scratch/you/runs}`"
        )
    return runs.rstrip("/")
