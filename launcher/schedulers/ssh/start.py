"""Before the start every host is looked at; then the supervisors, node 0's last."""

from __future__ import annotations

import random
import secrets as tokens
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.ssh.checks import Need, problems, rendezvous
from launcher.schedulers.ssh.hosts import HostError, all_of, ask_host, side_by_side

if TYPE_CHECKING:
    from launcher.schedulers.over_ssh.login import Login

DEFAULT_PYTHON = "python3"
START_SECONDS = 240.0
"For a host that has to wait for its disk, for processes of an earlier start and for a cold interpreter."
About = Mapping[str, Any]
"run.json"


@dataclass(frozen=True)
class Place:
    """Where the supervisors of one start meet; one alone meets nobody."""

    address: str | None
    port: int

    def options(self, rank: int, nodes: int) -> tuple[str, ...]:
        if self.address is None:
            return ()
        told = {"--nodes": nodes, "--node-rank": rank, "--rendezvous": self.address, "--port-base": self.port}
        return tuple(str(part) for pair in told.items() for part in pair)


def look(hosts: Sequence[Login], about: About, there: str) -> tuple[Place, tuple[str, ...]]:
    """At all hosts of a job at once; gives the warnings, too. Raises SchedulerError with what stands against
    the job, on whichever host."""
    named = about["cluster"]["node"]["gpu"] is not None
    need = Need(_python(about), there, about["gpus_per_node"], profile_has_gpus=named)
    here = _secrets_here(about)
    asked = {
        "do": "look",
        "runs": there,
        "gpus": need.gpus,
        "port": random.randint(61000, 65000),
        "secrets": [secret for secret in about["job"]["secrets"] if secret["name"] not in here],
    }
    seen = all_of(side_by_side(lambda host: ask_host(host, need.python, asked), hosts))
    found = [problems(host.name, one, need) for host, one in zip(hosts, seen, strict=True)]
    if refusals := [refusal for one in found for refusal in one.refusals]:
        raise HostError("\n".join(refusals))
    address = _meet(hosts, need, seen[0]) if len(hosts) > 1 else None
    return Place(address, seen[0]["port"]), tuple(warning for one in found for warning in one.warnings)


def _meet(hosts: Sequence[Login], need: Need, first: Mapping[str, Any]) -> str:
    told = {
        "do": "meet",
        "token": tokens.token_hex(16),
        "runs": need.runs,
        "port": first["port"],
        "addresses": first["addresses"],
        "others": len(hosts) - 1,
    }

    def visit(rank: int) -> dict[str, Any]:
        return ask_host(hosts[rank], need.python, {**told, "rank": rank})

    visits = all_of(side_by_side(visit, range(len(hosts))))[1:]
    try:
        return rendezvous([host.name for host in hosts], first, visits, need.runs)
    except ValueError as error:
        raise HostError(str(error)) from None


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

    def everywhere(self) -> None:
        """The others wait for node 0, which begins. Raises SchedulerError; then no other is left."""
        gpus: dict[str, list[int]] = {}
        others = range(1, len(self.hosts))
        if others:
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
        command = [_python(self.about), "-m", "launcher.supervise", self.run_dir]
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
            "secrets": _secrets_here(self.about),
        }
        return ask_host(login, _python(self.about), request, timeout=START_SECONDS)

    def _stop(self, rank: int) -> dict[str, Any]:
        request = {"do": "stop", "run_dir": self.run_dir, "rank": rank}
        return ask_host(self.hosts[rank], _python(self.about), request)


def _python(about: About) -> str:
    return about["cluster"]["paths"]["python"] or DEFAULT_PYTHON


def _secrets_here(about: About) -> dict[str, str]:
    from launcher.spec.job import Job
    from launcher.supervise.secrets import found

    return found(Job.model_validate(about["job"]).secrets)
