"""What a page tells of a run, read from a run directory written by hand."""

from __future__ import annotations

import json
import re
import tracemalloc
from html import unescape
from pathlib import Path

import pytest

from launcher.report.metric_curves import charts_of, curves_of, totals_of
from launcher.report.run_html import as_html
from launcher.report.run_report import headline
from launcher.report.steps import Steps
from launcher.report.timeline import MAX_EVENTS
from launcher.rundir.files import append_json, read_record, replace_json
from launcher.rundir.time import stamp
from launcher.spec.quantities import GIB
from tests.report.written_run import BEGIN, ESTIMATE, PEAK, Log, eventful, recipe


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return eventful(tmp_path / "gpt-1")


def test_the_headline_counts_each_step_once_and_compares_the_peak_with_the_gpu(log: Log) -> None:
    told = dict(headline(log.report()))
    assert told["steps"] == "40 of 40"
    assert told["tokens"] == "4,000"  # step 9, which was repeated, counts once
    assert told["peak memory"] == "51 GiB of 80 GiB"
    assert told["best eval loss"] == "2" and told["loss"] == "1"
    assert told["in the queue"] == "30s"
    assert told["cost"] == "0.13 USD"  # 117.5 s at 4 USD/h
    assert float(told["MFU"].rstrip("%")) == 40


def test_the_timeline_has_a_span_for_everything_that_took_time(log: Log) -> None:
    timeline = log.report().timeline
    spans = {span.kind: span for span in timeline.spans}
    assert set(spans) == {"queue", "start-up", "attempt", "probe", "lost", "checkpoint", "change", "failure"}
    assert (spans["queue"].begin, spans["queue"].end) == (BEGIN, BEGIN + 30)
    starts = [(one.begin - BEGIN, one.end - BEGIN) for one in timeline.spans if one.kind == "start-up"]
    assert starts == [(30, 42), (60.5, 65.5)]
    lost = spans["lost"]
    assert lost.end - lost.begin == pytest.approx(0.5 + 5 + 2)  # idle, and step 9 again
    assert timeline.events[spans["failure"].event].kind == "ended"
    assert timeline.begin == BEGIN and timeline.end == log.clock


def test_an_event_has_the_lines_that_its_rank_printed_around_it(log: Log) -> None:
    ended = next(one for one in log.report().timeline.events if one.kind == "ended")
    assert [line.partition(" | ")[2] for line in ended.lines] == [
        "a line",
        "torch.OutOfMemoryError: CUDA out of memory",
    ]
    assert all("r001" in line for line in ended.lines)


def test_the_ladder_shows_the_rungs_that_were_taken(log: Log) -> None:
    rungs = log.report().rungs
    assert [rung.taken for rung in rungs] == ["attempt 0", "attempt 1", "", ""]
    assert rungs[1].speed == "97%" and "micro_batch_size: 8" in rungs[1].words
    assert "planned speed" in as_html(log.report())
    plan = read_record(log.run.plan)
    replace_json(log.run.plan, {**plan, "ladder_speed": []})  # as for a command
    page = as_html(log.report())
    assert "Ladder" in page and "planned speed" not in page


def test_memory_is_drawn_for_each_rank_with_a_gap_between_attempts(log: Log) -> None:
    memory = log.report().memory
    assert memory.ranks == (0, 1) and len(memory.seconds) == 9 + 1 + 32 + 1
    first, second = memory.values["peak"]
    assert first[0] == 50 * GIB and first[9] is None and second[8] == 51 * GIB + 8
    assert memory.highest["peak"] == (51 * GIB + 8, 1, 9, 0)
    assert memory.seconds[0] == 14  # 12 s of start-up and the first step


