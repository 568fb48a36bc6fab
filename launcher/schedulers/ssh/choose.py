"""Which hosts a job takes: all are looked at, and the first ones that can take it are chosen."""

from __future__ import annotations

import random
import secrets as tokens
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.schedulers.base import SchedulerError
from launcher.schedulers.ssh.checks import BUSY, Findings, Need, apart, problems, rendezvous
from launcher.schedulers.ssh.hosts import HostError, all_of, ask_host, side_by_side

if TYPE_CHECKING:
    from launcher.schedulers.over_ssh.ssh import Over

DEFAULT_PYTHON = "python3"
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


@dataclass(frozen=True)
class Chosen:
    """Node 0's host first."""

    hosts: tuple[Over, ...]
    place: Place
    notes: tuple[str, ...]
    apart: bool = False
    "They share no folder: each has a run directory of its own."


def hosts_of(about: About) -> tuple[str, ...]:
    """Of a run, node 0's first; its run directory lies there."""
    return tuple(about.get("hosts") or about["cluster"]["ssh"]["hosts"][: about["nodes"]])


def choose(own: Sequence[Over], others: Sequence[Over], about: About, there: str) -> Chosen:
    """`own`: of a run that goes on, and must be taken; what is lacking comes from `others`, in their order.

    All are looked at at once. Raises SchedulerError with what stands against the job on each host.
    """
    nodes = about["nodes"]
    hosts = [*own, *others] if len(own) < nodes else list(own[:nodes])
    seen, found = _look(hosts, about, there)
    against = ["\n".join(one.refusals) for one in found]
    good = [rank for rank, refusals in enumerate(against) if not refusals]
    if any(against[: len(own)]):
        raise HostError("\n".join(filter(None, against[: len(own)])))
    if len(good) < nodes:
        head = f"{len(good)} of {len(hosts)} hosts can take the job, it needs {nodes}:"
        reasons = "\n".join(filter(None, against))
        raise HostError(f"{head}\n{reasons}" if len(hosts) > nodes else reasons)
    taken = good[:nodes]
    chosen = tuple(hosts[rank] for rank in taken)
    first = seen[taken[0]]
    address, alone = _meet(chosen, about, there, first) if nodes > 1 else (None, False)
    notes = [warning for rank in taken for warning in found[rank].warnings]
    if len(hosts) > nodes:
        notes.insert(0, _choice(chosen, [one for one in found[: taken[-1]] if one.refusals]))
    return Chosen(chosen, Place(address, first["port"]), tuple(notes), alone)


def _look(hosts: Sequence[Over], about: About, there: str) -> tuple[list[Mapping[str, Any]], list[Findings]]:
    """Of each host its answer (empty where there is none), and what it means."""
    need = Need(python_of(about), there, about["gpus_per_node"])
    here = secrets_here(about)
    asked = {
        "do": "look",
        "runs": there,
        "gpus": need.gpus,
        "port": random.randint(61000, 65000),
        "secrets": [secret for secret in about["job"]["secrets"] if secret["name"] not in here],
    }
    seen: list[Mapping[str, Any]] = []
    found = []
    answers = side_by_side(lambda host: ask_host(host, need.python, asked), hosts)
    for host, answer in zip(hosts, answers, strict=True):
        away = isinstance(answer, SchedulerError)
        seen.append({} if isinstance(answer, SchedulerError) else answer)
        found.append(Findings((str(answer),)) if away else problems(host.name, seen[-1], need))
    return seen, found


def _choice(chosen: Sequence[Over], passed: Sequence[Findings]) -> str:
    """One line."""
    taken = f"on {', '.join(host.name for host in chosen)}"
    why = "; ".join(refusal.removesuffix(BUSY) for one in passed for refusal in one.refusals)
    return f"{taken}; passed over: {why}" if why else taken


def _meet(hosts: Sequence[Over], about: About, there: str, first: Mapping[str, Any]) -> tuple[str, bool]:
    """The address of the first one, and whether they share no folder."""
    told = {
        "do": "meet",
        "token": tokens.token_hex(16),
        "runs": there,
        "port": first["port"],
        "addresses": first["addresses"],
        "others": len(hosts) - 1,
    }

    def visit(rank: int) -> dict[str, Any]:
        return ask_host(hosts[rank], python_of(about), {**told, "rank": rank})

    visits = all_of(side_by_side(visit, range(len(hosts))))[1:]
    names = [host.name for host in hosts]
    try:
        return rendezvous(names, first, visits), apart(names, visits, there)
    except ValueError as error:
        raise HostError(str(error)) from None


def python_of(about: About) -> str:
    return about["cluster"]["paths"]["python"] or DEFAULT_PYTHON


def secrets_here(about: About) -> dict[str, str]:
    """Values that this machine has. Raises SchedulerError for one that no process can receive."""
    from launcher.spec.job import Job
    from launcher.supervise.secrets import SecretError, found

    try:
        return found(Job.model_validate(about["job"]).secrets)
    except SecretError as error:
        raise SchedulerError(f"secrets: {error}") from None
