"""Hosts that share no folder: each gets a copy of what a submission writes, and keeps its own ranks'
output."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.rundir.contents import SUBMITTED
from launcher.rundir.layout import RunDir
from launcher.schedulers.over_ssh.login import LoginError
from launcher.schedulers.over_ssh.mirror import packed
from launcher.schedulers.over_ssh.remote_store import NotSentError
from launcher.schedulers.over_ssh.rsh import quote
from launcher.schedulers.ssh.hosts import HostError

if TYPE_CHECKING:
    from launcher.schedulers.over_ssh.remote_store import RemoteStore
    from launcher.schedulers.ssh.choose import About, Chosen

_SHARED = 75
_MARK = r"""
mkdir -p {folder}/checkpoints && cd {folder} || exit 73
for f in .node-*; do
  [ "$f" = {mark} ] || [ ! -e "$f" ] || exit {shared}
done
: >{mark}
"""


def bring(run: RunDir, there: str, hosts: Sequence[RemoteStore]) -> None:
    """Send the run directory and the job's code to every host; the first one's run directory is already on
    its way.

    The hosts are handled one after the other, so that two that share a folder find each other's mark. Raises
    NotSentError; then nothing was started.
    """
    for rank, store in enumerate(hosts):
        try:
            done = _bring(run, there, rank, store)
        except LoginError as error:
            raise NotSentError(str(error)) from None
        if done.returncode == _SHARED:
            raise NotSentError(
                f"{store.name} has {there} in common with another host of the job, and not with all; "
                "all of them share that folder, or none does"
            )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            why = said[-1] if said else f"exit code {done.returncode}"
            raise NotSentError(f"{store.name}: {there}/{run.id} could not be written: {why}")


def _bring(run: RunDir, there: str, rank: int, store: RemoteStore) -> subprocess.CompletedProcess[bytes]:
    script = _MARK.format(folder=quote(f"{there}/{run.id}"), mark=f".node-{rank:02d}", shared=_SHARED)
    if rank == 0:
        return store.run(script)
    script += "rm -rf plans scripts && tar -xf -"
    parcel = packed(run.path, SUBMITTED)
    return store.deliver([run], (), lambda: store.run(script, stdin=parcel), copied=False)


def notes(hosts: Sequence[str], about: About) -> tuple[str, ...]:
    """What is different for the user if the hosts share no folder."""
    names = ", ".join(hosts)
    found = [f"{names} share no folder: each keeps its ranks' part of the checkpoints in its own paths.runs"]
    if about["job"].get("task") is None:
        found.append(
            f"what the command writes stays on its host: {names} have a {{checkpoint_dir}} each, and a rank "
            "that goes on from a checkpoint finds what was written on its own host only"
        )
    return tuple(found)


def check_again(run: RunDir, own: Sequence[str], about: About, chosen: Chosen) -> None:
    """Check a run before it is resumed. Raises HostError if its checkpoints would not be found."""
    before = run.read_about()
    names = ", ".join(own)
    if before.get("apart") and about["nodes"] != len(own):
        raise HostError(
            f"{run.id} has run on {names}, which share no folder: each has a part of the checkpoints, so it "
            f"goes on with {len(own)} nodes only"
        )
    if before.get("apart") and not chosen.apart:
        raise HostError(
            f"{run.id} began when {names} had a paths.runs each, and now they share one: each host must find "
            "its own part of the checkpoints there"
        )
    if chosen.apart and not before.get("apart"):
        others = ", ".join(host.name for host in chosen.hosts[1:])
        raise HostError(
            f"{others}: what {chosen.hosts[0].name} writes into paths.runs is not there, and the checkpoints "
            f"of {run.id} are; it goes on where its hosts share that folder, or on that host alone"
        )


def where_it_lies(about: About, hosts: Sequence[str]) -> Sequence[str]:
    """The hosts that hold a directory of the run."""
    return hosts if about.get("apart") else hosts[:1]
