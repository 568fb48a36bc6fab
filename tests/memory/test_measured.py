"""The estimate against runs on a GPU, as benchmarks/results has them: peaks that a trace once had wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.files import read_json_lines
from launcher.spec.cluster import Gpu
from launcher.spec.job import Job
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Recipe
from tests.memory.predicted import peaks, predicted

RESULTS = Path(__file__).parents[2] / "benchmarks/results/gpu-day-1.jsonl"
ALLOCATED, RESERVED = 0.003, 0.012
"""Relative. The worst of these runs today: 0.2 % and 1.0 %. None has a loss in parts: an earlier loss, which
needed more memory, was measured with those."""


def row(case: str) -> dict[str, Any]:
    [*_, found] = [row for row in read_json_lines(RESULTS) if row["case"] == case]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "0.1b-1x-none-bf16-mixed-adamw-keep-1x8x2048-chunks1",
        pytest.param("0.1b-1x-none-bf16-adamw-keep-1x16x2048-chunks1", id="workspaces"),
        pytest.param(
            "7b-1x-none-bf16-adamw-8bit-checkpoint-1x1x2048-chunks1", id="gradients summed in place"
        ),
        pytest.param("3b-8x-fsdp-bf16-mixed-adamw-selective-1x2x2048-chunks1", id="streams"),
        pytest.param("70B QLoRA, 512 tokens, 2x A5000 24 GB", id="shards from the host"),
    ],
)
def test_a_run_on_a_gpu_is_predicted(case: str) -> None:
    asked, measured = row(case)["asked"], row(case)["measured"]
    gpu = Gpu(type="H200", count=1, memory=140 * GIB)
    job, recipe = Job.model_validate(asked["job"]), Recipe.model_validate(asked["recipe"])
    found = predicted(job, recipe, asked["ranks"], "cuda", gpu)
    assert found.reserved == pytest.approx(measured["reserved"], rel=RESERVED)
    for moment, phases in peaks(found).items():
        for phase in {"forward", "backward"} & phases.keys() & measured["phases"].get(moment, {}).keys():
            assert phases[phase] == pytest.approx(measured["phases"][moment][phase], rel=ALLOCATED)
