"""The check of a node between two attempts: what it finds decides where the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.spec.events import Finished, Requeued
from launcher.spec.recipe import Recipe
from launcher.supervise import doctor_check
from launcher.supervise.attempt import NodePlace
from launcher.supervise.nodes import Nodes
from launcher.supervise.policy import Decision, after_check, spent_budgets

RECIPE = Recipe(precision="fp32", optimizer="adamw", sharding="ddp", micro_batch_size=8, grad_accum=1)
AGAIN = Decision("retry-same", RECIPE, "retry with the same recipe")
SICK = 'echo "launcher: node 0 (n0) fails the doctor\'s checks: /dev/shm 1 MiB" >&2; exit 3'


def why_unfit(folder: Path, script: str) -> str:
    run = RunDir(folder)
    (run.scripts).mkdir()
    (run.scripts / "start.sh").write_text(f"[[ $LAUNCHER_ONLY_CHECK == 1 ]] || exit 5\n{script}\n")
    return doctor_check.why_unfit(run, run.attempt(0), NodePlace(), {}, lambda: False)


def test_a_sick_node_is_unfit_and_says_why(tmp_path: Path) -> None:
    assert why_unfit(tmp_path, SICK) == "node 0 (n0) fails the doctor's checks: /dev/shm 1 MiB"


def test_the_reason_is_not_a_line_of_the_attempt_before(tmp_path: Path) -> None:
    log = RunDir(tmp_path).attempt(0).torchrun_log(0)
    log.parent.mkdir(parents=True)
    log.write_text("launcher: a warning of the attempt that has ended\n")
    assert why_unfit(tmp_path, "exit 3") == "node 0 is unfit"


SETUP_FAILED = 'echo "launcher: line 1 of setup failed" >&2; exit 78'


@pytest.mark.parametrize("script", ["exit 0", "exit 1", "kill -9 $$", SETUP_FAILED])
def test_a_check_that_fails_itself_says_nothing_about_the_node(tmp_path: Path, script: str) -> None:
    assert why_unfit(tmp_path, script) == ""


def test_a_check_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_check, "CHECK_SECONDS", 0.5)
    assert why_unfit(tmp_path, "sleep 1000") == ""


def test_the_run_leaves_a_sick_node_where_it_can() -> None:
    left = after_check(AGAIN, {1: "node 1 is sick"}, 2, leaves=True)
    assert (left.action, left.recipe, left.leaves) == ("requeue", None, (1,))
    assert left.reason == "node 1 is sick: going on without it"
    assert after_check(AGAIN, {0: "node 0 is sick"}, 1, leaves=True).leaves == (0,)


@pytest.mark.parametrize(("unfit", "leaves"), [({0: "a", 1: "b"}, True), ({1: "b"}, False)])
def test_otherwise_it_goes_on_and_tells(unfit: dict[int, str], leaves: bool) -> None:
    """Either the nodes are alike, or the scheduler gives no others."""
    found = after_check(AGAIN, unfit, 2, leaves=leaves)
    told = "; ".join(unfit.values())
    assert (found.recipe, found.leaves) == (RECIPE, ())
    assert found.reason == f"retry with the same recipe, although {told}"
    assert after_check(AGAIN, {}, 2, leaves=leaves) == AGAIN


def test_a_node_that_was_left_costs_the_budget_once() -> None:
    left = [Finished(state="interrupted", failure="node-failed"), Requeued(reason="node-failed")]
    assert spent_budgets(left) == {"same": 1}


def test_node_0_hears_from_the_others_and_does_not_wait_for_ever(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    nodes = [Nodes(run, NodePlace(rank, 4, "n0", 61007), replace_json, lambda: False) for rank in range(4)]
    attempt = run.attempt(0)
    (attempt.path / "nodes").mkdir(parents=True)
    nodes[1].report_check(attempt, "")
    nodes[2].report_check(attempt, "node 2 is sick")
    assert nodes[0].unfit(attempt, "", time.monotonic() + 0.1, lost=()) == {2: "node 2 is sick"}
    assert nodes[0].unfit(attempt, "", time.monotonic() + 1000, lost=(2, 3)) == {
        2: "node 2 is sick",
        3: "node 3 gives no answer",
    }
