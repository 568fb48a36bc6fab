"""One attempt on one node: start `scripts/start.sh`, watch it, end it when asked."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.runs.layout import AttemptDir, RunDir
from launcher.supervise.process import dying_with, end_processes, processes_of, signal_group

STOP_GRACE_SECONDS = 100.0
"For the checkpoint, between the request to stop and SIGTERM. Below Slurm's `signal_seconds` of 120."
TERM_GRACE_SECONDS = 40.0
"For torchrun to end its workers (it gives them 30 s), then SIGKILL."


RENDEZVOUS_PORTS = range(61000, 65536)
"Above Linux's default ephemeral range (32768-60999): no outgoing connection takes one by chance."


@dataclass(frozen=True)
class NodePlace:
    """Which node of how many this supervisor is, and how the nodes meet."""

    rank: int = 0
    count: int = 1
    rendezvous_host: str | None = None
    port_base: int = 61000
    apart: bool = False
    "The nodes share no folder."

    def rendezvous_port(self, attempt: int) -> int:
        """Another port for each attempt, so that a late packet of the last one finds nobody. On one node it
        is one that is free now: several runs share the host, and torchrun ends at once where one is taken."""
        if self.count == 1:
            return free_port()
        first = RENDEZVOUS_PORTS.start
        return first + (self.port_base - first + attempt) % len(RENDEZVOUS_PORTS)

    @property
    def mirror_port(self) -> int:
        """Where the supervisors of hosts without a shared folder call node 0: the one before the first
        attempt's."""
        return self.rendezvous_port(-1)


@dataclass(frozen=True)
class Ended:
    """How torchrun, or the only rank's worker, ended on this node. `exit_code` is negative for a signal."""

    exit_code: int
    error: str = ""
    "Why nothing could be started at all."


class RunningAttempt:
    """A started attempt. Created by `start`; `wait` returns when no process of it is left."""

    def __init__(self, run: RunDir, attempt: AttemptDir, node: int, process: subprocess.Popen[bytes]) -> None:
        self.run, self.attempt, self.node, self.process = run, attempt, node, process
        self._stop_asked: float | None = None
        self._terminated: float | None = None

    def ask_to_stop(self, reason: str, *, now: bool) -> None:
        """Checkpoint, then stop; `now`: without a checkpoint. A later call may have another reason."""
        if now:
            self._terminate()
        self._stop_asked = self._stop_asked or time.monotonic()
        with contextlib.suppress(OSError):
            self.attempt.stop.write_text(reason)

    def wait(self, tick: Callable[[], None]) -> Ended:
        """Block until the attempt has ended, calling `tick` a few times a second."""
        while True:
            try:
                code = self.process.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                self._escalate()
                tick()
        end_processes(lambda: processes_of(self.run.path, self.attempt.number, self.node), grace=3.0)
        return Ended(code)

    def _escalate(self) -> None:
        now = time.monotonic()
        if self._stop_asked is not None and now > self._stop_asked + STOP_GRACE_SECONDS:
            self._terminate()
        if self._terminated is not None and now > self._terminated + TERM_GRACE_SECONDS:
            signal_group(self.process.pid, signal.SIGKILL)

    def _terminate(self) -> None:
        if self._terminated is None:
            self._terminated = time.monotonic()
            self.process.send_signal(signal.SIGTERM)


def start(run: RunDir, attempt: AttemptDir, place: NodePlace, secrets: Mapping[str, str]) -> RunningAttempt:
    """Start all workers of this node. Raises OSError when bash or the folder is missing."""
    log = attempt.torchrun_log(place.rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            ["bash", str(run.scripts / "start.sh")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **secrets, **_environment(run, attempt, place, secrets)},
            # SIGKILL is safe: each worker notices that who started it is gone and ends its rank.
            preexec_fn=dying_with(os.getpid(), signal.SIGKILL, own_group=True),
        )
    return RunningAttempt(run, attempt, place.rank, process)


def _environment(
    run: RunDir, attempt: AttemptDir, place: NodePlace, secrets: Mapping[str, str]
) -> dict[str, str]:
    environment = {
        "LAUNCHER_RUN_DIR": str(run.path),
        "LAUNCHER_RUN_ID": run.id,
        "LAUNCHER_ATTEMPT": str(attempt.number),
        "LAUNCHER_NODE_RANK": str(place.rank),
        "LAUNCHER_NODES": str(place.count),
        "LAUNCHER_STOP_FILE": str(attempt.stop),
        "LAUNCHER_SECRETS": ",".join(secrets),
        "LAUNCHER_SUPERVISED": "1",
    }
    environment["LAUNCHER_RENDEZVOUS_PORT"] = str(place.rendezvous_port(attempt.number))
    if place.count > 1:
        environment["LAUNCHER_RENDEZVOUS_HOST"] = place.rendezvous_host or ""
    if place.apart:
        environment["LAUNCHER_APART"] = "1"
    return environment


def free_port() -> int:
    """One of RENDEZVOUS_PORTS at which nobody listens on any address, since torch's store listens on all.
    Raises OSError without any."""
    for port in random.sample(RENDEZVOUS_PORTS, 50):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError("50 ports between 61000 and 65535 were tried: none is free")


def torchrun_tail(attempt: AttemptDir, node: int, count: int = 20) -> list[str]:
    """The last lines that bash and torchrun (where there is one) printed on a node."""
    return tail(attempt.torchrun_log(node), count)


def tail(path: Path, count: int) -> list[str]:
    """The last lines of a text file, reading at most its last 64 KiB."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            return file.read().decode(errors="backslashreplace").splitlines()[-count:]
    except OSError:
        return []
