from __future__ import annotations

from typing import Any, get_args

import pytest

from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.rules import Setting
from launcher.spec.verdict import EXIT_CODES, FailureClass, Verdict
from launcher.supervise.policy import POLICIES, decide, spent_budgets

RECIPE = Recipe(precision="fp32", optimizer="adamw", sharding="ddp", micro_batch_size=8, grad_accum=1)
SETTING = Setting(ranks=2, nodes=1, gpus_per_node=0)


def job(**fields: Any) -> Job:
    return Job.model_validate({"name": "j", "task": "a:B", "steps": 1, "batch": {"global": 16}, **fields})


def command(text: str) -> Job:
    return Job.model_validate({"name": "j", "command": text, "batch": {"global": 16}})


def test_every_class_has_a_policy_and_an_exit_code_of_its_own():
    assert set(POLICIES) == set(EXIT_CODES) == set(get_args(FailureClass))
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_batch():
    decision = decide(Verdict(failure="gpu-oom", reason=""), job(), RECIPE, SETTING, {})
    assert decision.action == "retry-lower" and decision.recipe is not None
    assert (decision.recipe.micro_batch_size, decision.recipe.grad_accum) == (4, 2)


@pytest.mark.parametrize(
    ("failure", "action"),
    [
        ("unknown", "retry-same"),
        ("node-failed", "retry-same"),
        ("preempted", "requeue"),
        ("time-limit", "requeue"),
        ("user-error", "stop"),
        ("cancelled", "stop"),
        ("succeeded", "done"),
    ],
)
def test_each_class_has_its_move(failure, action):
    assert decide(Verdict(failure=failure, reason=""), job(), RECIPE, SETTING, {}).action == action


def test_a_spent_budget_stops_and_says_which():
    decision = decide(
        Verdict(failure="unknown", reason=""), job(retries={"same": 2}), RECIPE, SETTING, {"same": 2}
    )
    assert decision.action == "stop" and "retries.same of 2" in decision.reason


def test_a_command_without_the_placeholder_is_not_started_again_with_the_same_batch():
    verdict = Verdict(failure="gpu-oom", reason="")
    assert decide(verdict, command("python t.py"), RECIPE, SETTING, {}).action == "stop"
    lowered = decide(verdict, command("python t.py --bs {micro_batch_size}"), RECIPE, SETTING, {})
    assert lowered.action == "retry-lower"


def test_a_job_that_must_not_be_requeued_stops():
    assert (
        decide(Verdict(failure="preempted", reason=""), job(requeue=False), RECIPE, SETTING, {}).action
        == "stop"
    )


def test_budgets_count_over_all_supervisors_since_somebody_last_acted():
    interrupted = {"event": "finished", "state": "interrupted", "failure": "time-limit"}
    events = [{"event": "submitted"}, {"event": "retry"}, interrupted, {"event": "downgrade"}, interrupted]
    assert spent_budgets(events) == {"same": 1, "lower": 1, "time_limits": 2}
    assert spent_budgets([*events, {"event": "resubmitted"}, {"event": "retry"}]) == {"same": 1}


def test_a_run_that_was_interrupted_too_often_stops():
    verdict = Verdict(failure="time-limit", reason="")
    limited = job(retries={"time_limits": 2})
    assert decide(verdict, limited, RECIPE, SETTING, {"time_limits": 1}).action == "requeue"
    assert decide(verdict, limited, RECIPE, SETTING, {"time_limits": 2}).action == "stop"
