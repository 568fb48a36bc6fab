"""A recipe that an attempt lowered while it ran: what the supervisor makes of it."""

from __future__ import annotations

import json

import pytest

from launcher.rundir.recipe_changes import recipe_in_force
from launcher.spec.events import Downgrade, Resubmitted, Submitted
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import EXIT_CODES
from launcher.supervise.policy import downgrade_reasons, spent_budgets
from tests.lab import Lab, events

BEGUN = Recipe(precision="fp32", optimizer="adamw", sharding="ddp", micro_batch_size=8, grad_accum=1)


def lowered(attempt: int, micro: int) -> Downgrade:
    changes = {"micro_batch_size": (2 * micro, micro), "grad_accum": (8 // micro // 2, 8 // micro)}
    return Downgrade(attempt=attempt, changes=changes, reason=f"micro-batch {micro}", in_process=True)


def test_the_recipe_in_force_is_the_attempts_with_its_own_changes() -> None:
    told = [lowered(0, 4), lowered(0, 2), lowered(1, 1), Downgrade(changes={})]
    assert recipe_in_force(BEGUN, told, 0).micro_batch_size == 2
    assert recipe_in_force(BEGUN, told, 0).grad_accum == 4
    assert recipe_in_force(BEGUN, told, 2) == BEGUN
    assert spent_budgets([Submitted(), *told]) == {"lower": 4}
    assert downgrade_reasons([Submitted(), *told[:2]]) == ["micro-batch 4", "micro-batch 2"]
    assert downgrade_reasons([*told, Resubmitted()]) == []


SCRIPT = """\
import json, os, sys
run = os.environ["LAUNCHER_RUN_DIR"]
attempt, micro = int(os.environ["LAUNCHER_ATTEMPT"]), int(sys.argv[1])
if attempt == 0:
    changes = {"micro_batch_size": [micro, micro // 2], "grad_accum": [1, 2]}
    time = "2026-11-21T08:54:01.123456Z"
    event = {"time": time, "event": "downgrade", "attempt": 0, "in_process": True, "reason": "in place"}
    event["changes"] = changes
    with open(run + "/events.jsonl", "a") as file:
        file.write(json.dumps(event) + "\\n")
raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""


@pytest.mark.e2e
def test_an_attempts_own_downgrades_count_and_the_next_attempt_starts_below_them(lab: Lab) -> None:
    lab.script(SCRIPT)
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    recipe = {"sharding": "none", "micro_batch_size": 8}
    fields = {"command": "python train.py {micro_batch_size}", "resources": resources, "recipe": recipe}
    done = lab.cli("run", str(lab.job(**fields, retries={"lower": 2})))
    run = lab.newest()
    assert done.returncode == EXIT_CODES["gpu-oom"], done.stdout + done.stderr
    recipes = [json.loads(attempt.recipe.read_text())["micro_batch_size"] for attempt in run.attempts()]
    assert recipes == [8, 2], "one restart, below what attempt 0 had come down to by itself"
    [restart] = [event for event in events(run, "downgrade") if not event.get("in_process")]
    assert restart["changes"]["micro_batch_size"] == [4, 2]
    then = run.read_state().then
    assert then.startswith("no retry is left (retries.lower: 2); next would have been: micro-batch 2 -> 1")
    assert "; tried before: in place; micro-batch 4 -> 2" in then