def test_the_measured_categories_of_the_highest_peak_stand_beside_the_planned_ones(log: Log) -> None:
    assert log.report().categories == ()
    told = {"parameters": 21 * GIB, "gradients, activations and other": 30 * GIB}
    for rank, parts in ((0, {"parameters": GIB}), (1, told), (2, {})):
        line = {"time": stamp(BEGIN), "step": 99, "peak": sum(parts.values()), "parts": parts}
        append_json(log.run.attempt(1).memory(rank), line)
    report = log.report()
    assert report.worst is not None and (report.worst.rank, report.worst.step) == (1, 99)
    assert report.categories == (
        ("parameters", None, 21 * GIB),
        ("gradients, activations and other", None, 30 * GIB),
    ), "the last recipe is not the planned one"
    assert "rank 1, step 99" in as_html(report)
    [attempt] = [one for one in log.run.attempts() if one.number == 1]
    replace_json(attempt.recipe, recipe(16))
    events = [line for line in log.run.events.read_text().splitlines() if '"downgrade"' not in line]
    log.run.events.write_text("\n".join(events) + "\n")
    assert log.report().categories == (
        ("parameters", 20 * GIB, 21 * GIB),
        ("gradients, activations and other", 40 * GIB, 30 * GIB),
    )


def test_the_recipe_of_a_command_is_what_a_command_can_read(log: Log) -> None:
    of_task = dict(log.report().recipe)
    assert {"micro_batch_size", "loss_chunks"} <= of_task.keys() and all(of_task.values())
    about = log.run.read_about()
    command = about.job.replace(task=None, command=["python", "train.py"])
    replace_json(log.run.submitted, about.replace(job=command).as_json())
    of_command = dict(log.report().recipe)
    assert of_command == {name: value for name, value in of_task.items() if name in of_command}
    assert {"micro_batch_size", "grad_accum", "precision"} <= of_command.keys()
    assert not {"loss_chunks", "tensor", "schedule"} & of_command.keys()


def test_a_long_run_keeps_the_extremes_of_every_rank(log: Log) -> None:
    peaks = [GIB] * 5000
    peaks[1234], peaks[4000] = 70 * GIB, 7
    log.memory(1, 0, BEGIN, [2 * GIB] * 5000, 0.1)
    log.memory(1, 1, BEGIN, peaks, 0.1)
    memory = log.report().memory
    values = [value for value in memory.values["peak"][1] if value is not None]
    assert max(values) == 70 * GIB and min(values) == 7 and len(values) <= 1010
    assert memory.highest["peak"].step == 1235


def test_planned_and_measured_memory_stand_beside_each_other(log: Log) -> None:
    report = log.report()
    assert report.planned == 65 * GIB and report.capacity == 80 * GIB
    (moment,) = [one for one in report.moments if one.name == "tensors, steady state"]
    assert moment.measured == 40 * GIB  # of the attempt that succeeded


def test_before_anything_is_measured_the_highest_planned_peaks_are_shown(tmp_path: Path) -> None:
    log = Log(tmp_path / "young")
    log.about(steps=40)
    plan = read_record(log.run.plan)
    update = {"phase": "optimizer", "allocated": GIB, "parts": {"parameters": GIB}}
    peaks = (*ESTIMATE.peaks, PEAK.model_copy(update=update))
    estimate = ESTIMATE.model_copy(update={"peaks": peaks}).model_dump()
    replace_json(log.run.plan, {**plan, "estimate": estimate})
    assert log.report().moments == (("tensors, steady state", 60 * GIB, None),)


def test_the_failure_of_an_attempt_is_told_with_its_lines(log: Log) -> None:
    (failure,) = log.report().failures
    assert failure.failure == "gpu-oom" and failure.memory == "1 GiB requested"
    assert failure.lines == ("a line", "OutOfMemoryError: a line") and failure.then == "micro-batch 16 -> 8"


