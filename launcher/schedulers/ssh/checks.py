"""Check what a host reports against the job, before anything is started there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher import __version__
from launcher.schedulers.base import Findings
from launcher.schedulers.ssh.hosts import HostError
from launcher.supervise.gpus import InstalledGpu, short_of

_INSTALL = "in launcher's checkout there: {python} -m pip install '.[train]'"
BUSY = "; wait, or ask for fewer with resources.gpus_per_node"


@dataclass(frozen=True)
class Need:
    """What a job needs on each of its hosts."""

    python: str
    runs: str
    gpus: int
    waits: bool = False
    "Whether the run waits on its host until GPUs are free."


def problems(host: str, facts: Mapping[str, Any], need: Need) -> Findings:
    """Check one host. `facts` is the answer of on_host.look."""
    refusals, warnings = [], []
    if facts["launcher"] is None:
        refusals.append(f"{need.python} on the host has no launcher: {_INSTALL.format(python=need.python)}")
    elif facts["launcher"] not in ("", __version__):
        warnings.append(f"launcher {facts['launcher']} there, {__version__} here; install the same one")
    if not facts["torch"]:
        refusals.append(f"{need.python} on the host has no torch: {_INSTALL.format(python=need.python)}")
    if facts["runs"]:
        refusals.append(f"paths.runs: {need.runs} is not writable ({facts['runs']})")
    if facts["tools"]:
        refusals.append(f"these programs are missing: {', '.join(facts['tools'])}")
    refusals += [
        f"secrets: {name} has no value here nor on the host ({why}): export it here, or name a `file:`"
        for name, _, why in (secret.partition(": ") for secret in facts["secrets"])
    ]
    gpus = [InstalledGpu(**gpu) for gpu in facts["gpus"]]
    if need.waits:
        gpus = [replace(gpu, busy="") for gpu in gpus]
    if need.gpus and facts["gpus_trouble"]:
        refusals.append(facts["gpus_trouble"])
    elif need.gpus and (short := short_of(gpus, need.gpus)):
        refusals.append(f"{short}{BUSY}")
    if facts["ends_at_logout"]:
        warnings.append(
            "systemd-logind kills your processes when your last session closes, so the run would end with "
            "the connection; ask the administrator for KillUserProcesses=no in /etc/systemd/logind.conf"
        )
    return Findings(
        tuple(f"{host}: {refusal}" for refusal in refusals),
        tuple(f"{host}: {warning}" for warning in warnings),
    )


def separate_folders(hosts: Sequence[str], visits: Sequence[Mapping[str, Any]], runs: str) -> bool:
    """Return whether each host has its own folder `runs`. Raises HostError if only some hosts share it.

    `visits` holds the answers of `meet` from all hosts but the first.
    """
    without = [host for host, visit in zip(hosts[1:], visits, strict=True) if not visit["shared"]]
    if without and len(without) < len(visits):
        sharing = [host for host in hosts if host not in without]
        raise HostError(
            f"{', '.join(without)}: files that {hosts[0]} writes into paths.runs ({runs}) are missing there, "
            f"while {', '.join(sharing)} share the folder; all hosts of a job must share it, or none"
        )
    return bool(without)


def rendezvous_address(
    hosts: Sequence[str], facts: Mapping[str, Any], visits: Sequence[Mapping[str, Any]]
) -> str:
    """Return the address at which all other hosts reach the first one.

    `facts` is the first host's answer to `look`; `visits` holds the others' answers to `meet`. Raises
    HostError if there is no such address.
    """
    for address in facts["addresses"]:
        if all(address in visit["reached"] for visit in visits):
            return str(address)
    unreachable = [host for host, visit in zip(hosts[1:], visits, strict=True) if not visit["reached"]]
    tried = ", ".join(facts["addresses"]) or "none that other hosts can use"
    raise HostError(
        f"{', '.join(unreachable or hosts[1:])} cannot reach {hosts[0]} at port {facts['port']} (its "
        f"addresses: {tried}); open the ports from 61000 to 65535 between the hosts"
    )
