"""Sweeps on ssh hosts: runs are dealt out to the hosts, and each waits there for GPUs and its place."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.rundir.layout import RunDir
from launcher.schedulers.ssh.choose import assign_seats
from launcher.schedulers.ssh.moves import LiveRun, next_move
from tests.lab import supervisor_pid, wait_for
from tests.schedulers.ssh.hosts import Laptop

GPU = {"type": "NVIDIA RTX A6000", "count": 2, "memory": "47.4GiB"}
SHOWS = """
import os, pathlib, time
run = pathlib.Path(os.environ["LAUNCHER_RUN_DIR"])
(run / "partial").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
(run / "partial").rename(run / "sees")
while not (run / "go").exists():
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("capacities", "seats", "hosts"),
    [
        ([2, 1], 4, [0, 1, 0, 0]),
        ([4, 2], 6, [0, 1, 0, 0, 1, 0]),
        ([1, 1, 1], 2, [0, 1]),
        ([8], 3, [0, 0, 0]),
    ],
)
def test_a_host_with_more_gpus_gets_more_runs(capacities: list[int], seats: int, hosts: list[int]) -> None:
    assert assign_seats(capacities, seats) == hosts


def hosts_of_runs(*runs: str) -> list[LiveRun]:
    """`a` is a run that goes on on host a, `a?` one that waits there, `a?2` one with two places there."""
    return [
        LiveRun(RunDir(Path(f"{number}")), text[0], "?" in text, int(text[-1]) if text[-1].isdigit() else 1)
        for number, text in enumerate(runs)
    ]


@pytest.mark.parametrize(
    ("host", "runs", "at_once", "moved", "places"),
    [
        ("b", ["a", "a?"], 2, [1], 1),  # the run that was on b has ended
        ("c", ["a", "b", "a?"], 2, [], 0),  # all places are taken
        ("c", ["b", "a?"], 2, [1], 1),  # a has no free GPU
        ("c", ["b", "a?", "a?"], 2, [1, 2], 1),  # if one stayed there, three might go on
        ("c", ["a2", "b", "a?2"], 3, [2], 1),
        ("b", ["a?", "b?"], 2, [], 0),  # what waits on b has the next place there
        ("b", ["a?9", "a?9", "a9"], math.inf, [0], math.inf),
        ("a", ["a", "a?"], 2, [], 0),
    ],
)
def test_runs_move_so_that_no_more_go_on_than_may(
    host: str, runs: list[str], at_once: float, moved: list[int], places: float
) -> None:
    living = hosts_of_runs(*runs)
    assert next_move(host, living, at_once) == ([living[number] for number in moved], places)


def sweep(laptop: Laptop, *arguments: str) -> tuple[str, list[RunDir]]:
    """Submit one. Return its id and its run directories on the hosts' disk."""
    job = laptop.job(command="python train.py", env={"N": "0"}, resources={"gpus_per_node": 1}, recipe={})
    laptop.said("submit", str(job), *arguments)
    record = laptop.newest().read_about().sweep
    assert record is not None
    sweep_id = record.id
    rows = laptop.json("sweep", "status", sweep_id)["runs"]
    return sweep_id, [laptop.on_disk(RunDir(Path(row["path"]))) for row in rows]


def sees(run: RunDir) -> str | None:
    return (run.path / "sees").read_text() if (run.path / "sees").exists() else None


@pytest.mark.slow
@pytest.mark.e2e
def test_runs_wait_on_their_host_for_gpus_and_are_resumed(laptop: Laptop) -> None:
    laptop.hosts[0].gpus(2)
    laptop.hosts[1].gpus(1)
    laptop.profile("gpus.yaml", ["tensor01", "tensor02"], node={"gpu": GPU})
    laptop.script(SHOWS)
    sweep_id, runs = sweep(laptop, "-c", "gpus.yaml", "--sweep", "env.N=1,2,3,4,5")
    hosts = [run.read_about().hosts for run in runs]
    assert hosts == [["tensor01"], ["tensor02"], ["tensor01"], ["tensor01"], ["tensor02"]]
    wait_for(lambda: all(sees(run) is not None for run in runs[:3]), "three runs")
    assert {sees(runs[0]), sees(runs[2])} == {"0", "1"} and sees(runs[1]) == "0"
    told = wait_for(lambda: [one for one in _reasons(laptop, sweep_id) if "waits for GPUs" in one], "waiting")
    assert len(told) == 2 and runs[0].id in told[0] and runs[1].id in told[1]
    os.kill(supervisor_pid(runs[1]), signal.SIGKILL)
    wait_for(lambda: sees(runs[4]) == "0", "the killed run's GPU")
    for run in runs:
        (run.path / "go").touch()
    wait_for(lambda: _states(laptop, sweep_id) == ["succeeded", "lost", *["succeeded"] * 3], "four ends")
    assert laptop.said("sweep", "resume", sweep_id).count("goes on") == 1
    wait_for(lambda: _states(laptop, sweep_id) == ["succeeded"] * 5, "five ends")
    laptop.said("clean", sweep_id, "-y")
    assert [path.name for path in laptop.runs.glob("[!.]*")] == ["sweeps"]
    assert not list((laptop.runs / "sweeps").iterdir())