def test_a_run_that_goes_on_and_one_that_has_only_begun_have_a_page(tmp_path: Path) -> None:
    log = Log(tmp_path / "young")
    log.about(steps=40)
    log.state("submitted")
    log.event("submitted")
    log.clock += 10
    report = log.report()
    assert [(span.kind, span.end - span.begin) for span in report.timeline.spans] == [("queue", 10)]
    assert 'http-equiv="refresh" content="5"' in as_html(report, refresh=5)
    log.event("started", host="n")
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.state("running", attempt=0)
    log.clock += 60
    report = log.report()
    assert [span.kind for span in report.timeline.spans] == ["queue", "start-up"]
    assert report.timeline.end == log.clock and not report.ended
    assert "running" in as_html(report)
    log.event("requeued")
    log.clock += 20
    log.event("finished", state="cancelled", reason="cancelled in the queue")
    log.clock += 3600
    log.event("resubmitted")
    log.clock += 20
    log.event("started", host="n")
    assert dict(headline(log.report()))["in the queue"] == "30s"


def test_an_attempt_that_was_killed_ends_when_it_was_last_seen_alive(tmp_path: Path) -> None:
    log = Log(tmp_path / "killed")
    log.about(steps=40)
    log.event("submitted")
    log.event("started", 5.0, host="n")
    log.event("attempt", attempt=0, recipe=recipe(16))
    log.run.attempt(0).path.mkdir(parents=True)
    log.steps(0, 1, 5, 2.0)
    log.state("lost")
    assert log.report().spent.seconds == pytest.approx(10), "a copy may have no log"
    log.clock += 1
    log.log(0, 0, "the last line")  # 11 s after the start
    log.clock += 3600
    report = log.report()
    assert report.ended and report.spent.seconds == pytest.approx(11)
    assert report.timeline.end == pytest.approx(BEGIN + 16)
    log.event("resubmitted")
    log.state("submitted")
    log.clock += 60
    assert log.report().spent.seconds == pytest.approx(11), "it does not run while it waits"
    log.event("started", host="n")
    log.event("attempt", attempt=1, recipe=recipe(16))
    log.run.attempt(1).path.mkdir(parents=True)
    log.steps(1, 1, 1, 7.0)
    log.state("running", attempt=1)
    report = log.report()
    assert report.spent.seconds == pytest.approx(11 + 7)
    killed = next(span for span in report.timeline.spans if span.label == "attempt 0")
    assert killed.end == pytest.approx(BEGIN + 16)


def test_damaged_records_leave_gaps_and_no_error(log: Log, tmp_path: Path) -> None:
    for name in ("run.json", "plan.json", "attempts/000/verdict.json"):
        (log.run.path / name).write_text("[")
    log.run.events.write_text("not json\n" + log.run.events.read_text() + '{"event": "attempt"}\n')
    append_json(log.run.metrics, {"step": "x"}, {"time": "y"})
    log.run.attempt(1).memory(0).write_text('{"step": 1, "peak": "much", "rss": 1e999}\n[1]\n{"step": 2')
    page = as_html(log.report())
    assert "succeeded" in page
    empty = Log(tmp_path / "empty")
    assert "submitted" in as_html(empty.report())


def test_numbers_that_are_none_are_not_drawn() -> None:
    line = {"time": "2027-01-15T08:00:00.000000Z", "attempt": 0, "seconds": 1.0}
    lines = [
        {**line, "step": 1, "loss": None, "note": "text", "flag": True, "huge": 10**400},
        {**line, "step": 2, "loss": float("nan"), "accuracy": 0.5},
    ]
    assert curves_of(Steps(lines), BEGIN).columns == {"accuracy": (None, 0.5)}


def test_a_gap_reaches_to_the_values_beside_it_and_a_step_without_the_metric_is_none() -> None:
    line = {"time": "2027-01-15T08:00:00.000000Z", "attempt": 0, "seconds": 1.0, "loss": 1.0}
    held_out = {1: 5.0, 3: 4.0, 5: None, 7: 2.0}
    lines = [
        {**line, "step": step} | ({"eval_loss": held_out[step]} if step in held_out else {})
        for step in range(1, 8)
    ]
    drawn = json.loads(json.dumps(curves_of(Steps(lines), BEGIN).as_data("run"), allow_nan=False))
    assert drawn["columns"]["eval_loss"] == [5.0, None, 4.0, "nan", "nan", "nan", 2.0]
    assert drawn["columns"]["loss"] == [1.0] * 7


