"""A job in two stages through the CLI: planned, out of memory, started again, exported."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors import safe_open

from tests.lab import Lab, events, metrics, verdicts

pytestmark = pytest.mark.e2e

JOB: dict[str, Any] = {
    "task": "launcher.tasks.gpt:PydocGPT",
    "args": {"layers": 3, "dim": 16, "heads": 2, "context": 16},
    "steps": 4,
    "train": {"checkpoint_every": None, "lr": 1e-2},
    "recipe": {"sharding": "none", "pipeline": 2, "stages": [1, 2], "micro_batch_size": 2},
}


MESHES = [
    pytest.param({}, id="pipeline 2"),
    pytest.param({"tensor": 2}, id="pipeline 2 x tensor 2", marks=pytest.mark.thorough),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_job_in_two_stages_loses_no_step_when_one_runs_out_of_memory(
    mesh: dict[str, int], lab: Lab
) -> None:
    asked = {
        **JOB,
        "recipe": {**JOB["recipe"], **mesh},
        "resources": {"gpus_per_node": 0, "ranks_per_node": 2 * mesh.get("tensor", 1)},
    }
    drill = {"TRAIN_MEMORY_FAIL": "rank=last,step=3,phase=backward,attempt=0"}
    done = lab.cli("run", str(lab.job(**asked, env=drill)))
    run = lab.newest()
    assert done.returncode == 0, done.stdout + done.stderr + lab.all_logs(run)
    assert [one["failure"] for one in verdicts(run)] == ["gpu-oom", "succeeded"]
    assert [(one["step"], one["from"]) for one in events(run, "resumed")] == [(2, "shared-memory")]
    [lower] = events(run, "downgrade")
    assert lower["reason"].startswith("micro-batch 2 -> 1, accumulation 4 -> 8; the global batch stays 8")
    assert "a stage that runs out of memory leaves its neighbours waiting" in lower["why_not_in_process"]
    assert "pipeline: 1 + 2 blocks" in lab.all_logs(run)
    disturbed = [line["loss"] for line in metrics(run)]

    assert lab.cli("run", str(lab.job(**asked))).returncode == 0
    assert disturbed == pytest.approx([line["loss"] for line in metrics(lab.newest())], rel=1e-5)

    to = lab.folder / "weights"
    assert lab.cli("export", run.id, "--to", str(to)).returncode == 0
    with safe_open(to / "model.safetensors", framework="pt") as weights:
        assert {"tokens.weight", "blocks.0.qkv.weight", "blocks.2.qkv.weight", "head.weight"} <= {
            *weights.keys()
        }
