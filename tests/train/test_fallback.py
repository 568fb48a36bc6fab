"""The way back up: what a rank knows of the attempts before its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.planning.plan import Layout, Plan
from launcher.rundir.layout import RunDir
from launcher.spec.recipe import Recipe
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.recovery.agreement import Agreement
from launcher.train.recovery.fallback import CLIMB_AFTER, Fallback
from tests.train.runs import job, one_rank, prepare, recipe

LAYOUT = Layout(nodes=1, ranks_per_node=2, gpus_per_node=0)
LARGE, SMALL, LEAST = recipe("ddp", 4, 2), recipe("ddp", 2, 4), recipe("ddp", 1, 8)


class Log:
    """The events of a run, as the supervisor and rank 0 write them."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.attempts = run, 0

    def attempt(self, begins: Recipe, after: int = 0) -> None:
        self.run.event("attempt", attempt=self.attempts, recipe=begins.model_dump())
        self.attempts += 1
        if after:
            self.run.event("resumed", step=after, **{"from": "shared-memory"})

    def change(self, kind: str, before: Recipe, after: Recipe, step: int | None, restart: bool) -> None:
        changes = {name: list(pair) for name, pair in after.changes_from(before).items()}
        where: dict[str, Any] = {} if step is None else {"step": step}
        self.run.event(kind, in_process=not restart, changes=changes, reason="words", **where)

    def restart(self, before: Recipe, after: Recipe, step: int | None) -> None:
        self.change("downgrade", before, after, step, restart=True)
        self.attempt(after, after=(step or 1) - 1)

    def fallback(self, now: Recipe, *, batch_norm: bool = False, **retries: int) -> Fallback:
        rank = one_rank(self.run, job=job(retries=retries), recipe=now)
        return Fallback(rank, rank.setting(batch_norm=batch_norm), Agreement(rank, Unlimited()))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log(prepare(tmp_path / "run", job()))
    log.run.event("submitted")
    log.attempt(LARGE)
    return log


def test_what_had_fitted_before_a_restart_is_tried_again(log: Log) -> None:
    log.restart(LARGE, SMALL, step=50)
    fallback = log.fallback(SMALL)
    assert fallback.recipe_to_retry(50 + CLIMB_AFTER - 1) is None
    assert fallback.recipe_to_retry(50 + CLIMB_AFTER) == LARGE


@pytest.mark.parametrize("step", [1, None])
def test_what_had_never_fitted_is_not(log: Log, step: int | None) -> None:
    log.restart(LARGE, SMALL, step=step)
    assert log.fallback(SMALL).recipe_to_retry(10_000) is None


def test_the_way_back_goes_over_every_recipe_that_had_fitted_whoever_left_it(log: Log) -> None:
    log.change("downgrade", LARGE, SMALL, step=50, restart=False)
    log.restart(SMALL, LEAST, step=90)
    log.run.event("retry", reason="retry with the same recipe")
    log.attempt(LEAST, after=94)
    fallback = log.fallback(LEAST)
    assert fallback.recipe_to_retry(90 + CLIMB_AFTER) == SMALL
    fallback.retried(SMALL)
    assert fallback.recipe_to_retry(90 + CLIMB_AFTER) == LARGE


def test_why_nothing_is_left_is_told_as_it_is(log: Log) -> None:
    assert log.fallback(LEAST).why_none(LEAST) == "nothing is left to give up without a restart"
    assert "BatchNorm" in log.fallback(LARGE, batch_norm=True).why_none(LARGE)
    log.change("downgrade", LARGE, SMALL, step=50, restart=False)
    spent = log.fallback(SMALL, lower=1)
    assert spent.below(SMALL) is None
    assert spent.why_none(SMALL) == "no retry is left (retries.lower: 1)"


def test_a_restart_is_no_third_chance(log: Log) -> None:
    log.restart(LARGE, SMALL, step=50)
    log.change("climb", SMALL, LARGE, step=250, restart=False)
    log.restart(LARGE, SMALL, step=300)
    assert log.fallback(SMALL).recipe_to_retry(10_000) is None


