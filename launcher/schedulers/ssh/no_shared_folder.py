"""Hosts that share no folder: each gets a copy of the submitted files and keeps its own ranks' output."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from shlex import quote

from launcher.rundir.file_table import SUBMITTED
from launcher.rundir.layout import RunDir
from launcher.schedulers.login import LoginError, why_failed
from launcher.schedulers.over_ssh.mirror import packed
from launcher.schedulers.over_ssh.remote_store import NotSentError, RemoteStore
from launcher.schedulers.over_ssh.rsh import unpack
from launcher.schedulers.ssh.choose import Chosen, hosts_of
from launcher.schedulers.ssh.hosts import HostError
from launcher.spec.records import RunRecord

_SHARED = 75
_MARK = r"""
mkdir -p {folder}/checkpoints && cd {folder} || exit 73
for f in .node-*; do
  [ "$f" = {mark} ] || [ ! -e "$f" ] || exit {shared}
done
: >{mark}
"""


def send_to_all(run: RunDir, stores: Sequence[RemoteStore]) -> None:
    """Send the run directory and the job's code to every host. Node 0 receives the run directory separately.

    The hosts come one after the other, so that two hosts that share a folder find each other's marks. Raises
    NotSentError; in that case, nothing was started.
    """
    for rank, store in enumerate(stores):
        try:
            done = _send_to(run, rank, store)
        except LoginError as error:
            raise NotSentError(str(error)) from None
        if done.returncode == _SHARED:
            raise NotSentError(
                f"{store.name} shares {store.remote_root} with another host of the job, but not with all; "
                "either all hosts must share that folder, or none"
            )
        if done.returncode:
            folder = store.path(run, run.path)
            raise NotSentError(f"{store.name}: {folder} could not be written: {why_failed(done)}")


def _send_to(run: RunDir, rank: int, store: RemoteStore) -> subprocess.CompletedProcess[bytes]:
    folder = quote(store.path(run, run.path))
    script = _MARK.format(folder=folder, mark=f".node-{rank:02d}", shared=_SHARED)
    if rank == 0:
        return store.run(script)
    parcel = packed(run.path, SUBMITTED)
    script += f"rm -rf plans scripts && {unpack(len(parcel), '.')}"
    return store.deliver([run], (), lambda: store.run(script, stdin=parcel), copied=False)


def notes(hosts: Sequence[str], about: RunRecord) -> tuple[str, ...]:
    """Return what the user must know if the hosts share no folder."""
    names = ", ".join(hosts)
    lines = [f"{names} share no folder: each keeps its ranks' part of the checkpoints in its own paths.runs"]
    if about.job.task is None:
        lines.append(
            f"files that the command writes stay on their host: {names} each have their own "
            "{checkpoint_dir}, and a rank that resumes finds only what was written on its own host"
        )
    return tuple(lines)


def check_resume(run: RunDir, hosts: Sequence[str], about: RunRecord, chosen: Chosen) -> None:
    """Check a run before it is resumed. Raises HostError if its checkpoints would not be found."""
    apart = run.read_about().apart
    names = ", ".join(hosts)
    if apart and about.nodes != len(hosts):
        raise HostError(
            f"{run.id} has run on {names}, which share no folder: each has a part of the checkpoints, so the "
            f"run can continue only with {len(hosts)} nodes"
        )
    if apart and not chosen.separate_folders:
        raise HostError(
            f"{run.id} began when {names} each had their own paths.runs, and now they share one: each host "
            "must find its own part of the checkpoints there"
        )
    if chosen.separate_folders and not apart:
        others = ", ".join(host.name for host in chosen.hosts[1:])
        raise HostError(
            f"{others}: paths.runs is not shared with {chosen.hosts[0].name}, which holds the checkpoints of "
            f"{run.id}; the run can continue on hosts that share that folder, or on that host alone"
        )


def hosts_with_directory(about: RunRecord) -> Sequence[str]:
    """Return the hosts that hold a directory of the run."""
    hosts = hosts_of(about)
    return hosts if about.apart else hosts[:1]
