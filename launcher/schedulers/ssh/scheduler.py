"""One or several hosts without a batch system: a supervisor on each, started over ssh and left alone."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from launcher.runs.files import replace_json, replace_text
from launcher.runs.find import RunNotFoundError, remember_root, runs_in
from launcher.runs.layout import RunDir
from launcher.runs.time import now
from launcher.schedulers.base import LIVING, Capabilities, Prepared, Request, SchedulerError, Status
from launcher.schedulers.over_ssh.copies import Copies, NotSentError, absolute
from launcher.schedulers.over_ssh.login import LoginError
from launcher.schedulers.over_ssh.rsh import quote
from launcher.schedulers.over_ssh.ssh import Over
from launcher.schedulers.rundir import in_force, status_of
from launcher.schedulers.ssh.hosts import HostError
from launcher.schedulers.ssh.start import DEFAULT_PYTHON, Place, Start, look
from launcher.schedulers.ssh.state import judged, locks_script, words

if TYPE_CHECKING:
    from launcher.schedulers.over_ssh.exchange import Wanted

PREFIX = "ssh:"
CHOSEN_BY_US = "CUDA_VISIBLE_DEVICES"


def handle_of(run: RunDir) -> str:
    return f"{PREFIX}{run.read_about().get('cluster', {}).get('name', '')}:{run.id}"


class SshHosts:
    """A job on n nodes takes the first n hosts; the run directory lies on the first, in the folder `runs`."""

    capabilities = Capabilities(submit=True, multi_node=True)

    def __init__(self, hosts: tuple[str, ...], runs: str | None) -> None:
        self.there = absolute(runs, f"ssh.hosts {hosts[0]}")
        self.hosts = [Over(host) for host in hosts]
        self.copies = Copies(self.hosts[0], self.there)
        self.known: list[RunDir] = []
        "Where the run of a handle is looked for first."
        self._places: dict[str, Place] = {}
        "Run id -> what `check` has found."

    def prepare(self, request: Request) -> Prepared:
        """The code as it is now is part of it. Raises RenderError, SchedulerError, OSError."""
        from launcher.render.render import notes, render_run
        from launcher.schedulers.prepare import about, target

        _leave_gpus_to_us(request)
        workdir = self.copies.take_code(request)
        run_dir, python = f"{self.there}/{request.run_id}", request.cluster.paths.python or DEFAULT_PYTHON
        where = target(request, run_dir, workdir, python, {})
        return Prepared(
            request=request,
            run_dir=run_dir,
            files=render_run(where),
            target=where,
            command=("ssh", self.hosts[0].name, python, "-m", "launcher.supervise", run_dir),
            about={**about(request), "workdir": workdir},
            warnings=(*request.plan.warnings, *notes(where)),
        )

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        hosts = self.hosts[: prepared.about["nodes"]]
        place, warnings = look(hosts, prepared.about, self.there)
        self._places[prepared.request.run_id] = place
        return warnings

    def submit(self, prepared: Prepared) -> str:
        """Raises SchedulerError; where nothing was started, nothing is left behind."""
        try:
            run = self.copies.write(prepared)
        except OSError as error:
            raise SchedulerError(f"cannot write {self.copies.mirror.here}: {error.strerror}") from None
        try:
            self._start(run, "submitted")
        except (NotSentError, HostError):
            self._withdraw(run)
            raise
        finally:
            if run.path.exists():
                remember_root(run.path.parent)
        return handle_of(run)

    def resume(self, handle: str, again: Prepared | None = None) -> str:
        """New supervisors for the run, which go on from its last checkpoint."""
        run = self.run_of(handle)
        self.fetch(run)
        status = self.status(handle)
        if not status.ended:
            raise SchedulerError(f"{run.id} is still {status.state}")
        if status.state == "succeeded":
            raise SchedulerError(f"{run.id} has succeeded: there is nothing to go on with")
        before = run.read_state()
        with in_force(run, again):
            run.cancel.unlink(missing_ok=True)
            replace_json(run.state, {"state": "submitted", "time": now()})
            try:
                self._start(run, "resubmitted")
            except (NotSentError, HostError) as error:
                run.event("refused", reason=str(error))
                replace_json(run.state, {**before, "reason": str(error)})
                with suppress(SchedulerError):
                    self.fetch(run)
                raise
        return handle_of(run)

    def status(self, handle: str) -> Status:
        return self.copies.lately(handle, lambda: self.statuses([self.run_of(handle)])[0])

    def statuses(self, runs: Iterable[RunDir]) -> list[Status]:
        """In one round trip for all that have not ended by their own records."""
        chosen = list(runs)
        living = [run for run in chosen if run.read_state().get("state", "submitted") in LIVING]
        trouble, locks = "", dict[str, str]()
        if living:
            self.copies.mirror.choose(living, self.copies.wanted)
            try:
                done = self.copies.mirror.run(locks_script(self.there, [run.id for run in living]))
            except LoginError as error:
                trouble = str(error)
            else:
                locks = words(done.stdout) | dict.fromkeys(self.copies.mirror.lost, "lost")
        return [
            status_of(
                run, handle_of(run), judged(run, locks.get(run.id, ""), trouble, self.copies.where(run))
            )
            for run in chosen
        ]

    def cancel(self, handle: str) -> None:
        """Ask for a checkpoint and an end; a second call ends the ranks at once."""
        run = self.run_of(handle)
        if not (before := self.statuses([run])[0]).ended:
            self.copies.forget()
            replace_text(run.cancel, f"{time.time()}\n")
            with self.copies.strictly([run]):
                self.copies.mirror.run(":")
            before = status_of(run, handle, run.read_state())
        if before.ended:
            raise SchedulerError(f"{run.id} is not running: {before.state}")

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        self.copies.fetch(run, wanted)

    def where(self, run: RunDir) -> str:
        return self.copies.where(run)

    def remove(self, runs: Sequence[RunDir]) -> None:
        self.copies.remove(runs)
        for rank, host in enumerate(self.hosts):
            # What a killed supervisor's ranks have left in the host's memory.
            left = " ".join(quote(run.id) for run in runs if run.read_about().get("nodes", 1) > rank)
            if left:
                with suppress(LoginError):
                    host.run(f"cd /dev/shm/launcher-$(id -u) && for r in {left}; do rm -rf $r-*; done")
        for run in runs:
            shutil.rmtree(run.path)

    def logs(self, handle: str, since: int) -> bytes:
        """What the supervisors of all hosts printed, from byte `since` on."""
        parts = [file.read_bytes() for file in sorted(self.run_of(handle).path.glob("supervisor*.log"))]
        return b"".join(parts)[since:]

    def list(self) -> list[Status]:
        from launcher.schedulers.of_run import statuses

        return [one for one in statuses(runs_in()) if one.handle.startswith(PREFIX)]

    def run_of(self, handle: str) -> RunDir:
        """Raises RunNotFoundError."""
        for run in itertools.chain(self.known, runs_in()):
            if run.id == handle.rpartition(":")[2] and handle_of(run) == handle:
                return run
        raise RunNotFoundError(f"no run of {handle} is known here")

    def _start(self, run: RunDir, event: str) -> None:
        """Raises NotSentError and HostError where nothing was started; LoginError where that is not known."""
        about = run.read_about()
        hosts = self.hosts[: about["nodes"]]
        place = self._places.pop(run.id, None) or look(hosts, about, self.there)[0]
        run.event("submitting")
        first = self.copies.mirror
        start = Start(hosts, first, f"{self.there}/{run.id}", about, place, event, handle_of(run))
        try:
            self.copies.deliver([run], (), start.everywhere)
        except LoginError as error:
            raise LoginError(
                f"{error}; the run may have started or not: `launcher status {run.id}` tells when "
                f"{first.name} answers again"
            ) from None

    def _withdraw(self, run: RunDir) -> None:
        with suppress(SchedulerError):  # then it stays on both sides
            self.remove([run])


def _leave_gpus_to_us(request: Request) -> None:
    cluster, job = request.cluster, request.job
    for where, env in (
        ("job", job.env),
        ("cluster", cluster.env),
        ("cluster's network", cluster.network.env),
    ):
        if request.plan.layout.gpus_per_node and CHOSEN_BY_US in env:
            raise SchedulerError(
                f"{where} env {CHOSEN_BY_US}: launcher sets it on these hosts, to GPUs that are free; "
                "say how many with resources.gpus_per_node"
            )
