"""Two hosts that share no folder, through the real CLI and real ssh: each sees a disk of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rundir.layout import RunDir
from launcher.supervise.process import end_processes, processes_of
from tests.lab import events, metrics, verdicts, wait_for
from tests.schedulers.ssh.hosts import Laptop
from tests.schedulers.ssh.test_runs import CANARY, STEPS, job
from tests.schedulers.ssh.test_sweeps import GPU, SHOWS, sees, sweep

pytestmark = pytest.mark.e2e

SPACE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]


class Apart(Laptop):
    """`paths.runs` is the same on both hosts, and on each another folder: of its own mount namespace."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / ".gitignore").write_text("disk*/\nstate/\ncache/\nconfig/\nweights*/\n")
        self.disk.mkdir()
        self.disks = [folder / f"disk-{host.name}" for host in self.hosts]
        for host, disk in zip(self.hosts, self.disks, strict=True):
            disk.mkdir()
            inside = host.folder / "inside"
            inside.write_text(
                f'#!/bin/sh\nmount --bind {disk} {self.disk} && exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
            )
            inside.chmod(0o755)
            before = host.sshd.shell.read_text().partition("\n")[2]
            started = 'exec sh -c "$SSH_ORIGINAL_COMMAND"'
            assert started in before
            host.sshd.login_shell(before.strip().replace(started, f"exec {' '.join(SPACE)} {inside}"))

    def on_disk(self, run: RunDir, node: int = 0) -> RunDir:
        return RunDir(self.disks[node] / "runs" / run.id)

    def on_host(self, node: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = f"cd / && {sys.executable} -m launcher {' '.join(arguments)}"
        return subprocess.run(
            ["ssh", self.hosts[node].name, command], env=self.environ, capture_output=True, text=True
        )

    def close(self) -> None:
        for disk in self.disks:
            for lock in disk.glob("runs/*/supervisor*.lock"):
                end_processes(lambda path=lock.parent: processes_of(self.runs / path.name), grace=0)
        super().close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Apart]:
    if shutil.which("unshare") is None or subprocess.run([*SPACE, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace of one's own can be made here")
    lab = Apart(tmp_path)
    lab.environ["TOKEN"] = CANARY
    try:
        yield lab
    finally:
        lab.close()


@pytest.mark.thorough
def test_a_run_on_hosts_that_share_no_folder(lab: Apart) -> None:
    """Restarted when memory runs out, cancelled, resumed, exported, and deleted on both."""
    file = job(lab, "apart", 0.4, sharding="ddp", nodes=2, ranks_per_node=1)
    said = lab.said("submit", file, "-c", "both.yaml")
    assert "tensor01, tensor02 share no folder" in said.replace("\n", " ")
    run = lab.newest()
    here, there = lab.on_disk(run), lab.on_disk(run, 1)
    assert run.read_about().apart is True and not (lab.disk / "runs").exists()
    assert (there.path / "scripts/start.sh").read_bytes() == (here.path / "scripts/start.sh").read_bytes()
    wait_for(lambda: len(metrics(here)) > 5, "some steps")
    lab.said("cancel", run.id)
    cancelled = lab.wait(run)
    step = cancelled["checkpoint_step"]
    assert cancelled["state"] == "cancelled" and 3 <= step < STEPS, lab.all_logs(here)
    # Rank 1's memory ran out in step 3, on the other host: all of it is known here.
    assert [(one["failure"], one["node"]) for one in verdicts(run)] == [("gpu-oom", 1), ("cancelled", None)]
    assert "micro-batch 4 -> 2" in lab.said("why", run.id)
    assert f"token of {len(CANARY)}" in lab.said("logs", run.id, "--node", "1")
    for node in (here, there):
        assert (node.checkpoints / f"step-{step:08d}" / "complete.json").exists()
    refused = lab.said(
        "resume", run.id, "--set", "resources.nodes=1", "--set", "resources.ranks_per_node=2", code=4
    )
    assert "so the run can continue only with 2 nodes" in refused.replace("\n", " ")
    followed = lab.said("resume", run.id, "--follow")
    assert f"{run.id}: succeeded" in followed, lab.all_logs(here)
    assert [event["step"] for event in events(run, "resumed")][-1] == step
    assert sorted({line["step"] for line in metrics(here)}) == list(range(1, STEPS + 1))
    to = lab.folder / "weights"
    done = lab.on_host(0, "export", str(lab.runs / run.id), "--to", str(to), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.index("{") :])["step"] == STEPS
    lab.said("clean", run.id, "--yes")
    assert not here.path.exists() and not there.path.exists() and not run.path.exists()


@pytest.mark.thorough
def test_hosts_of_which_only_some_share_the_folder_are_refused(lab: Apart) -> None:
    """The first one sees neither's notes, and only their marks tell that the other two have one folder."""
    third = lab.hosts[1]
    (lab.home / "config").write_text(
        (lab.home / "config").read_text()
        + (third.folder / "config").read_text().replace("Host tensor02", "Host tensor03")
    )
    lab.profile("three.yaml", ("tensor01", "tensor02", "tensor03"))
    file = job(lab, "three", 0, nodes=3, ranks_per_node=1)
    said = lab.said("submit", file, "-c", "three.yaml", "--set", "batch.global=12", code=4)
    flat = said.replace("\n", " ")
    assert "tensor03 shares " in flat and "either all hosts must share that folder, or none" in flat
    assert lab.said("list", "--json") == "[]\n"
    assert not [path for disk in lab.disks for path in disk.glob("runs/[!.]*")]


@pytest.mark.slow
def test_a_waiting_run_of_a_sweep_moves_to_a_host_that_had_none_of_it(lab: Apart) -> None:
    lab.script(SHOWS)
    lab.hosts[0].gpus(1)
    lab.profile("gpus.yaml", ["tensor01", "tensor02"], node={"gpu": GPU})
    sweep_id, runs = sweep(lab, "-c", "gpus.yaml", "--sweep", "env.N=1,2")
    assert [run.read_about().hosts for run in runs] == [["tensor01"]] * 2, "tensor02 has no GPU"
    wait_for(lambda: sees(runs[0]), "the first run")
    lab.hosts[1].gpus(1)
    moved = lab.on_disk(runs[1], 1)
    wait_for(lambda: sees(moved), "the second run on the other host")
    assert not runs[1].path.exists()
    for run in (runs[0], moved):
        (run.path / "go").touch()
    wait_for(
        lambda: [row["state"] for row in lab.json("sweep", "status", sweep_id)["runs"]] == ["succeeded"] * 2,
        "two ends",
    )
    lab.said("clean", sweep_id, "-y")
    assert not [*lab.disks[1].glob("runs/sweeps/*"), *lab.disks[1].glob(f"runs/{sweep_id}*")]
