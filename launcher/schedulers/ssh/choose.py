"""Choose a job's hosts: inspect all of them, and take the first that can run the job."""

from __future__ import annotations

import math
import secrets as tokens
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.schedulers.base import Findings, SchedulerError
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.ssh.checks import BUSY, Need, problems, rendezvous_address, separate_folders
from launcher.schedulers.ssh.hosts import HostError, ask_host, in_parallel, results_or_raise
from launcher.spec.records import RunRecord

DEFAULT_PYTHON = "python3"


@dataclass(frozen=True)
class Rendezvous:
    """Where the supervisors of several nodes meet."""

    address: str
    port: int

    def options(self, rank: int, nodes: int) -> tuple[str, ...]:
        """Return the supervisor's options on one of the nodes."""
        args = {"--nodes": nodes, "--node-rank": rank, "--rendezvous": self.address, "--port-base": self.port}
        return tuple(str(part) for pair in args.items() for part in pair)


@dataclass(frozen=True)
class Chosen:
    """The chosen hosts, with node 0's host first."""

    hosts: tuple[SshLogin, ...]
    notes: tuple[str, ...] = ()
    rendezvous: Rendezvous | None = None
    "None for a single supervisor."
    separate_folders: bool = False
    "Whether the hosts share no folder, so that each has its own run directory."
    places: int | None = None
    "Number of runs of a sweep that run there at the same time, or None for as many as its GPUs allow."


def hosts_of(about: RunRecord) -> tuple[str, ...]:
    """Return the run's hosts. The first is node 0's, which holds the run directory."""
    ssh = about.cluster.ssh
    return tuple(about.hosts or (ssh.hosts[: about.nodes] if ssh is not None else ()))


def choose(
    required: Sequence[SshLogin], others: Sequence[SshLogin], about: RunRecord, remote_root: str
) -> Chosen:
    """Choose the job's hosts.

    `required` are the hosts of a resumed run. If more are needed, they are taken from `others` in order.
    All hosts are inspected in parallel. Raises SchedulerError with each host's refusals.
    """
    nodes = about.nodes
    hosts = [*required, *others] if len(required) < nodes else list(required[:nodes])
    facts, findings = _inspect(hosts, about, remote_root)
    refusals = ["\n".join(host.refusals) for host in findings]
    usable = [rank for rank, refusal in enumerate(refusals) if not refusal]
    if any(refusals[: len(required)]):
        raise HostError("\n".join(filter(None, refusals[: len(required)])))
    if len(usable) < nodes:
        head = f"{len(usable)} of {len(hosts)} hosts can take the job, which needs {nodes}:"
        reasons = "\n".join(filter(None, refusals))
        raise HostError(f"{head}\n{reasons}" if len(hosts) > nodes else reasons)
    taken = usable[:nodes]
    chosen = tuple(hosts[rank] for rank in taken)
    rendezvous, separate_folders = None, False
    if nodes > 1:
        rendezvous, separate_folders = _meet(chosen, about, remote_root, facts[taken[0]])
    notes = [warning for rank in taken for warning in findings[rank].warnings]
    if len(hosts) > nodes:
        notes.insert(
            0, _choice_note(chosen, [finding for finding in findings[: taken[-1]] if finding.refusals])
        )
    return Chosen(chosen, tuple(notes), rendezvous, separate_folders)


