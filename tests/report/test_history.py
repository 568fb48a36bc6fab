"""The history of a run: every change of course, what it cost, and what the plan had said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.report.event_lines import Story
from launcher.report.history import MAX_LINES, history
from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.spec.verdict import OutOfMemory, Verdict
from tests.report.written_run import Log, recipe, to


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "run")


def test_a_run_that_never_changed_its_course_has_no_history(log: Log) -> None:
    log.event("submitted")
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.event("probe", micro_batch_size=16, asked=1, seconds=0.2, planned=16)
    log.steps(0, 1, 4, 0.5)
    assert history(log.run) == []
    assert history(RunDir(log.run.path / "nowhere")) == []


def test_every_turn_is_told_with_what_it_cost(log: Log) -> None:
    run = log.run
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.event("probe", micro_batch_size=16, asked=2, seconds=0.41, planned=16)
    log.steps(0, 1, 10, 0.5)
    log.event(
        "downgrade", after=0.3, in_process=True, attempt=0, step=11, phase="backward", rank=1, seconds=0.3,
        because="CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of", **to(8, 16),
    )  # fmt: skip
    log.steps(0, 11, 11, 5.0, seconds_lost=0.3)
    log.steps(0, 12, 20, 0.55)
    log.event("handover", after=1.0, attempt=0, step=20, bytes=3 * 2**30, seconds=0.9)
    verdict = Verdict(
        failure="gpu-oom", reason="rank 0 ran out of GPU memory in optimizer of step 21", rank=0,
        memory=OutOfMemory(kind="gpu", requested=2**30),
    )  # fmt: skip
    run.attempt(0).path.mkdir(parents=True)
    replace_json(run.attempt(0).verdict, {**verdict.model_dump(), "then": ""})
    log.event("ended", attempt=0, failure="gpu-oom", reason=verdict.reason, action="retry-lower")
    log.event(
        "downgrade", in_process=False, phase="optimizer", rank=0, step=21, why_not_in_process="a reason",
        **to(4, 8),
    )  # fmt: skip
    log.event("attempt", attempt=1, recipe=recipe(4))
    log.event("resumed", after=3.0, step=20, **{"from": "shared-memory"})
    log.steps(1, 21, 25, 1.0)
    log.event("climb", attempt=1, step=26, in_process=True, because="no failure in 200 steps", **to(8, 4))
    log.steps(1, 26, 30, 0.625)
    assert history(run) == [
        "history   1 downgrade in process, 1 restart, 1 climb: 4.3 s lost",
        "  attempt 0  probe: micro-batch 16 fits, as planned (2 tried, 0.41 s)",
        "  attempt 0  memory ran out in backward of step 11 on rank 1, 20 MiB requested",
        "    -> in process; micro-batch 16 -> 8; planned 3 % slower; 2 -> 1.82 steps/s, 9 % slower; "
        "0.3 s lost",
        "  attempt 0  rank 0 ran out of GPU memory in optimizer of step 21, 1 GiB requested",
        "    -> attempt 1, not in process: a reason; micro-batch 8 -> 4; planned 7 % slower; "
        "1.82 -> 1 steps/s, 45 % slower; 4 s lost",
        "    handed over in shared memory: step 20, 3 GiB",
        "    attempt 1 continues after step 20, from shared memory",
        "  attempt 1  room again before step 26",
        "    -> in process; micro-batch 4 -> 8; planned 8 % faster; 1 -> 1.6 steps/s, 60 % faster",
    ]


def test_steps_that_are_done_again_count_as_lost(log: Log) -> None:
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.steps(0, 1, 10, 1.0)
    log.event("ended", after=2.0, attempt=0, failure="gpu-oom", reason="r", action="retry-lower")
    log.event("downgrade", in_process=False, phase="evaluation", rank=1, step=10, **to(8, 16))
    log.event("attempt", attempt=1, recipe=recipe(8))
    log.event("handover-skipped", after=5.0, reason="the state takes 9 GiB, 1 GiB are free")
    log.event("resumed", step=6, **{"from": "checkpoint"})
    log.event("data-changed", step=6, reason="the training data has 41 samples, it had 40")
    log.steps(1, 7, 12, 1.0)
    _, head, turn, skipped, resumed, changed = history(log.run)
    assert changed == "    the training data has 41 samples, it had 40"
    assert head == "  attempt 0  memory ran out in evaluation of step 10 on rank 1"
    assert turn.endswith("; 11s lost"), "seven seconds until it goes on, and four steps"
    assert skipped == "    no handover: the state takes 9 GiB, 1 GiB are free"
    assert resumed == "    attempt 1 continues after step 6, from checkpoint"


def test_steps_whose_seconds_are_not_known_are_no_speed(log: Log) -> None:
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.steps(0, 1, 4, 0.0)
    log.event("retry", reason="retry with the same recipe")
    log.event("attempt", attempt=1, recipe=recipe(16))
    log.steps(1, 5, 8, 0.0)
    assert not any("steps/s" in line for line in history(log.run))
    log.steps(0, 9, 9, 0.5)
    log.steps(1, 9, 9, 0.25)
    assert any("2 -> 4 steps/s" in line for line in history(log.run))


def test_a_run_that_lost_every_step_says_so_and_why(log: Log) -> None:
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.steps(0, 1, 4, 1.0)
    log.event("handover", attempt=0, step=4, bytes=2**20, seconds=0.1)
    log.event("downgrade", in_process=False, phase="forward", rank=1, step=5, **to(8, 16))
    log.event("attempt", attempt=1, recipe=recipe(8))
    log.event("handover-skipped", reason="the state has another layout: other shapes, sharding")
    log.event("resumed", step=0, **{"from": "nothing"})
    log.steps(1, 1, 6, 1.0)
    assert history(log.run)[-3:] == [
        "    handed over in shared memory: step 4, 1 MiB",
        "    no handover: the state has another layout: other shapes, sharding",
        "    attempt 1 starts again from step 1: no state of earlier steps is left",
    ]
    assert "starts again from step 1" in Story(log.run).news()[-1]


def test_a_command_without_metrics_loses_the_attempts_that_came_to_nothing(log: Log) -> None:
    for attempt, micro in enumerate((16, 8, 4)):
        log.event("attempt", attempt=attempt, recipe=recipe(micro))
        if micro > 4:
            log.event("downgrade", after=6.0, in_process=False, **to(micro // 2, micro))
    lines = history(log.run)
    assert lines[0] == "history   2 restarts: 12s lost"
    assert lines[2] == "    -> attempt 1; micro-batch 16 -> 8; planned 3 % slower; 6 s lost"


def test_what_passes_until_somebody_resumes_the_run_is_not_lost(log: Log) -> None:
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.event("downgrade", after=6.0, in_process=False, **to(8, 16))
    log.event("finished", state="cancelled")
    log.event("attempt", after=7200.0, attempt=1, recipe=recipe(8))
    assert "lost" not in history(log.run)[2]


def test_a_long_history_keeps_its_beginning_and_its_end(log: Log) -> None:
    log.event("attempt", attempt=0, recipe=recipe(16))
    for step in range(1, 40):
        log.event(
            "downgrade", in_process=True, attempt=0, step=step, phase="forward", rank=0, seconds=0.1,
            reason=f"turn {step}", changes={},
        )  # fmt: skip
    lines = history(log.run)
    assert len(lines) == MAX_LINES and "turn 1;" in lines[2] and "turn 39;" in lines[-1]
    assert any("more in events.jsonl" in line for line in lines)


def test_somebody_who_follows_hears_of_it_as_it_happens(log: Log) -> None:
    log.event("probe", micro_batch_size=16, asked=1, seconds=0.2, planned=16)
    log.event("probe", micro_batch_size=8, asked=3, seconds=0.6, planned=16)
    log.event(
        "downgrade", in_process=True, attempt=0, step=3, phase="forward", rank=1, seconds=0.31, **to(8, 16)
    )
    log.event("handover-skipped", reason="too large")
    log.event("climb", attempt=0, step=9, **to(16, 8))
    log.event("requeued", reason="preempted", gpu=None, data_center="EU-RO-1", usd_per_hour=0.06)
    assert Story(log.run).news() == [
        "[launcher] the probe chose micro-batch 8 instead of 16",
        "[launcher] out of memory in forward of step 3 on rank 1; "
        "continuing with micro-batch 16 -> 8 (0.3 s)",
        "[launcher] no handover: too large",
        "[launcher] back up: micro-batch 8 -> 16",
        "[launcher] another pod: CPU in EU-RO-1, 0.060 USD/h",
    ]
