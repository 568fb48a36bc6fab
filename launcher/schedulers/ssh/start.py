"""Start the supervisors of a run: the other nodes' first, node 0's last."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.ssh.choose import About, Rendezvous, local_secrets, python_of
from launcher.schedulers.ssh.hosts import ask_host, in_parallel, results_or_raise

if TYPE_CHECKING:
    from launcher.schedulers.login import Login

START_SECONDS = 240.0
"Timeout for one host, which may wait for its disk, processes of an earlier start and a cold interpreter."


@dataclass(frozen=True)
class Start:
    """One start of all supervisors.

    `first` is node 0, through which the run directory is also sent and fetched.
    """

    hosts: Sequence[Login]
    first: Login
    run_dir: str
    about: About
    rendezvous: Rendezvous
    event: str
    handle: str
    spread: Callable[[], None] | None = None
    "Sends the run directory to hosts that do not share it."
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    "Token by which these supervisors recognise each other."

    def start_all(self) -> None:
        """Start all supervisors, node 0's last.

        If one cannot be started, end the others and raise SchedulerError.
        """
        gpus: dict[str, list[int]] = {}
        others = range(1, len(self.hosts))
        if self.spread is not None:
            self.spread()
        elif others:
            self.first.run(":")  # sends the run directory
        answers = in_parallel(lambda rank: self._start(rank, self.hosts[rank]), others)
        try:
            for rank, answer in zip(others, results_or_raise(answers), strict=True):
                gpus[self.hosts[rank].name] = answer["gpus"]
            self._start(0, self.first, gpus)
        except SchedulerError:
            started = [rank for rank, answer in zip(others, answers, strict=True) if isinstance(answer, dict)]
            in_parallel(self._stop, started)
            raise

    def _start(self, rank: int, login: Login, gpus: Mapping[str, list[int]] | None = None) -> dict[str, Any]:
        """Start one supervisor. `gpus` maps the other hosts to their GPUs."""
        command = [python_of(self.about), "-m", "launcher.supervise", self.run_dir]
        event = {"event": self.event, "handle": self.handle, "command": command}
        request = {
            "do": "start",
            "run_dir": self.run_dir,
            "rank": rank,
            "host": self.hosts[rank].name,
            # The supervisor of a sweep's run waits for GPUs by itself.
            "gpus": self.about["gpus_per_node"] if self.about.get("sweep") is None else 0,
            "place": self.rendezvous.options(rank, len(self.hosts)),
            "event": event if rank == 0 else None,
            "others_gpus": gpus,
            "secrets": local_secrets(self.about),
            "token": self.token,
        }
        return ask_host(login, python_of(self.about), request, timeout=START_SECONDS)

    def _stop(self, rank: int) -> dict[str, Any]:
        request = {"do": "stop", "run_dir": self.run_dir, "rank": rank}
        return ask_host(self.hosts[rank], python_of(self.about), request)
