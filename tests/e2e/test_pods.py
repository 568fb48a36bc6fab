"""Runs on the sandbox through the real CLI: real pods' scripts, real supervisors, real ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.rundir.layout import RunDir
from tests.lab import Lab, events, metrics, verdicts, wait_for
from tests.sandbox.server import Sandbox, start

pytestmark = pytest.mark.e2e

THOROUGH = pytest.mark.thorough  # test_runs.py of schedulers/runpod tries the like with a few lines of shell
FAULTY = Path(__file__).with_name("faults.py")
SLOW = {"layers": 4, "dim": 96, "heads": 4, "context": 128}
SHORT = {"command": ["sh", "-c", "echo hello from $LAUNCHER_RUN_ID"], "resources": {"gpus_per_node": 0}}
# Steps that are slow enough to be taken away in the middle, and a checkpoint for each.
COUNTS = """\
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
file = place / "step"
begun = step = int(file.read_text()) if file.exists() else 0
print("begins at", step, flush=True)
while step < 12:
    if begun == 0 and step == 3:
        time.sleep(3600)  # until the pod is taken away
    step += 1
    (place / "new").write_text(str(step)); os.replace(place / "new", file)
print("done", step, flush=True)
"""
MEET = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("met", int(total), "from node", os.environ["GROUP_RANK"], flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with start(tmp_path_factory.mktemp("runpod") / "sandbox") as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared: Sandbox, lab: Lab) -> Iterator[Sandbox]:
    lab.environ |= shared.environ
    yield shared
    shared.faults()
    for pod in shared.state()["live"]:
        shared.ask("DELETE", f"/clusters/{pod['cluster']}" if pod["cluster"] else f"/pods/{pod['id']}")
    wait_for(lambda: not shared.processes(), "end of every pod")


def profile(sandbox: Sandbox, lab: Lab, **runpod: Any) -> str:
    found = YAML().load((sandbox.folder / "runpod-sandbox.yaml").read_text())
    found["runpod"].update(runpod)
    file = lab.folder / "pods.yaml"
    YAML().dump(found, file)
    return str(file)


def pods_of(sandbox: Sandbox, run: RunDir) -> list[dict[str, Any]]:
    """All that were ever made for it."""
    state = sandbox.state()
    return [pod for pod in [*state["live"], *state["gone"]] if run.id in pod["name"]]


def ended(sandbox: Sandbox, run: RunDir) -> bool:
    return all(pod["status"] == "TERMINATED" for pod in pods_of(sandbox, run))


def losses(run: RunDir) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}


def submit(lab: Lab, job: Path, cluster: str, *more: str) -> RunDir:
    done = lab.cli("submit", str(job), "-c", cluster, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return lab.newest()


@pytest.mark.slow
def test_a_job_runs_out_of_memory_goes_on_smaller_and_ends_its_pod(sandbox: Sandbox, lab: Lab) -> None:
    shutil.copy(FAULTY, lab.folder / "faults.py")  # the job's own code travels to the pod
    job = lab.job(
        task="faults:Faulty", args={"faults": [[0, 1, "backward", 3]]}, steps=6, batch={"global": 32},
        train={"checkpoint_every": 3, "lr": 1e-2, "probe": "never"},
        recipe={"sharding": "ddp", "precision": "fp32", "micro_batch_size": 16},
    )  # fmt: skip
    run = submit(lab, job, profile(sandbox, lab))
    assert lab.wait(run)["state"] == "succeeded", (run.path / "pod-node-0.log").read_text()
    failures = [verdict["failure"] for verdict in verdicts(run)]
    assert failures == ["gpu-oom", "succeeded"]
    sizes = [event["recipe"]["micro_batch_size"] for event in events(run, "attempt")]
    assert sizes[0] == 16 > sizes[1]
    assert sorted(losses(run)) in (list(range(6)), list(range(1, 7))), "each optimizer step once"
    wait_for(lambda: ended(sandbox, run), "end of the pod by itself")
    (pod,) = pods_of(sandbox, run)
    assert pod["starts"] == 1, "the script never returned"
    assert "gpu-oom" in lab.cli("why", run.id).stdout
    lab.cli("logs", run.id)
    there = sandbox.volume / "runs" / run.id
    assert (there / "checkpoints" / "step-00000006").is_dir(), "results stay on the volume"
    records = sandbox.ask("GET", f"/billing/pods?podId={pod['id']}").json()
    assert records["metadata"]["totals"]["totalAmount"] > 0
    for file in [*run.path.rglob("*"), *there.rglob("*")]:
        if file.is_file():
            content = file.read_bytes()
            for name in ("RUNPOD_API_KEY", "RUNPOD_S3_SECRET_KEY"):
                assert sandbox.environ[name].encode() not in content, file


@pytest.mark.slow
@THOROUGH
def test_a_cancelled_run_writes_a_checkpoint_and_is_resumed_on_a_new_pod(sandbox: Sandbox, lab: Lab) -> None:
    job = lab.job(
        task="launcher.tasks.gpt:PydocGPT", args=SLOW, steps=240, train={"checkpoint_every": 40, "lr": 1e-3},
        recipe={"sharding": "ddp", "precision": "fp32"},
    )  # fmt: skip
    run = submit(lab, job, profile(sandbox, lab))
    wait_for(lambda: lab.status(run) and len(metrics(run)) > 3, "a few steps")
    done = lab.cli("cancel", run.id)
    assert done.returncode == 0, done.stderr
    assert lab.wait(run)["state"] in ("cancelled", "interrupted")
    wait_for(lambda: ended(sandbox, run), "end of the pod")
    steps = max(losses(run))
    resumed = lab.cli("resume", run.id)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert lab.wait(run, "succeeded", "failed", "lost")["state"] == "succeeded", lab.all_logs(run)
    assert max(losses(run)) >= 239 > steps and events(run, "resumed")
    assert len(pods_of(sandbox, run)) == 2
    wait_for(lambda: ended(sandbox, run), "end of the pod")


@pytest.mark.slow
@THOROUGH
def test_a_spot_pod_is_taken_away_and_a_new_one_goes_on(sandbox: Sandbox, lab: Lab) -> None:
    lab.script(COUNTS)
    job = lab.job(
        command=["python", "train.py", "{checkpoint_dir}"], resources={"gpus_per_node": 1},
        recipe={"sharding": "none", "micro_batch_size": 8},
    )  # fmt: skip
    run = submit(lab, job, profile(sandbox, lab, bid_per_gpu=0.2))
    (first,) = pods_of(sandbox, run)
    assert first["interruptible"] and first["price"] == 0.2
    step = sandbox.volume / "runs" / run.id / "checkpoints" / "step"
    wait_for(lambda: step.exists() and int(step.read_text()) == 3, "steps")
    sandbox.interrupt(first["id"])
    assert lab.wait(run, "succeeded", "failed", "lost")["state"] == "succeeded", lab.all_logs(run)
    shown = lab.cli("logs", run.id).stdout
    assert "begins at 0" in shown and "begins at 3" in shown and "done 12" in shown
    assert len(pods_of(sandbox, run)) == 2
    wait_for(lambda: ended(sandbox, run), "end of both pods")


@pytest.mark.slow
@THOROUGH
def test_two_nodes_of_a_cluster_meet_and_end_together(sandbox: Sandbox, lab: Lab) -> None:
    """The first node gives the others half a minute before it ends the cluster."""
    lab.script(MEET)
    job = lab.job(
        command=["python", "train.py"], resources={"nodes": 2, "gpus_per_node": 1},
        recipe={"sharding": "ddp", "micro_batch_size": 4},
    )  # fmt: skip
    run = submit(lab, job, profile(sandbox, lab))
    assert lab.wait(run)["state"] == "succeeded", lab.all_logs(run)
    shown = lab.cli("logs", run.id).stdout
    assert "met 2 from node 0" in shown and "met 2 from node 1" in shown
    assert len(pods_of(sandbox, run)) == 2
    wait_for(lambda: ended(sandbox, run), "end of the cluster")


@pytest.mark.slow
@THOROUGH
@pytest.mark.parametrize("fault", ["lost-response", "gateway-timeout", "wrong-types", "not-json"])
def test_an_answer_lost_after_creation_costs_no_second_pod(sandbox: Sandbox, lab: Lab, fault: str) -> None:
    sandbox.faults(
        **{fault: {"p": 1, "times": 1, "on": "POST /(v2/pods|graphql)"}},
        unlisted={"p": 1, "times": 1, "value": 0.2},
    )
    run = submit(lab, lab.job(**SHORT), profile(sandbox, lab))
    assert sandbox.state()["fell"] == {fault: 1, "unlisted": 1}
    assert len(pods_of(sandbox, run)) == 1
    assert lab.wait(run)["state"] == "succeeded"
    assert f"hello from {run.id}" in lab.cli("logs", run.id).stdout
    wait_for(lambda: ended(sandbox, run), "end of the pod")


@pytest.mark.slow
@THOROUGH
def test_a_pod_that_costs_more_than_the_limit_is_ended_at_once(sandbox: Sandbox, lab: Lab) -> None:
    sandbox.faults(price=1)
    done = lab.cli("submit", str(lab.job(**SHORT)), "-c", profile(sandbox, lab), "--max-price", "0.2")
    assert done.returncode == 4 and "limit" in done.stderr, done.stdout + done.stderr
    state = sandbox.state()
    assert state["live"] == [] and len(state["gone"]) >= 1 and state["fell"]["price"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("no-capacity", "no longer any instances"),
        pytest.param("redirect", "redirect, which", marks=THOROUGH),
        pytest.param("no-balance", "credit", marks=THOROUGH),
        pytest.param("huge-body", "large", marks=THOROUGH),
        pytest.param("forbidden", "denied", marks=THOROUGH),
    ],
)
def test_a_refusal_is_one_clear_message_and_leaves_nothing(
    sandbox: Sandbox, lab: Lab, fault: str, word: str
) -> None:
    hostile = fault in ("redirect", "huge-body")  # there may be a pod
    sandbox.faults(**{fault: {"p": 1, "on": "/(v2/pods|graphql)" if hostile else None}})
    done = lab.cli("submit", str(lab.job(**SHORT)), "-c", profile(sandbox, lab))
    assert done.returncode == (5 if hostile else 4) and word in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) < 3000
    sandbox.faults()
    if fault == "huge-body":  # the pod is there, and found by its name
        wait_for(lambda: lab.status(lab.newest())["state"] == "succeeded", "the run")
        wait_for(lambda: not sandbox.state()["live"], "end of the pod")
    assert sandbox.state()["live"] == []
    if not hostile:
        assert json.loads(lab.cli("list", "--json").stdout) == []
