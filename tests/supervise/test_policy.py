from __future__ import annotations

from typing import Any

import pytest

from launcher.spec.events import (
    AttemptEnded,
    CheckpointFailed,
    CheckpointSaved,
    Downgrade,
    Event,
    Finished,
    HandedOver,
    Requeued,
    Resubmitted,
    Retry,
    SlurmJob,
    Submitted,
    SupervisorStarted,
)
from launcher.spec.failures import FAILURES
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting
from launcher.spec.verdict import EXIT_CODES, OutOfMemory, Verdict
from launcher.supervise.policy import advice, decide, fruitless_starts, spent_budgets

RECIPE = Recipe(precision="fp32", optimizer="adamw", sharding="ddp", micro_batch_size=8, grad_accum=1)
SETTING = Setting(ranks=2, nodes=1, gpus_per_node=0)


def job(**fields: Any) -> Job:
    return Job.model_validate({"name": "j", "task": "a:B", "steps": 1, "batch": {"global": 16}, **fields})


def command(text: str) -> Job:
    return Job.model_validate({"name": "j", "command": text, "batch": {"global": 16}})


def test_every_class_has_an_exit_code_of_its_own():
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
    assert decision.action == "stop" and "retries.same: 2" in decision.reason


MIB = 2**20


def out_of_memory(requested: int | None = 2**30, free: int | None = 2**29, **more: Any) -> Verdict:
    memory = OutOfMemory(kind="gpu", requested=requested, total=80 * 2**30, free=free)
    return Verdict(failure="gpu-oom", reason="", memory=memory, **more)


def attempts(text: str, *verdicts: Verdict) -> tuple[str, str]:
    """What is done after the last one, each attempt with half the micro-batch of the one before."""
    recipes = [
        RECIPE.model_copy(update={"micro_batch_size": 8 >> n, "grad_accum": 1 << n})
        for n in range(len(verdicts))
    ]
    earlier = list(zip(recipes, verdicts, strict=True))
    recipe, verdict = earlier.pop()
    decision = decide(verdict, command(text), recipe, SETTING, {}, earlier=earlier)
    return decision.action, decision.reason


def test_a_command_that_reads_neither_placeholder_nor_environment_is_left_after_three_attempts():
    same = out_of_memory()
    assert attempts("python t.py", same)[0] == attempts("python t.py", same, same)[0] == "retry-lower"
    action, reason = attempts("python t.py", same, same, same)
    assert action == "stop"
    assert "micro-batch 8, 4, 2, each time asking for 1 GiB with as much free" in reason
    assert "{micro_batch_size}" in reason and "LAUNCHER_MICRO_BATCH_SIZE" in reason


@pytest.mark.parametrize(("requested", "free"), [(None, None), (2**30, None), (2 * MIB, MIB)])
def test_a_message_that_does_not_tell_where_it_failed_is_no_reason_to_leave_a_command(requested, free):
    silent = out_of_memory(requested, free, exception="RuntimeError: CUBLAS_STATUS_ALLOC_FAILED")
    assert attempts("python t.py", silent, silent, silent)[0] == "retry-lower"
    least = RECIPE.model_copy(update={"micro_batch_size": 1, "grad_accum": 8})
    assert decide(silent, command("python t.py"), least, SETTING, {}).action == "stop"


def test_a_command_whose_failure_changes_with_the_micro_batch_is_lowered_on():
    same = out_of_memory()
    assert attempts("python t.py {micro_batch_size}", same, same, same)[0] == "retry-lower"
    assert attempts("python t.py", same, out_of_memory(2**29), out_of_memory(2**29))[0] == "retry-lower"
    for size, frees in ((2**30, (0, 2**29, 2**28)), (128 * MIB, (5 * MIB, 61 * MIB, 120 * MIB))):
        moving = [out_of_memory(size, free) for free in frees]
        assert attempts("python t.py", *moving)[0] == "retry-lower"
    assert attempts("python t.py", *[out_of_memory(free=2**29 + n) for n in range(3)])[0] == "stop"
    killed = Verdict(failure="unknown", reason="")
    assert attempts("python t.py", same, killed, same)[0] == "retry-lower"


def test_a_forbidden_downgrade_says_which_would_have_been_next():
    verdict = out_of_memory()
    forbidden = decide(verdict, job(retries={"lower": 0}), RECIPE, SETTING, {})
    assert forbidden.action == "stop"
    assert "forbidden" in forbidden.reason and "next would have been: micro-batch 8 -> 4" in forbidden.reason
    spent = decide(verdict, job(retries={"lower": 2}), RECIPE, SETTING, {"lower": 2})
    assert "no retry is left (retries.lower: 2)" in spent.reason and "8 -> 4" in spent.reason