@pytest.mark.e2e
def test_places_are_dealt_out_and_a_sweep_is_cancelled(laptop: Laptop) -> None:
    laptop.script(SHOWS)
    for host in laptop.hosts:
        host.gpus(2)
    laptop.profile("gpus.yaml", ["tensor01", "tensor02"], node={"gpu": GPU})
    sweep_id, runs = sweep(laptop, "-c", "gpus.yaml", "--sweep", "env.N=1,2,3,4", "--at-once", "2")
    wait_for(lambda: sees(runs[0]) and sees(runs[1]), "two runs")
    turn = "waits for its turn in the sweep (--at-once 1)"
    wait_for(lambda: [one for one in _reasons(laptop, sweep_id) if one] == [turn] * 2, "two that wait")
    (runs[1].path / "go").touch()
    wait_for(lambda: sees(runs[3]), "the next on that host")
    assert sees(runs[2]) is None
    said = laptop.said("sweep", "cancel", sweep_id)
    assert f"{sweep_id}: 1 taken out of the queue, 2 whose script is asked to stop by SIGTERM" in said
    wait_for(lambda: sorted(_states(laptop, sweep_id)) == ["cancelled"] * 3 + ["succeeded"], "the end")


@pytest.mark.slow
@pytest.mark.e2e
def test_a_waiting_run_moves_to_a_host_that_has_become_free(laptop: Laptop) -> None:
    laptop.script(SHOWS)
    for host in laptop.hosts:
        host.gpus(1)
    laptop.profile("gpus.yaml", ["tensor01", "tensor02"], node={"gpu": GPU})
    sweep_id, runs = sweep(laptop, "-c", "gpus.yaml", "--sweep", "env.N=1,2,3", "--at-once", "2")
    assert [run.read_about().hosts for run in runs] == [["tensor01"], ["tensor02"], ["tensor01"]]
    wait_for(lambda: sees(runs[0]) and sees(runs[1]), "two runs")
    waits = supervisor_pid(runs[2])
    (runs[1].path / "go").touch()
    wait_for(lambda: sees(runs[2]), "the third run on the second host")
    assert runs[2].read_about().hosts == ["tensor02"] and supervisor_pid(runs[2]) != waits
    assert _states(laptop, sweep_id) == ["running", "succeeded", "running"]
    for run in runs:
        (run.path / "go").touch()
    wait_for(lambda: _states(laptop, sweep_id) == ["succeeded"] * 3, "three ends")
    laptop.said("logs", runs[2].id)
    laptop.said("clean", sweep_id, "-y")
    assert not list((laptop.runs / "sweeps").iterdir())


FAILS = """
import sys
from pathlib import Path
from launcher.rundir.layout import RunDir
from launcher.schedulers.lookup import scheduler_of
from launcher.schedulers.ssh.hosts import HostError
from launcher.schedulers.ssh.scheduler import SshHosts
start = SshHosts._start
def fails(self, run, chosen, event):
    if chosen.hosts[0].name == "tensor02":
        raise HostError("tensor02: the disk is full")
    start(self, run, chosen, event)
SshHosts._start = fails
runs = [RunDir(Path(path)) for path in sys.argv[1:]]
try:
    print([run.id for run in scheduler_of(runs[0]).spread(runs)])
except HostError as error:
    print(error)
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_that_cannot_be_moved_waits_where_it_was(laptop: Laptop) -> None:
    laptop.script(SHOWS)
    for host in laptop.hosts:
        host.gpus(1)
    laptop.profile("gpus.yaml", ["tensor01", "tensor02"], node={"gpu": GPU})
    sweep_id, runs = sweep(laptop, "-c", "gpus.yaml", "--sweep", "env.N=1,2,3", "--at-once", "2")
    wait_for(lambda: sees(runs[0]) and sees(runs[1]), "two runs")
    copies = [row["path"] for row in laptop.json("sweep", "status", sweep_id)["runs"]]
    os.kill(int((Path(copies[0]).parent / "sweeps" / sweep_id / "queue.lock").read_text()), signal.SIGKILL)
    (runs[1].path / "go").touch()
    command = [sys.executable, "-c", FAILS, *copies]

    def spread() -> str:
        """What is said about the move; "" before the host has room."""
        done = subprocess.run(
            command, cwd=laptop.folder, env=laptop.environ, stdout=subprocess.PIPE, text=True
        )
        return done.stdout.strip().removeprefix("[]")

    assert wait_for(spread, "a host with room") == "tensor02: the disk is full"
    assert runs[2].read_about().hosts == ["tensor01"] and _states(laptop, sweep_id)[2] == "submitted"
    (runs[0].path / "go").touch()
    wait_for(lambda: sees(runs[2]), "the third run on the first host")
    (runs[2].path / "go").touch()
    wait_for(lambda: _states(laptop, sweep_id) == ["succeeded"] * 3, "three ends")


def _rows(laptop: Laptop, sweep_id: str) -> list[dict[str, str]]:
    # Its exit code is that of a run that did not succeed.
    rows: list[dict[str, str]] = json.loads(laptop.cli("sweep", "status", sweep_id, "--json").stdout)["runs"]
    return rows


def _states(laptop: Laptop, sweep_id: str) -> list[str]:
    return [row["state"] for row in _rows(laptop, sweep_id)]


def _reasons(laptop: Laptop, sweep_id: str) -> list[str]:
    return [row["reason"] for row in _rows(laptop, sweep_id)]
