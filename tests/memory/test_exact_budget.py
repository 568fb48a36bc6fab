"""A run trains in exactly the memory that its estimate says, and not in a byte less."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.spec.events import Downgrade
from tests.memory.cases import MIXED, Case, case
from tests.memory.predicted import predicted
from tests.train import runs

RANDOM_STATE = 2**15
"Bytes of random states, which a resume reads on the CPU."
CASES = (
    case("llama", micro=2),
    pytest.param(case("llama", ranks=2, micro=2, **MIXED), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("one", CASES, ids=["1 rank", "fsdp"])
def test_the_estimate_is_the_least_budget_of_a_run_to_the_byte(one: Case, tmp_path: Path) -> None:
    job = one.job(tmp_path)
    job = job.model_copy(update={"args": {**job.args, "held_out": 0.01}})  # a short evaluation
    peak = predicted(job, one.recipe, one.ranks, "cpu").allocated

    def gave_up(budget: int) -> list[Downgrade]:
        run = runs.prepare(tmp_path / str(budget), job)
        ended = runs.start(run, one.recipe, one.ranks, env={"TRAIN_MEMORY_BUDGET": str(budget)})
        assert not any(ended.codes.values()), ended.output
        return [event for event in run.read_events() if isinstance(event, Downgrade)]

    assert gave_up(peak) == []
    [lower] = gave_up(peak - 1)
    assert lower.changes["micro_batch_size"] == [2, 1]


@pytest.mark.slow
def test_a_run_that_accumulates_under_ddp_fits_its_estimate_after_a_restart_too(tmp_path: Path) -> None:
    one = case("odd tied", ranks=2, micro=2, accumulation=2, sharding="ddp", optimizer="lion-8bit")
    job = one.job(tmp_path)
    peak = predicted(job, one.recipe, one.ranks, "cpu").allocated
    for steps in (2, 4):
        run = runs.prepare(tmp_path / "run", job.model_copy(update={"steps": steps}), workdir=job.workdir)
        budget = {"TRAIN_MEMORY_BUDGET": str(peak + RANDOM_STATE)}
        ended = runs.start(run, one.recipe, one.ranks, env=budget)
        assert not any(ended.codes.values()), ended.output
    assert not any(isinstance(event, Downgrade) for event in run.read_events())
