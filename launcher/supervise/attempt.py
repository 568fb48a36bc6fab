"""One attempt on one node: start `scripts/start.sh`, watch it and end it on request."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.diagnosis.cause import clues_of_text
from launcher.diagnosis.clue import Clue, failure_patterns
from launcher.diagnosis.lines import lines_of
from launcher.logs.masked_pipe import MaskedPipe
from launcher.rundir.files import open_regular
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.rundir.secret_masking import secrets_of
from launcher.rundir.shared_memory_folders import remove_error_folders
from launcher.rundir.stop import write_stop_request
from launcher.spec import variables
from launcher.spec.records import RunRecord
from launcher.spec.signals import STOP_SIGNALS
from launcher.spec.variables import split, travelling
from launcher.supervise.ports import RENDEZVOUS_PORTS, free_port
from launcher.supervise.process import (
    END_RANK,
    KILL_RANK,
    descendants,
    dying_with,
    end_processes,
    processes_of,
    reap,
    signal_group,
    workers_of,
)

FAILED_SECONDS = 20.0
"Time that the ranks of a script have to end after SIGTERM if another rank has failed."
KILL_SECONDS = 5.0
"Time that workers have to record how their killed ranks ended, before remaining processes get SIGKILL."


@dataclass(frozen=True)
class NodePlace:
    """This supervisor's node number, the number of nodes, and how the nodes reach each other."""

    rank: int = 0
    count: int = 1
    rendezvous_host: str | None = None
    port_base: int = 61000
    no_shared_folder: bool = False
    "Whether the nodes share no folder."

    def rendezvous_port(self, attempt: int) -> int:
        """Return the port at which the ranks of an attempt meet.

        With several nodes each attempt uses a different port, so that late packets of the previous attempt
        reach no listener. On one node it is a port that is free now, because several runs share the host and
        torchrun ends at once if its port is taken. Only torchrun uses it there.
        """
        if self.count == 1:
            return free_port()
        first = RENDEZVOUS_PORTS.start
        return first + (self.port_base - first + attempt) % len(RENDEZVOUS_PORTS)

    @property
    def mirror_port(self) -> int:
        """Port at which the supervisors of hosts without a shared folder call node 0.

        It is the port before the first attempt's.
        """
        return self.rendezvous_port(-1)


@dataclass(frozen=True)
class Ended:
    """How start.sh ended on this node: torchrun or `local_ranks`. `exit_code` is negative for a signal."""

    exit_code: int
    error: str = ""
    "Why nothing could be started."


class RunningAttempt:
    """An attempt that `start` has started. `wait` returns when all its processes have ended."""

    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        node: int,
        process: subprocess.Popen[bytes],
        output: MaskedPipe,
        sends_sigterm: bool,
    ) -> None:
        """`sends_sigterm`: the ranks are asked to stop by SIGTERM in addition to the stop file."""
        self.run, self.attempt, self.node, self.process = run, attempt, node, process
        self.sends_sigterm = sends_sigterm
        self._output = output
        self._written_request: tuple[str, float] | None = None
        self._kill_at: float | None = None
        self._ends_failed = False
        self._signalled: set[tuple[int, signal.Signals]] = set()

    def ask_to_stop(self, reason: str, until: float) -> None:
        """Have the ranks save and end. Kill those that still run at `until`, by time.monotonic.

        It may be called again with another reason or time.
        """
        if not self._ends_failed:
            self._kill_at = until
            self._write_request(reason)

    def end_failed(self) -> None:
        """End the ranks without a checkpoint, because they would wait forever for a failed rank.

        A script that was already asked to stop keeps its time limit.
        """
        if not self._ends_failed and (self._kill_at is None or not self.sends_sigterm):
            self._ends_failed = True
            self._kill_at = time.monotonic() + (FAILED_SECONDS if self.sends_sigterm else 0.0)
            if self.sends_sigterm:
                self._write_request("failed")

    def _write_request(self, reason: str) -> None:
        """Write the reason and the time of the kill into the stop file, before any signal is sent."""
        assert self._kill_at is not None
        if (reason, self._kill_at) != self._written_request:
            self._written_request = reason, self._kill_at
            if self.node != 0 and self.attempt.stop.exists():
                return  # the nodes share the file, and rank 0 reads the time in it by node 0's clock
            with contextlib.suppress(OSError):
                write_stop_request(self.attempt.stop, reason, time.time() + self._kill_at - time.monotonic())

    def wait(self, tick: Callable[[], None]) -> Ended:
        """Block until the attempt has ended, calling `tick` a few times a second."""
        while True:
            try:
                code = self.process.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                self._escalate()
                reap(self.process.pid)
                tick()
        end_processes(self._remaining, grace=3.0)
        reap()
        self.close()
        remove_error_folders(self.run, self.node)
        # Ranks that were told to end have not finished, whatever their exit code.
        return Ended(code or (-END_RANK if self._signalled else 0))

    def close(self) -> None:
        """Write the output so far to its file. `wait` calls this too."""
        self._output.close()

    def _remaining(self) -> set[int]:
        return {*processes_of(self.run.path, self.attempt.number, self.node), *descendants()}

    def _escalate(self) -> None:
        if self._kill_at is None:
            return
        overdue = time.monotonic() - self._kill_at
        if overdue > KILL_SECONDS or not (self._ranks_started() or self.attempt.only_saves):
            signal_group(self.process.pid, signal.SIGKILL)
        elif overdue > 0 or self.sends_sigterm:
            signum = KILL_RANK if overdue > 0 else END_RANK
            starter = self.process.pid
            workers = workers_of(self.run.path, self.attempt.number, self.node, parent=starter)
            for worker in workers:
                if (worker, signum) not in self._signalled:
                    self._signalled.add((worker, signum))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker, signum)
            if self._ends_failed and self._signalled and not workers:
                # torchrun treats ranks that were told to end as finished, and waits for those of other nodes.
                signal_group(starter, signal.SIGKILL)

    def _ranks_started(self) -> bool:
        """Return whether any rank has started. Before that (`setup:`) there is nothing to save."""
        return any(self.attempt.rank_log(self.node, 0, "out").parent.glob("rank-*.out"))