def test_what_would_be_another_restart_is_not_tried(log: Log) -> None:
    checkpointed = SMALL.model_copy(update={"activations": "checkpoint"})
    log.restart(LARGE, checkpointed, step=50)
    assert log.fallback(checkpointed).recipe_to_retry(10_000) is None


def test_what_had_fitted_before_somebody_resumed_the_run_is_tried_again_once(log: Log) -> None:
    log.change("downgrade", LARGE, SMALL, step=50, restart=False)
    log.run.event("resubmitted")
    log.attempt(SMALL, after=60)
    assert log.fallback(SMALL).recipe_to_retry(50 + CLIMB_AFTER) == LARGE
    log.change("climb", SMALL, LARGE, step=250, restart=False)
    log.change("downgrade", LARGE, SMALL, step=300, restart=False)
    log.run.event("resubmitted")
    log.attempt(SMALL, after=310)
    assert log.fallback(SMALL).recipe_to_retry(10_000) is None


@pytest.mark.parametrize("now", [recipe("ddp", 2, 2), recipe("ddp", 8, 1), recipe("ddp", 4, 2)])
def test_what_somebody_has_changed_is_not_undone(log: Log, now: Recipe) -> None:
    """Another batch, or as many samples at once as had run out, or more."""
    log.restart(LARGE, SMALL, step=50)
    log.run.event("resubmitted")
    log.attempt(now, after=60)
    assert log.fallback(now).recipe_to_retry(10_000) is None


def test_a_micro_batch_that_the_job_fixes_is_not_passed(log: Log) -> None:
    log.restart(LARGE, SMALL, step=50)
    fixed = one_rank(log.run, job=job(recipe={"micro_batch_size": 2}), recipe=SMALL)
    fallback = Fallback(fixed, fixed.setting(batch_norm=False), Agreement(fixed, Unlimited()))
    assert fallback.recipe_to_retry(10_000) is None


def planned_below(log: Log) -> None:
    """An earlier run had run out of memory under LARGE."""
    plan = Plan(layout=LAYOUT, recipe=SMALL, ladder=(LEAST,), above=(LARGE,), reason="the ledger")
    log.run.plan.write_text(plan.model_dump_json())


def test_what_only_an_earlier_run_knows_to_be_too_large_is_tried_once(tmp_path: Path) -> None:
    log = Log(prepare(tmp_path / "run", job()))
    planned_below(log)
    log.attempt(SMALL)
    fallback = log.fallback(SMALL)
    assert (
        fallback.recipe_to_retry(CLIMB_AFTER - 1) is None and fallback.recipe_to_retry(CLIMB_AFTER) == LARGE
    )
    log.change("climb", SMALL, LARGE, step=CLIMB_AFTER, restart=False)
    log.restart(LARGE, SMALL, step=300)
    assert log.fallback(SMALL).recipe_to_retry(10_000) is None


def test_what_this_run_left_and_its_new_plan_knows_of_waits_from_when_it_left_it(log: Log) -> None:
    log.change("downgrade", LARGE, SMALL, step=50, restart=False)
    planned_below(log)
    log.run.event("resubmitted")
    log.attempt(SMALL, after=60)
    fallback = log.fallback(SMALL)
    assert (
        fallback.recipe_to_retry(CLIMB_AFTER) is None and fallback.recipe_to_retry(50 + CLIMB_AFTER) == LARGE
    )


def test_nothing_is_tried_that_would_end_the_run_if_it_ran_out_once_more(log: Log) -> None:
    log.restart(LARGE, SMALL, step=50)
    for _ in range(job().retries.lower - 1):
        log.run.event("downgrade", in_process=True, changes={}, reason="words")
    assert log.fallback(SMALL).recipe_to_retry(10_000) is None
    log.run.event("resubmitted")
    assert log.fallback(SMALL).recipe_to_retry(10_000) == LARGE