def test_steps_that_a_later_attempt_began_again_do_not_count() -> None:
    places = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 2))
    line = {"time": stamp(BEGIN), "seconds": 1.0}
    steps = Steps({**line, "step": step, "attempt": attempt, "loss": attempt} for attempt, step in places)
    assert (list(steps.step), list(steps.seconds)) == ([1, 2], [1.0, 2.0]), "lines of one step are merged"
    assert steps.columns["loss"].over(2) == [0.0, 1.0]


def test_a_metric_and_its_evaluation_share_a_chart() -> None:
    charts = charts_of(
        ["accuracy", "eval_loss", "samples_per_second", "tokens_per_second", "loss", "eval_accuracy"]
    )
    assert [chart.columns for chart in charts] == [
        ("loss", "eval_loss"),
        ("tokens_per_second",),
        ("accuracy", "eval_accuracy"),
    ]


EVIL = "</script><script>alert(1)</script>\x1b[31m\x1b]0;title\x07<img src=x onerror=alert(2)>"


def test_nothing_from_a_job_or_a_rank_becomes_a_part_of_the_page(tmp_path: Path) -> None:
    name = "<script>alert(0)<!--"
    log = eventful(tmp_path / name / "run", line=EVIL)
    append_json(
        log.run.metrics,
        {"time": "2027-01-15T08:20:00.000000Z", "attempt": 1, "step": 41, "seconds": 1.0, EVIL: 1.0},
    )
    page = as_html(log.report())
    assert page.count("<script") == page.count("</script>") == 3, "the data, uPlot and charts.js"
    assert "<img" not in page and "<!--" not in page and "alert(0)<" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", page)
    assert "^[]0;title" in unescape(page), "a control sequence is spelled out"


def test_of_many_events_the_first_and_the_last_are_shown(log: Log) -> None:
    for step in range(1000):
        log.event("checkpoint", 1.0, step=step, path="p")
    timeline = log.report().timeline
    assert len(timeline.events) == MAX_EVENTS and timeline.left_out > 500
    assert timeline.events[0].kind == "submitted" and "step: 999" in timeline.events[-1].text
    assert {span.event for span in timeline.spans} <= {one.number for one in timeline.events}


@pytest.mark.parametrize("steps", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_the_page_of_a_long_run_on_64_ranks_stays_small(tmp_path: Path, steps: int) -> None:
    log = eventful(tmp_path / "big")
    metrics = ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "eval_loss", "accuracy")
    with open(log.run.metrics, "w") as file:
        for step in range(1, steps + 1):
            values = {name: step * 0.123456789 + index for index, name in enumerate(metrics)}
            line = {"time": "2027-01-15T08:20:00.000000Z", "attempt": 1, "step": step, "seconds": 1.0}
            file.write(json.dumps({**line, **values}) + "\n")
    for rank in range(64):  # more steps are thinned out to as many points
        log.memory(1, rank, BEGIN, [40 * GIB + step * 12345 + rank for step in range(600)], 1.0)
    page = as_html(log.report())
    assert page.count('"rank 63"') == 2 and 500_000 < len(page.encode()) < 3_000_000


def test_a_long_run_is_read_in_less_memory_than_its_file_has_bytes(log: Log) -> None:
    more = {f"metric_{number}": 1.0 for number in range(20)}
    line = {"time": stamp(BEGIN), "attempt": 9, "seconds": 1.0, **more}
    with log.run.metrics.open("a") as file:
        file.writelines(json.dumps({**line, "step": step}) + "\n" for step in range(20, 4020))
    tracemalloc.start()
    steps = Steps(log.run.metric_lines())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert totals_of(steps).steps == 4019
    assert peak < log.run.metrics.stat().st_size
