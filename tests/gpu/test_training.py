"""What only a CUDA device can show. `make test-gpu` runs these."""

from __future__ import annotations

import pytest

from launcher.rundir.files import read_json_lines
from tests.lab import Lab, metrics, verdicts

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


@pytest.mark.parametrize("sharding", ["none", "ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "fp32"])
def test_one_gpu_trains_in_every_precision_and_sharding(lab: Lab, sharding: str, precision: str) -> None:
    job = gpt(lab, recipe={"sharding": sharding, "precision": precision}, train={"lr": 1e-3})
    done = lab.cli("run", str(job), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in metrics(lab.newest())]
    assert losses[-1] < losses[0]


def test_a_rank_measures_how_busy_its_gpu_is_and_what_its_peak_consists_of(lab: Lab) -> None:
    done = lab.cli("run", str(gpt(lab)), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_json_lines(lab.newest().attempt(0).memory(0))
    assert all(0 <= line["utilization"] <= 100 and line["cpu"] >= 0 for line in lines)
    [measured] = [line for line in lines if "parts" in line]
    parts = measured["parts"]
    assert measured["step"] == 2 and sum(parts.values()) == measured["peak"]
    assert parts["optimizer states"] == pytest.approx(2 * parts["parameters"], rel=0.01)


def test_a_capped_gpu_runs_out_of_memory_and_goes_on_with_a_smaller_micro_batch(lab: Lab) -> None:
    job = gpt(lab, batch={"global": 512}, env={"TRAIN_MEMORY_BUDGET": "3GiB"}, steps=4)
    done = lab.cli("run", str(job), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    failures = [verdict["failure"] for verdict in verdicts(lab.newest())]
    assert failures[-1] == "succeeded" and set(failures[:-1]) == {"gpu-oom"}