def start(
    run: RunDir,
    attempt: AttemptDir,
    place: NodePlace,
    secrets: Mapping[str, str],
    *,
    sends_sigterm: bool,
    only_check: bool = False,
) -> RunningAttempt:
    """Start all workers of this node, or with `only_check` the doctor's check of the node.

    `sends_sigterm` is explained in RunningAttempt.

    Raises OSError if bash or the folder is missing.
    """
    variables_of_attempt = _environment(run, attempt, place, secrets)
    if only_check:
        variables_of_attempt[variables.ONLY_CHECK] = "1"
    output = MaskedPipe(
        attempt.torchrun_log(place.rank), secrets_of({**os.environ, **secrets, **variables_of_attempt})
    )
    try:
        process = subprocess.Popen(
            ["bash", str(run.scripts / "start.sh")],
            stdin=subprocess.DEVNULL,
            stdout=output.end,
            stderr=output.end,
            env={**split(os.environ)[0], **travelling(secrets), **variables_of_attempt},
            # SIGKILL is safe: each worker notices that its parent is gone and ends its rank.
            preexec_fn=dying_with(os.getpid(), signal.SIGKILL, own_group=True, blocked=STOP_SIGNALS),
        )
    except OSError:
        output.close()
        raise
    output.start()
    return RunningAttempt(run, attempt, place.rank, process, output, sends_sigterm)


def _environment(
    run: RunDir, attempt: AttemptDir, place: NodePlace, secrets: Mapping[str, str]
) -> dict[str, str]:
    environment = {
        variables.RUN_DIR: str(run.path),
        variables.RUN_ID: run.id,
        variables.ATTEMPT: str(attempt.number),
        variables.NODE_RANK: str(place.rank),
        variables.NODES: str(place.count),
        variables.STOP_FILE: str(attempt.stop),
        variables.SECRETS: ",".join(secrets),
        variables.SUPERVISED: str(os.getpid()),
    }
    start = attempt.number
    if attempt.only_saves:
        environment[variables.ONLY_SAVE] = "1"
        start += 1  # the run ends after the save, so no attempt has this number
    environment[variables.RENDEZVOUS_PORT] = str(place.rendezvous_port(start))
    if place.count > 1:
        environment[variables.RENDEZVOUS_HOST] = place.rendezvous_host or ""
    if place.no_shared_folder:
        environment[variables.APART] = "1"
    return environment


def torchrun_clues(attempt: AttemptDir, about: RunRecord) -> dict[int, list[Clue]]:
    """Return the clues in the output of each node's torchrun and of the script that starts it."""
    clues = {}
    for path in attempt.logs.glob("node-*/torchrun.err"):
        with contextlib.suppress(OSError), open_regular(path) as file:
            clues[int(path.parent.name.partition("-")[2])] = clues_of_text(
                lines_of(file), failure_patterns(about)
            )
    return clues


def tail(path: Path, begin: int = 0) -> list[str]:
    """Return the last 20 lines of a text file from byte `begin` on, reading at most its last 64 KiB."""
    try:
        with open_regular(path) as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - 65536))
            return file.read().decode(errors="backslashreplace").splitlines()[-20:]
    except OSError:
        return []
