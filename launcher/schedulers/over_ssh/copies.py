"""Runs on a host behind ssh: their local copies, and the job's code, which is sent once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from launcher.rundir.files import replace_text
from launcher.rundir.find import default_root
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError, Status
from launcher.schedulers.over_ssh import snapshot
from launcher.schedulers.over_ssh.exchange import Wanted
from launcher.schedulers.over_ssh.mirror import Mirrored, RefusedError
from launcher.schedulers.over_ssh.rsh import quote
from launcher.schedulers.over_ssh.ssh import Over
from launcher.schedulers.rundir import asking_all_to_stop, asking_to_stop, copies, for_us_alone, write_run

if TYPE_CHECKING:
    from launcher.schedulers.base import Prepared, Request

LOOK_SECONDS = 1.0
"Minimum pause between two queries about a running run; ten times that for a queued one."
SENT = ".sent"
"File beside the copies that lists the snapshots sent, newest last."

T = TypeVar("T")


class NotSentError(SchedulerError):
    """Nothing was started, because the code or the run directory could not be written on the host."""


class Copies:
    """The local copies of runs on a host.

    `there` is the folder of the runs on the host. `codes` holds the snapshots taken; several hosts may share
    it. `wanted` is what each query fetches besides the records.
    """

    def __init__(self, ssh: Over, there: str, codes: dict[str, snapshot.Snapshot] | None = None) -> None:
        self.ssh, self.there = ssh, there
        self.mirror = Mirrored(ssh, copies(ssh.name, there), there)
        self.wanted: Wanted | None = None
        self._codes = codes if codes is not None else {}
        self._last: tuple[float, Status] | None = None
        "(when to query again, last status)."

    def take_code(self, request: Request) -> tuple[str, tuple[str, ...]]:
        """Take a snapshot of the working directory.

        Return its future place on the host, and notes for the user.

        Raises SchedulerError, OSError.
        """
        code = snapshot.of_request(request, leave_out=[default_root().resolve()])
        self._codes[code.digest] = code
        return snapshot.place(self.there, code.digest), code.notes

    def write(self, prepared: Prepared) -> RunDir:
        """Write the local copy of the run directory, which the next round trip sends. Raises OSError."""
        folder = for_us_alone(self.mirror.here)
        return write_run(replace(prepared, run_dir=str(folder / prepared.request.run_id)))

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

    def fetch(self, run: RunDir, wanted: Wanted | None) -> None:
        """Update the local copy. Raises SchedulerError."""
        self.wanted, self._last = wanted, None
        self.mirror.choose([run], wanted)
        self.mirror.run(":")
        if run.id in self.mirror.lost:
            lost = f"{self.there}/{run.id} is not on {self.ssh.name} any more"
            raise SchedulerError(f"{lost}; what was copied of it is in {run.path}")

    def where(self, run: RunDir) -> str:
        return f"{self.ssh.name}:{self.there}/{run.id}"

    def remove(self, runs: Sequence[RunDir], first: str = "") -> None:
        """Delete the runs on the host, after the shell text `first`. Raises SchedulerError."""
        done = self.ssh.run(
            f"{first}rm -rf " + " ".join(quote(f"{self.there}/{run.id}") for run in runs), timeout=600
        )
        if done.returncode:
            raise SchedulerError(f"{self.ssh.name}: {done.stderr.decode(errors='replace').strip()}")

    @contextmanager
    def strictly(self, runs: Sequence[RunDir], first: str = "") -> Iterator[None]:
        """Make round trips fail unless local changes were written on the host."""
        self.mirror.choose(runs)
        self.mirror.first, self.mirror.strict = first, True
        try:
            yield
        finally:
            self.mirror.first, self.mirror.strict = "", False

    @contextmanager
    def asking_all_to_stop(self, runs: Sequence[RunDir], name: str) -> Iterator[None]:
        """Like `asking_to_stop`, but for several runs, which messages call `name`."""
        self._last = None
        with asking_all_to_stop(runs, lambda run: self.mirror.has_sent(run.cancel), name):
            yield

    @contextmanager
    def asking_to_stop(self, run: RunDir) -> Iterator[None]:
        """Wrap the code that writes `run.cancel` and sends it."""
        self._last = None
        with asking_to_stop(run, lambda: self.mirror.has_sent(run.cancel)):
            yield

    def deliver(
        self, runs: Sequence[RunDir], checks: Sequence[str], then: Callable[[], T], *, copied: bool = True
    ) -> T:
        """Send the runs' code if it is new on the host, then call `then`.

        The first round trip of `then` sends the run directories if they are `copied`. `checks` is shell that
        must succeed first. Raises NotSentError.
        """
        self._last = None
        digests = sorted({run.read_about()["workdir"].rpartition("/")[2] for run in runs})
        codes = [self._codes[digest] for digest in digests if digest in self._codes]
        first = " &&\n".join([*checks, *(snapshot.adopt(self.there, digest) for digest in digests)])
        brought = runs if copied else ()
        for code in codes:
            if code.digest not in self._sent():
                self._send_code(code)
        try:
            with self.strictly(brought, first):
                return then()
        except RefusedError as error:
            if not codes or snapshot.MISSING not in str(error):
                raise NotSentError(str(error)) from None
        for code in codes:
            self._send_code(code)  # the code was deleted on the host
        try:
            with self.strictly(brought, first):
                return then()
        except RefusedError as error:
            raise NotSentError(str(error)) from None

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
            raise NotSentError(str(error)) from None
        replace_text(for_us_alone(self.mirror.here) / SENT, "\n".join([*sent[-99:], code.digest]) + "\n")


def absolute(runs: str | None, where: str) -> str:
    """Check `paths.runs` of a profile whose runs are on another host. Raises SchedulerError."""
    if runs is None or not runs.startswith("/"):
        raise SchedulerError(
            f"{where}: name the folder for the runs in the profile, as an absolute path on a disk "
            "that its nodes share, for example `paths: {runs: /scratch/you/runs}`"
        )
    return runs.rstrip("/")
