"""The supervisors of one start: the others' first, node 0's last."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.ssh.choose import About, Place, python_of, secrets_here
from launcher.schedulers.ssh.hosts import all_of, ask_host, side_by_side

if TYPE_CHECKING:
    from launcher.schedulers.over_ssh.login import Login

START_SECONDS = 240.0
"For a host that has to wait for its disk, for processes of an earlier start and for a cold interpreter."


@dataclass(frozen=True)
class Start:
    """`first`: node 0, through which also the run directory goes there and comes back."""

    hosts: Sequence[Login]
    first: Login
    run_dir: str
    about: About
    place: Place
    event: str
    handle: str
    spread: Callable[[], None] | None = None
    "Brings the run directory to hosts that do not share it."
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    "By which these supervisors know each other."

    def everywhere(self) -> None:
        """The others wait for node 0, which begins. Raises SchedulerError; then no other is left."""
        gpus: dict[str, list[int]] = {}
        others = range(1, len(self.hosts))
        if self.spread is not None:
            self.spread()
        elif others:
            self.first.run(":")  # the run directory is there
        answers = side_by_side(lambda rank: self._start(rank, self.hosts[rank]), others)
        try:
            for rank, answer in zip(others, all_of(answers), strict=True):
                gpus[self.hosts[rank].name] = answer["gpus"]
            self._start(0, self.first, gpus)
        except SchedulerError:
            begun = [rank for rank, one in zip(others, answers, strict=True) if isinstance(one, dict)]
            side_by_side(self._stop, begun)
            raise

    def _start(self, rank: int, login: Login, gpus: Mapping[str, list[int]] | None = None) -> dict[str, Any]:
        """`gpus`: of the other hosts."""
        command = [python_of(self.about), "-m", "launcher.supervise", self.run_dir]
        event = {"event": self.event, "handle": self.handle, "command": command}
        request = {
            "do": "start",
            "run_dir": self.run_dir,
            "rank": rank,
            "host": self.hosts[rank].name,
            "gpus": self.about["gpus_per_node"],
            "place": self.place.options(rank, len(self.hosts)),
            "event": event if rank == 0 else None,
            "others_gpus": gpus,
            "secrets": secrets_here(self.about),
            "token": self.token,
        }
        return ask_host(login, python_of(self.about), request, timeout=START_SECONDS)

    def _stop(self, rank: int) -> dict[str, Any]:
        request = {"do": "stop", "run_dir": self.run_dir, "rank": rank}
        return ask_host(self.hosts[rank], python_of(self.about), request)
