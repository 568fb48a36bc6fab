"""Choose a job's hosts: inspect all of them, and take the first that can run the job."""

from __future__ import annotations

import math
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
"Contents of run.json."


@dataclass(frozen=True)
class Place:
    """The rendezvous of the supervisors of one start. A single supervisor needs no address."""

    address: str | None
    port: int

    def options(self, rank: int, nodes: int) -> tuple[str, ...]:
        if self.address is None:
            return ()
        args = {"--nodes": nodes, "--node-rank": rank, "--rendezvous": self.address, "--port-base": self.port}
        return tuple(str(part) for pair in args.items() for part in pair)


@dataclass(frozen=True)
class Chosen:
    """The chosen hosts, with node 0's host first."""

    hosts: tuple[Over, ...]
    place: Place
    notes: tuple[str, ...]
    apart: bool = False
    "Whether the hosts share no folder, so that each has its own run directory."


def hosts_of(about: About) -> tuple[str, ...]:
    """Return the run's hosts. The first is node 0's, which holds the run directory."""
    return tuple(about.get("hosts") or about["cluster"]["ssh"]["hosts"][: about["nodes"]])


def choose(own: Sequence[Over], others: Sequence[Over], about: About, there: str) -> Chosen:
    """Choose the job's hosts.

    `own` are the hosts of a resumed run, which must be used. If more are needed, they are taken from `others`
    in order. All hosts are inspected in parallel. Raises SchedulerError with each host's refusals.
    """
    nodes = about["nodes"]
    hosts = [*own, *others] if len(own) < nodes else list(own[:nodes])
    facts, found = _look(hosts, about, there)
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
    first = facts[taken[0]]
    address, alone = _meet(chosen, about, there, first) if nodes > 1 else (None, False)
    notes = [warning for rank in taken for warning in found[rank].warnings]
    if len(hosts) > nodes:
        notes.insert(0, _choice(chosen, [finding for finding in found[: taken[-1]] if finding.refusals]))
    return Chosen(chosen, Place(address, first["port"]), tuple(notes), alone)


@dataclass(frozen=True)
class Share:
    """A host's share of a sweep."""

    chosen: Chosen
    places: int | None
    "Number of runs that run there at the same time, or None for as many as its GPUs allow."


def deal(
    hosts: Sequence[Over], about: About, there: str, tasks: int, at_once: int | None
) -> tuple[list[Share], tuple[str, ...]]:
    """Distribute the runs of a sweep over the hosts. Return the share of each run's host, and notes.

    `about` is the run.json of a run that needs the most GPUs. Raises SchedulerError if no host can run it.
    """
    facts, found = _look(hosts, about, there)
    good = [rank for rank in range(len(hosts)) if not found[rank].refusals]
    refused = [refusal for finding in found for refusal in finding.refusals]
    if not good:
        raise HostError("\n".join(refused))
    need = about["gpus_per_node"]
    seats = dealt([len(facts[rank]["gpus"]) // need if need else 1 for rank in good], at_once or tasks)
    shares = [
        Share(
            Chosen((hosts[rank],), Place(None, facts[rank]["port"]), ()),
            seats.count(seat) if at_once is not None else None,
        )
        for seat, rank in enumerate(good)
    ]
    per_task = [seats[task % len(seats)] for task in range(tasks)]
    counts = ", ".join(
        f"{per_task.count(seat)} on {hosts[rank].name}" for seat, rank in enumerate(good) if seat in per_task
    )
    notes = [f"runs: {counts}"] if len(hosts) > 1 else []
    notes += [f"passed over: {refusal}" for refusal in refused]
    notes += [warning for rank in good for warning in found[rank].warnings]
    return [shares[seat] for seat in per_task], tuple(notes)


def runs_that_fit(host: Over, about: About, there: str) -> float:
    """Return how many runs like this one fit on a host's free GPUs now; 0 if it cannot take any."""
    facts, found = _look([host], about, there)
    if found[0].refusals:
        return 0
    need = about["gpus_per_node"]
    return sum(not gpu["busy"] for gpu in facts[0]["gpus"]) // need if need else math.inf


def dealt(capacities: Sequence[int], seats: int) -> list[int]:
    """Distribute `seats` over hosts in turn, in proportion to how many runs each host can hold.

    `capacities` holds that number for each host, at least 1. Return each seat's host as an index of it.
    """
    order = sorted((turn / most, host) for host, most in enumerate(capacities) for turn in range(most))
    return [order[seat % len(order)][1] for seat in range(seats)]


def _look(hosts: Sequence[Over], about: About, there: str) -> tuple[list[Mapping[str, Any]], list[Findings]]:
    """Inspect the hosts. Return each host's answer (empty if there is none) and its findings."""
    need = Need(python_of(about), there, about["gpus_per_node"], waits=about.get("sweep") is not None)
    here = secrets_here(about)
    asked = {
        "do": "look",
        "runs": there,
        "gpus": need.gpus,
        "port": random.randint(61000, 65000),
        "secrets": [secret for secret in about["job"]["secrets"] if secret["name"] not in here],
    }
    facts: list[Mapping[str, Any]] = []
    found = []
    answers = side_by_side(lambda host: ask_host(host, need.python, asked), hosts)
    for host, answer in zip(hosts, answers, strict=True):
        away = isinstance(answer, SchedulerError)
        facts.append({} if isinstance(answer, SchedulerError) else answer)
        found.append(Findings((str(answer),)) if away else problems(host.name, facts[-1], need))
    return facts, found


def _choice(chosen: Sequence[Over], passed: Sequence[Findings]) -> str:
    """Return a line that says which hosts were chosen and why others were skipped."""
    taken = f"on {', '.join(host.name for host in chosen)}"
    why = "; ".join(refusal.removesuffix(BUSY) for finding in passed for refusal in finding.refusals)
    return f"{taken}; passed over: {why}" if why else taken


def _meet(hosts: Sequence[Over], about: About, there: str, first: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the address of the first host, and whether the hosts share no folder. Raises HostError."""
    request = {
        "do": "meet",
        "token": tokens.token_hex(16),
        "runs": there,
        "port": first["port"],
        "addresses": first["addresses"],
        "others": len(hosts) - 1,
    }

    def visit(rank: int) -> dict[str, Any]:
        return ask_host(hosts[rank], python_of(about), {**request, "rank": rank})

    visits = all_of(side_by_side(visit, range(len(hosts))))[1:]
    names = [host.name for host in hosts]
    try:
        return rendezvous(names, first, visits), apart(names, visits, there)
    except ValueError as error:
        raise HostError(str(error)) from None


def python_of(about: About) -> str:
    return about["cluster"]["paths"]["python"] or DEFAULT_PYTHON


def secrets_here(about: About) -> dict[str, str]:
    """Return the secrets whose values exist on this machine.

    Raises SchedulerError for a value that cannot be passed to a process.
    """
    from launcher.spec.job import Job
    from launcher.supervise.secrets import SecretError, found

    try:
        return found(Job.model_validate(about["job"]).secrets)
    except SecretError as error:
        raise SchedulerError(f"secrets: {error}") from None
