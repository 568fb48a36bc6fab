"""The next run of a job begins where an earlier one came to fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.memory.ledger import Entry, family_of, record
from launcher.planning.decide import Decider
from launcher.planning.declared import DeclaredParams
from launcher.planning.learnt import begun_where_it_fitted, known_of
from launcher.planning.plan import Plan, make_plan
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job

HERE = Cluster.model_validate({"name": "here", "scheduler": "local"})


def job(budget: str = "64MiB", **recipe: Any) -> Job:
    return Job.model_validate(
        {
            "name": "again",
            "task": "a:B",
            "batch": {"global": 16},
            "steps": 1,
            "resources": {"gpus_per_node": 0, "ranks_per_node": 1},
            "recipe": recipe,
            "env": {"TRAIN_MEMORY_BUDGET": budget},
        }
    )


def planned(folder: Path, asked: Job) -> Plan:
    """As a submission is; `launcher plan` says the same."""
    plan = begun_where_it_fitted(
        make_plan(asked, HERE), asked, HERE, known_of(asked, HERE, folder, on_gpu=False)
    )
    told = Decider(asked, HERE, DeclaredParams(1000, batch_norm=False), folder).decide().plan
    assert (told.recipe, told.ladder, told.reason) == (plan.recipe, plan.ladder, plan.reason)
    return plan


def ran(folder: Path, fitted: int) -> None:
    """A run that began with 16 samples at once in 64 MiB, and went on with `fitted`."""
    plan = make_plan(job(), HERE)
    rungs = {rung.micro_batch_size: rung for rung in (plan.recipe, *plan.ladder)}
    family = family_of(job(), HERE, on_gpu=False)
    assert family is not None
    entry = Entry(
        family=family,
        args={},
        recipe=rungs[fitted],
        ranks=1,
        ranks_per_node=1,
        measured={"steady state": 1},
        ran_out=tuple(rung for size, rung in rungs.items() if size == 16),
        capacity=64 * 2**20,
        run="again-1",
    )
    record(folder, entry)


def test_the_next_one_begins_there_and_says_so(tmp_path):
    assert planned(tmp_path, job()).recipe.micro_batch_size == 16
    ran(tmp_path, fitted=4)
    plan = planned(tmp_path, job())
    assert (plan.recipe.micro_batch_size, plan.recipe.grad_accum) == (4, 4)
    assert [rung.micro_batch_size for rung in plan.ladder] == [2, 1, 1]
    assert "ran out above it in again-1" in plan.reason


def test_not_on_another_device_nor_where_the_job_says_what_it_wants(tmp_path):
    ran(tmp_path, fitted=4)
    assert planned(tmp_path, job("96MiB")).recipe.micro_batch_size == 16
    assert planned(tmp_path, job(micro_batch_size=16)).recipe.micro_batch_size == 16
