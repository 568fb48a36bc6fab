"""Store of the runs on a host reached over ssh. It keeps local copies and sends the job's code once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from launcher.rundir.files import replace_text
from launcher.rundir.find import default_root
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError, Status
from launcher.schedulers.local_copies import copies_folder, private_folder, write_copy
from launcher.schedulers.over_ssh import snapshot
from launcher.schedulers.over_ssh.mirror import ChangedThereError, Mirrored, RefusedError
from launcher.schedulers.over_ssh.rsh import quote
from launcher.schedulers.over_ssh.ssh import Over
from launcher.schedulers.rundir import asking_to_stop
from launcher.schedulers.store import Place, write_requests_to_stop
from launcher.schedulers.wanted import Wanted

if TYPE_CHECKING:
    from launcher.schedulers.base import Prepared, Request

LOOK_SECONDS = 1.0
"Minimum pause between two queries about a running run; ten times that for a queued one."
SENT = ".sent"
"File beside the copies that lists the snapshots sent, newest last."

T = TypeVar("T")


class NotSentError(SchedulerError):
    """Nothing was started, because the code or the run directory could not be written on the host."""


class RemoteStore(Mirrored):
    """A `Store` of runs on another host, with local copies.

    `there` is the folder of the runs on the host. `codes` holds the snapshots taken; several hosts may share
    it. `wanted` is what each query fetches besides the records.
    """

    far = True

    def __init__(self, ssh: Over, there: str, codes: dict[str, snapshot.Snapshot] | None = None) -> None:
        super().__init__(ssh, copies_folder(ssh.name, there), there)
        self.ssh, self.wanted = ssh, Wanted()
        self._codes = codes if codes is not None else {}
        self._last: tuple[float, Status] | None = None
        "(when to query again, last status)."

    def place(self, request: Request) -> Place:
        """Take a snapshot of the working directory. Raises SchedulerError, OSError."""
        code = snapshot.of_request(request, leave_out=[default_root().resolve()])
        self._codes[code.digest] = code
        workdir = snapshot.place(self.there, code.digest)
        return Place(f"{self.there}/{request.run_id}", workdir, code.notes)

    def check(self, request: Request) -> None:
        """Do nothing: what the run needs is on the host."""

    def write(self, prepared: Prepared) -> RunDir:
        """Write the local copy of the run directory, which the next round trip sends. Raises OSError."""
        return write_copy(prepared, self.here)

    def path(self, run: RunDir, file: Path) -> str:
        return f"{self.there}/{file.relative_to(run.path.parent)}"

    def look_along(self, runs: Sequence[RunDir]) -> None:
        self.choose(runs, self.wanted)

    def bring(self) -> None:
        self.run(":")

    def lately(self, run: RunDir, look: Callable[[], Status]) -> Status:
        """Return the last status for a moment, because a follower asks more often than anything changes."""
        if (
            self._last is not None
            and self._last[0] > time.monotonic()
            and self._last[1].path == str(run.path)
        ):
            return self._last[1]
        began = time.monotonic()
        found = look()
        pause = LOOK_SECONDS * (10 if found.state == "submitted" else 1)
        self._last = (time.monotonic() + max(pause, 5 * (time.monotonic() - began)), found)
        return found

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self.wanted, self._last = wanted or Wanted(), None
        self.look_along([run])
        self.bring()
        if run.id in self.lost:
            lost = f"{self.there}/{run.id} no longer exists on {self.name}"
            raise SchedulerError(f"{lost}; a local copy is in {run.path}")

    def where(self, run: RunDir) -> str:
        return f"{self.name}:{self.there}/{run.id}"

    def remove(self, runs: Sequence[RunDir], first: str = "") -> None:
        """Delete the runs on the host, after the shell text `first`. Raises SchedulerError."""
        done = self.ssh.run(
            f"{first}rm -rf " + " ".join(quote(f"{self.there}/{run.id}") for run in runs), timeout=600
        )
        if done.returncode:
            raise SchedulerError(f"{self.name}: {done.stderr.decode(errors='replace').strip()}")

    @contextmanager
    def strictly(self, runs: Sequence[RunDir], first: str = "") -> Iterator[None]:
        """Make round trips fail unless local changes were written on the host."""
        self._last = None
        self.choose(runs)
        self.first, self.strict = first, True
        try:
            yield
        finally:
            self.first, self.strict = "", False

    def ask_to_stop(
        self, runs: Sequence[RunDir], name: str, then: Callable[[], str], instead: Callable[[], str]
    ) -> str:
        with asking_to_stop(runs, self.has_sent, name), self.strictly(runs):
            write_requests_to_stop(runs)
            try:
                return then()
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
        digests = sorted({run.read_about()["workdir"].rpartition("/")[2] for run in runs})
        codes = [self._codes[digest] for digest in digests if digest in self._codes]
        first = " &&\n".join([*checks, *(snapshot.adopt(self.there, digest) for digest in digests)])
        missing = [code for code in codes if code.digest not in self._sent()]
        while True:
            for code in missing:
                self._send_code(code)
            try:
                with self.strictly(runs if copied else (), first):
                    return then()
            except RefusedError as error:
                if not codes or snapshot.MISSING not in str(error):
                    raise NotSentError(str(error)) from None
            missing, codes = codes, []  # the code was deleted on the host

    def _sent(self) -> list[str]:
        try:
            return (self.here / SENT).read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return []

    def _send_code(self, code: snapshot.Snapshot) -> None:
        sent = [digest for digest in self._sent() if digest != code.digest]
        try:
            snapshot.send(code, self.ssh, self.there, before=sent[-1] if sent else None)
        except SchedulerError as error:
            raise NotSentError(str(error)) from None
        replace_text(private_folder(self.here) / SENT, "\n".join([*sent[-99:], code.digest]) + "\n")


def absolute(runs: str | None, where: str) -> str:
    """Check `paths.runs` of a profile whose runs are on another host. Raises SchedulerError."""
    if runs is None or not runs.startswith("/"):
        raise SchedulerError(
            f"{where}: name the folder for the runs in the profile, as an absolute path on a disk "
            "that its nodes share, for example `paths: {runs: /scratch/you/runs}`"
        )
    return runs.rstrip("/")
