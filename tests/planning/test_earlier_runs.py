"""The next run of a job begins where an earlier one came to fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.memory.ledger import Entry, capacity_of, family_of, record
from launcher.memory.store import TraceStore
from launcher.planning.cached import CachedSource
from launcher.planning.declared_params import DeclaredParams
from launcher.planning.earlier_runs import earlier_runs, started_where_it_fitted
from launcher.planning.micro_batches import with_micro_batch
from launcher.planning.plan import Plan, make_plan
from launcher.planning.recipe_and_ladder import Decider
from launcher.render.shipped import clusters_dir
from launcher.rundir.versions import version_of
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.load import load_cluster, load_job
from launcher.train.tracing.task_source import TaskSource

EXAMPLES = Path(__file__).parents[2] / "examples"

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
    plan = started_where_it_fitted(
        make_plan(asked, HERE), asked, HERE, earlier_runs(asked, HERE, folder, on_gpu=False)
    )
    told = Decider(asked, HERE, DeclaredParams(1000, batch_norm=False), folder).decide().plan
    assert (told.recipe, told.ladder, told.reason) == (plan.recipe, plan.ladder, plan.reason)
    return plan


def ran(folder: Path, fitted: int, run: str = "again-1", out: int = 16) -> None:
    """A run in 64 MiB that went on with `fitted` samples at once after `out` had been too many."""
    plan = make_plan(job(), HERE)
    rungs = {rung.micro_batch_size: rung for rung in (plan.recipe, *plan.ladder)}
    family = family_of(job(), HERE, version_of("torch"), on_gpu=False)
    assert family is not None
    entry = Entry(
        family=family,
        args={},
        recipe=rungs[fitted],
        ranks=1,
        ranks_per_node=1,
        measured={"steady state": 1},
        ran_out=tuple(rung for size, rung in rungs.items() if size == out),
        capacity=64 * 2**20,
        run=run,
    )
    record(folder, entry)


def test_the_next_one_begins_there_and_says_so(tmp_path):
    assert planned(tmp_path, job()).recipe.micro_batch_size == 16
    ran(tmp_path, fitted=4)
    plan = planned(tmp_path, job())
    assert (plan.recipe.micro_batch_size, plan.recipe.grad_accum) == (4, 4)
    assert [rung.micro_batch_size for rung in plan.ladder] == [2, 1, 1]
    assert "ran out of memory in again-1 on the same devices; the run tries them again" in plan.reason
    assert [rung.micro_batch_size for rung in plan.above] == [16, 8]


def test_what_ran_out_in_a_second_run_is_not_tried_again_until_a_run_holds_it(tmp_path):
    ran(tmp_path, fitted=8)
    ran(tmp_path, fitted=4, run="again-2", out=8)
    plan = planned(tmp_path, job())
    assert [rung.micro_batch_size for rung in (plan.recipe, *plan.above)] == [4, 8]
    assert "ran out of memory in again-2 on" in plan.reason
    ran(tmp_path, fitted=4, run="again-3", out=8)
    plan = planned(tmp_path, job())
    assert plan.recipe.micro_batch_size == 4 and plan.above == ()
    assert plan.reason.endswith("ran out of memory in again-3 and again-2 on the same devices")
    ran(tmp_path, fitted=16, run="again-4", out=0)
    assert planned(tmp_path, job()).recipe.micro_batch_size == 16


def test_not_on_another_device_nor_where_the_job_says_what_it_wants(tmp_path):
    ran(tmp_path, fitted=4)
    assert planned(tmp_path, job("96MiB")).recipe.micro_batch_size == 16
    assert planned(tmp_path, job(micro_batch_size=16)).recipe.micro_batch_size == 16


@pytest.mark.slow
def test_a_plan_by_estimate_also_tells_the_run_what_to_try_again(tmp_path):
    sets = ("recipe=auto", "batch.global=64", "resources.gpus_per_node=2")
    asked, gpus = (
        load_job(EXAMPLES / "llama-tiny.yaml", sets),
        load_cluster(clusters_dir() / "slurm-a100.yaml"),
    )
    assert asked.task is not None
    traces = TraceStore(tmp_path / "traces", asked.task, asked.args, str(EXAMPLES))
    source = CachedSource(traces, lambda: TaskSource(asked, EXAMPLES))
    ledger = tmp_path / "ledger"

    def planned() -> Plan:
        return Decider(asked, gpus, source, ledger).decide().plan

    first = planned()
    half = with_micro_batch(first.recipe, first.recipe.micro_batch_size // 2)
    family = family_of(asked, gpus, version_of("torch"), on_gpu=True)
    assert family is not None and first.above == ()
    for number in (1, 2):
        entry = Entry(
            family=family,
            args=asked.args,
            recipe=half,
            ranks=first.layout.ranks,
            ranks_per_node=first.layout.ranks_per_node,
            measured={"steady state": 1},
            ran_out=(first.recipe,),
            capacity=capacity_of(asked, gpus, on_gpu=True),
            run=f"again-{number}",
        )
        record(ledger, entry)
        plan = planned()
        if number == 1:
            assert (plan.recipe, plan.above) == (half, (first.recipe,))
            assert plan.reason.endswith(
                "larger ones ran out of memory in again-1 on the same devices; "
                "the run tries them again if nothing fails"
            )
        else:
            assert plan.above == () and plan.recipe not in (first.recipe, half), "chosen among all others"
    record(ledger, entry.model_copy(update={"recipe": first.recipe, "ran_out": (), "run": "again-3"}))
    assert planned() == first