def test_shared_memory_is_nothing_that_a_recipe_helps():
    verdict = Verdict(failure="host-oom", reason="", memory=OutOfMemory(kind="shared"))
    assert decide(verdict, job(), RECIPE, SETTING, {}).action == "stop"
    assert "--shm-size" in advice(verdict, command=False)


def test_a_command_is_not_told_to_change_what_launcher_cannot_change_in_it():
    assert advice(out_of_memory(), command=False) == FAILURES["gpu-oom"].advice
    told = advice(out_of_memory(), command=True)
    assert "the command itself" in told and "LAUNCHER_MICRO_BATCH_SIZE" in told and "8-bit" not in told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "activations: checkpoint, an 8-bit optimizer, fsdp over more GPUs, offload"),
        ({"sharding": "fsdp", "activations": "checkpoint"}, "an 8-bit optimizer, more GPUs, offload"),
        (
            {"sharding": "fsdp", "optimizer": "adamw-8bit", "offload": "cpu", "activations": "offload"},
            "more GPUs",
        ),
    ],
)
def test_advice_leaves_out_what_the_recipe_does_already(fields: dict[str, Any], told: str) -> None:
    said = advice(out_of_memory(), command=False, recipe=RECIPE.model_copy(update=fields))
    assert said == f"use {told}, or a smaller model"


def test_a_job_that_must_not_be_requeued_stops():
    assert (
        decide(Verdict(failure="preempted", reason=""), job(requeue=False), RECIPE, SETTING, {}).action
        == "stop"
    )


def test_budgets_count_over_all_supervisors_since_somebody_last_acted():
    interrupted, retry = Finished(state="interrupted", failure="time-limit"), Retry(reason="")
    events = [Submitted(), retry, interrupted, Downgrade(), interrupted]
    assert spent_budgets(events) == {"same": 1, "lower": 1, "time_limits": 2}
    assert spent_budgets([*events, Resubmitted(), retry]) == {"same": 1}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "late", [0, 1, 2], ids=["in time", "after the requeue", "after the next job's start"]
)
def test_a_start_that_is_preempted_counts_once_whichever_record_comes_first(late: int, times: int) -> None:
    finished, requeued = Finished(state="interrupted", failure="preempted"), Requeued(reason="preempted")
    ends: list[Event] = [requeued, SlurmJob()]
    ends.insert(late, finished)
    assert spent_budgets([Submitted(), SlurmJob(), *[SupervisorStarted(), *ends] * times]) == {
        "preemptions": times
    }


def test_a_run_that_was_interrupted_too_often_stops():
    verdict = Verdict(failure="time-limit", reason="")
    limited = job(retries={"time_limits": 2})
    assert decide(verdict, limited, RECIPE, SETTING, {"time_limits": 1}).action == "requeue"
    assert decide(verdict, limited, RECIPE, SETTING, {"time_limits": 2}).action == "stop"


HANDED = HandedOver(attempt=0, step=7, bytes=1)
LOST = CheckpointFailed(step=7, reason="", from_="shared-memory")
SAVED, STARTED = CheckpointSaved(step=7), SupervisorStarted()
KILLED = AttemptEnded(attempt=0, failure="preempted", reason="", in_vain=True)


@pytest.mark.parametrize(
    ("events", "task", "script"),
    [
        ([], 0, 0),
        ([STARTED], 1, 0),
        ([STARTED, STARTED, STARTED], 3, 0),
        ([STARTED, SAVED, STARTED, STARTED], 2, 0),
        ([STARTED, STARTED, STARTED, SAVED], 0, 0),
        ([STARTED, STARTED, Resubmitted(), STARTED], 1, 0),
        ([STARTED, KILLED, STARTED, KILLED, STARTED, KILLED], 3, 3),
        ([STARTED, SAVED, KILLED], 0, 1),
        ([STARTED, KILLED, STARTED], 2, 0),
        ([STARTED, HANDED], 0, 0),
        ([STARTED, HANDED, LOST], 1, 0),
        ([STARTED, SAVED, HANDED, LOST], 0, 0),
    ],
)
def test_starts_without_a_step_saved_are_counted(events: list[Event], task: int, script: int) -> None:
    assert fruitless_starts(events, command=False) == task
    assert fruitless_starts(events, command=True) == script


@pytest.mark.parametrize(
    ("exception", "said"),
    [
        (
            "DistNetworkError: EADDRINUSE, address already in use",
            "another program listens at the rendezvous port",
        ),
        ("DistStoreError: timed out waiting for clients", "check that the nodes reach each other"),
    ],
)
def test_a_port_that_is_taken_is_not_explained_by_the_network(exception: str, said: str) -> None:
    verdict = Verdict(failure="rendezvous-failed", reason="r", rank=0, exception=exception)
    assert said in advice(verdict, command=False)
