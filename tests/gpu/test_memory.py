"""Memory, MFU and snapshots as a CUDA device has them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from launcher.rundir.files import read_json_lines
from tests.lab import Lab, events, metrics

pytestmark = pytest.mark.gpu


def gpt(lab: Lab, **fields):
    base = {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 4, "dim": 256, "heads": 4, "context": 256},
        "batch": {"global": 64},
        "resources": {"gpus_per_node": 1},
        "recipe": {"sharding": "none", "precision": "bf16-mixed"},
        "steps": 20,
    }
    return lab.job(**{**base, **fields})


def test_memory_of_the_gpu_is_written_and_alerts(lab: Lab) -> None:
    import torch

    from launcher.planning.hardware import peak_flops

    done = lab.cli("run", str(gpt(lab, train={"memory_alert": "1MiB"})), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    for line in read_json_lines(run.attempt(0).memory(0)):
        assert 0 < line["allocated"] <= line["peak"] and line["allocated"] <= line["reserved"]
        assert line["num_alloc_retries"] == line["num_ooms"] == 0
    assert [event["step"] for event in events(run, "memory-alert")] == [1]
    known = peak_flops(torch.cuda.get_device_name(0)) is not None
    assert all(("mfu" in line) == known for line in metrics(run))
    assert all(0 < line["mfu"] < 1 for line in metrics(run) if "mfu" in line)


@pytest.mark.parametrize("recorded", [False, True])
def test_out_of_memory_leaves_pytorchs_snapshot(lab: Lab, recorded: bool) -> None:
    job = gpt(
        lab, batch={"global": 512}, env={"TRAIN_MEMORY_BUDGET": "3GiB"}, steps=2,
        recipe={"sharding": "none", "precision": "bf16-mixed", "micro_batch_size": 512},
        train={"record_memory": recorded}, retries={"lower": 0},
    )  # fmt: skip
    lab.cli("run", str(job), timeout=240)
    run = lab.newest()
    failure = json.loads(run.attempt(0).error(0).read_text())
    assert failure["failure"] == "gpu-oom"
    snapshot = pickle.loads(Path(failure["memory"]["snapshot"]).read_bytes())
    assert snapshot["segments"]
    assert any(snapshot["device_traces"]) == recorded


def test_a_snapshot_on_demand_records_one_step(lab: Lab) -> None:
    from tests.lab import wait_for

    run = lab.submit(str(gpt(lab, steps=100000, train={"checkpoint_every": None})))
    wait_for(lambda: len(metrics(run)) > 3, "some steps", 120)
    assert lab.cli("snapshot", run.id).returncode == 0
    [event] = wait_for(lambda: events(run, "memory-snapshot"), "snapshot", 60)
    snapshot = pickle.loads(Path(event["path"]).read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
    lab.cli("cancel", run.id)
    lab.wait(run)
