"""Of several hosts those are taken that have room; the run directory lies where the run began."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.ssh.choose import choose
from launcher.spec.load import load_job
from launcher.spec.records import RunRecord
from tests.lab import events, wait_for
from tests.schedulers.ssh.hosts import NAMES, Laptop

GPU = {"type": "NVIDIA RTX A6000", "count": 1, "memory": "47.4GiB"}
ONE_GPU = {"gpus_per_node": 1, "nodes": 1}
WAITS = """
import os, pathlib, time
print("sees", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
while not (pathlib.Path(os.environ["LAUNCHER_RUN_DIR"]) / "go").exists():
    time.sleep(0.1)
"""


def lab_of(laptop: Laptop, gpu: Any = GPU) -> str:
    """Two hosts with a GPU each; gives the job."""
    for host in laptop.hosts:
        host.gpus(1)
    laptop.profile("lab.yaml", NAMES, node={"gpu": gpu})
    laptop.script(WAITS)
    return str(laptop.job("job.yaml", command="python train.py", resources=ONE_GPU))


@pytest.mark.slow
@pytest.mark.e2e
def test_a_busy_host_is_passed_over_and_every_verb_finds_the_run_on_the_next(laptop: Laptop) -> None:
    job = lab_of(laptop, "auto")
    first, second = laptop.hosts
    first.busy(0, pid=os.getpid())
    said = laptop.said("submit", job, "-c", "lab.yaml")
    note = " ".join(said.split())
    assert "on tensor02; passed over: tensor01: 0 of 1 GPUs are free, the job needs 1 (GPU 0: python" in note
    run = laptop.newest()
    there = laptop.on_disk(run)
    first.sshd.stop()
    wait_for(lambda: "sees 0" in laptop.said("logs", run.id), "line of the rank")
    assert laptop.status(run)["state"] == "running" and "running" in laptop.said("list")
    assert f"tensor02:{there.path}" in laptop.said("status", run.id).replace("\n", "")
    assert json.loads((there.path / "run.json").read_text())["hosts"] == ["tensor02"]
    assert events(run, "submitted")[0]["gpus"] == {"tensor02": [0]}
    gpu = run.read_about().cluster.validated().node.gpu
    assert gpu is not None
    assert (gpu.type, gpu.count, gpu.memory) == ("NVIDIA RTX A6000", 1, 49140 * 2**20), "as it said"
    laptop.said("cancel", run.id)
    assert laptop.wait(run)["state"] == "cancelled"
    # Its checkpoints are on the second host: the first one's GPU is of no use to it.
    first.sshd.start()
    first.gpus(1)
    second.busy(0, pid=os.getpid())
    refused = laptop.said("resume", run.id, code=4)
    assert "tensor02: 0 of 1 GPUs are free" in refused and "tensor01" not in refused
    assert laptop.status(run)["state"] == "cancelled"
    second.gpus(1)
    (there.path / "go").touch()
    followed = laptop.said("resume", run.id, "--set", "env.MOOD=better", "--follow")
    assert f"{run.id}: succeeded" in followed, laptop.all_logs(there)
    assert events(run, "resubmitted")[0]["gpus"] == {"tensor02": [0]}
    assert [one["id"] for one in _mirrored(laptop)] == [run.id], "one copy, of the second host"
    laptop.said("clean", run.id, "--yes")
    assert not run.path.exists() and not there.path.exists()


def _mirrored(laptop: Laptop) -> list[dict[str, Any]]:
    files = (laptop.folder / "state/launcher/mirrors").glob("tensor02-*/*/run.json")
    return [json.loads(file.read_text()) for file in files]


def test_where_too_few_hosts_are_left_each_ones_reason_is_said(laptop: Laptop) -> None:
    job = lab_of(laptop)
    laptop.hosts[0].busy(0, pid=os.getpid())
    laptop.hosts[1].sshd.stop()
    said = laptop.said("submit", job, "-c", "lab.yaml", code=4)
    laptop.hosts[1].sshd.start()
    assert "0 of 2 hosts can take the job, which needs 1:" in said
    assert "tensor01: 0 of 1 GPUs are free, the job needs 1 (GPU 0: python (process" in said
    assert "wait, or ask for fewer with resources.gpus_per_node" in said
    assert "cannot log in to tensor02: " in said
    assert laptop.said("list", "--json") == "[]\n" and not list(laptop.runs.glob("[!.]*"))


def test_a_run_that_goes_on_with_more_hosts_keeps_its_own_as_the_first(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in laptop.environ.items():
        monkeypatch.setenv(name, value)
    job = load_job(laptop.job(command="true")).model_dump(mode="json", by_alias=True)
    paths = {"python": sys.executable}
    about = RunRecord(nodes=2, cluster={"paths": paths}, job=job)
    first, second = map(SshLogin, NAMES)
    assert choose([second], [first], about, str(laptop.runs)).hosts == (second, first)
    chosen = choose([second, first], [], about.replace(nodes=1), str(laptop.runs))
    assert chosen.hosts == (second,) and chosen.notes == ()


def test_hosts_with_different_gpus_are_not_guessed_at(laptop: Laptop) -> None:
    job = lab_of(laptop, "auto")
    laptop.hosts[1].gpus(2)
    said = laptop.said("submit", job, "-c", "lab.yaml", code=4)
    assert "node.gpu: auto: the hosts of lab have different GPUs (tensor01: 1 x NVIDIA RTX A6000; " in said
    assert "tensor02: 2 x NVIDIA RTX A6000); write node.gpu into the profile" in said
    gpus = laptop.hosts[0].programs / "gpus"
    gpus.write_text(gpus.read_text().replace("49140", "[N/A]"))
    laptop.profile("lab.yaml", NAMES[:1])
    said = laptop.said("submit", job, "-c", "lab.yaml", code=4)
    assert "tensor01 has NVIDIA RTX A6000 with unknown memory; write node.gpu into" in said


def test_what_hosts_without_a_batch_system_cannot_do_is_refused_before_anybody_asks_them(
    laptop: Laptop,
) -> None:
    job = lab_of(laptop)
    two = ("--set", "resources.nodes=2")
    said = laptop.said("submit", job, "-c", "lab.yaml", "--sweep", "env.LR=1,2", *two, code=4)
    assert "--sweep: a run that needs several ssh hosts cannot wait for GPUs" in said
    assert "launcher run JOB -c CLUSTER --set FIELD=VALUE" in said
    container = {"runtime": "docker", "image": "a/b"}
    laptop.profile("boxed.yaml", NAMES, node={"gpu": GPU}, container=container)
    said = laptop.said("submit", job, "-c", "boxed.yaml", code=2)
    assert "container.runtime docker: scheduler ssh starts no container" in said
    job = str(laptop.job("job.yaml", command="python train.py", resources=ONE_GPU, image="a/b"))
    shown = laptop.said("submit", job, "-c", "lab.yaml", "--dry-run")
    assert "image a/b: not used, since container.runtime of the profile is none" in shown
    assert "ssh 'tensor01|tensor02' " in shown
    assert [host.sshd.sessions for host in laptop.hosts] == [0, 0] and not laptop.runs.exists()