def distribute(
    hosts: Sequence[SshLogin], about: RunRecord, remote_root: str, tasks: int, at_once: int | None
) -> tuple[list[Chosen], tuple[str, ...]]:
    """Distribute the runs of a sweep over the hosts. Return each run's host, and notes.

    `about` is the run.json of a run that needs the most GPUs. Raises SchedulerError if no host can run it.
    """
    facts, findings = _inspect(hosts, about, remote_root)
    usable = [rank for rank in range(len(hosts)) if not findings[rank].refusals]
    refused = [refusal for finding in findings for refusal in finding.refusals]
    if not usable:
        raise HostError("\n".join(refused))
    need = about.gpus_per_node
    seats = assign_seats(
        [len(facts[rank]["gpus"]) // need if need else 1 for rank in usable], at_once or tasks
    )
    chosen = [
        Chosen((hosts[rank],), places=seats.count(seat) if at_once is not None else None)
        for seat, rank in enumerate(usable)
    ]
    per_task = [seats[task % len(seats)] for task in range(tasks)]
    counts = ", ".join(
        f"{per_task.count(seat)} on {hosts[rank].name}"
        for seat, rank in enumerate(usable)
        if seat in per_task
    )
    notes = [f"runs: {counts}"] if len(hosts) > 1 else []
    notes += [f"passed over: {refusal}" for refusal in refused]
    notes += [warning for rank in usable for warning in findings[rank].warnings]
    return [chosen[seat] for seat in per_task], tuple(notes)


def runs_that_fit(host: SshLogin, about: RunRecord, remote_root: str) -> float:
    """Return how many runs like this one fit on a host's free GPUs now; 0 if it cannot take any."""
    facts, findings = _inspect([host], about, remote_root)
    if findings[0].refusals:
        return 0
    need = about.gpus_per_node
    return sum(not gpu["busy"] for gpu in facts[0]["gpus"]) // need if need else math.inf


def assign_seats(capacities: Sequence[int], count: int) -> list[int]:
    """Assign `count` seats to hosts in turn, in proportion to how many runs each host can hold.

    `capacities` holds this number for each host, at least 1. Return the host of each seat, as an index of
    `capacities`.
    """
    order = sorted(
        (turn / capacity, host) for host, capacity in enumerate(capacities) for turn in range(capacity)
    )
    return [order[seat % len(order)][1] for seat in range(count)]


def _inspect(
    hosts: Sequence[SshLogin], about: RunRecord, remote_root: str
) -> tuple[list[Mapping[str, Any]], list[Findings]]:
    """Inspect the hosts. Return each host's answer (empty if there is none) and its findings."""
    need = Need(python_of(about), remote_root, about.gpus_per_node, waits=about.sweep is not None)
    secrets, local_values = about.job.validated().secrets, local_secrets(about)
    request = {
        "do": "look",
        "runs": remote_root,
        "gpus": need.gpus,
        "secrets": [secret.model_dump() for secret in secrets if secret.name not in local_values],
    }
    facts: list[Mapping[str, Any]] = []
    findings = []
    answers = in_parallel(lambda host: ask_host(host, need.python, request), hosts)
    for host, answer in zip(hosts, answers, strict=True):
        failed = isinstance(answer, SchedulerError)
        facts.append({} if isinstance(answer, SchedulerError) else answer)
        findings.append(Findings((str(answer),)) if failed else problems(host.name, facts[-1], need))
    return facts, findings


def _choice_note(chosen: Sequence[SshLogin], skipped: Sequence[Findings]) -> str:
    """Return a line that says which hosts were chosen and why others were skipped."""
    chosen_names = f"on {', '.join(host.name for host in chosen)}"
    why = "; ".join(refusal.removesuffix(BUSY) for finding in skipped for refusal in finding.refusals)
    return f"{chosen_names}; passed over: {why}" if why else chosen_names


def _meet(
    hosts: Sequence[SshLogin], about: RunRecord, remote_root: str, first: Mapping[str, Any]
) -> tuple[Rendezvous, bool]:
    """Return where the hosts reach the first one, and whether they share no folder. Raises HostError."""
    request = {
        "do": "meet",
        "token": tokens.token_hex(16),
        "runs": remote_root,
        "port": first["port"],
        "addresses": first["addresses"],
        "others": len(hosts) - 1,
    }

    def visit(rank: int) -> dict[str, Any]:
        return ask_host(hosts[rank], python_of(about), {**request, "rank": rank})

    visits = results_or_raise(in_parallel(visit, range(len(hosts))))[1:]
    names = [host.name for host in hosts]
    address = rendezvous_address(names, first, visits)
    return Rendezvous(address, first["port"]), separate_folders(names, visits, remote_root)


def python_of(about: RunRecord) -> str:
    return about.cluster.paths.python or DEFAULT_PYTHON


def local_secrets(about: RunRecord) -> dict[str, str]:
    """Return the secrets whose values exist on this machine.

    Raises SchedulerError for a value that cannot be passed to a process.
    """
    from launcher.supervise.secrets import SecretError, secrets_with_values

    try:
        return secrets_with_values(about.job.validated().secrets)
    except SecretError as error:
        raise SchedulerError(f"secrets: {error}") from None
