"""What `launcher list` and `status` show of a run, and which columns give way."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from launcher.api.listing import Filter, listed
from launcher.report.listing import Row, as_html, as_json, columns, row_of, show_list, show_status
from launcher.report.timeline import timeline_of
from launcher.rundir.files import append_json, replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of, stamp
from launcher.schedulers.base import Status
from launcher.spec.errors import UsageError

NOON = seconds_of("2026-11-21T12:00:00.000000Z") or 0.0
FULL = Row(
    "gpt-20261121-085401-3fa2", "running", "120/500", "3h", "2h 59m", "slurm-a100", "8", "2.113",
    "14.40", "paper,final", "1", "a reason",
)  # fmt: skip


def run_of(folder: Path, name: str = "gpt", **about: object) -> RunDir:
    run = RunDir(folder / "runs" / f"{name}-1")
    run.path.mkdir(parents=True)
    job = {"name": name, "tags": ["paper"]}
    cluster = {"name": "one", "scheduler": "local"}
    more = {"nodes": 2, "gpus_per_node": 4, "created": stamp(NOON)}
    replace_json(run.run, {"id": run.id, "job": job, "cluster": cluster, **more, **about})
    replace_json(run.plan, {"usd_per_hour": 4.0})
    append_json(run.events, {"time": stamp(NOON + 60), "event": "started"})
    append_json(run.metrics, {"step": 3, "loss": 2.11349})
    return run


def status(run: RunDir, state: str = "running") -> Status:
    return Status(run.id, "gpt", state, "local:x", attempt=0, step=3, steps=9, created=stamp(NOON))


def test_a_run_that_goes_on_and_one_that_has_ended(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    row = row_of(status(run), run, now=NOON + 60 + 1800)
    assert (row.age, row.duration, row.gpus, row.loss, row.usd) == ("31m", "30m", "8", "2.113", "2.00")
    assert (row.step, row.cluster, row.tags, row.attempt) == ("3/9", "one", "paper", "0")
    append_json(run.events, {"time": stamp(NOON + 60 + 900), "event": "finished"})
    assert row_of(status(run, "succeeded"), run, now=NOON + 9e6)[3:5] == ("104d", "15m")
    append_json(run.events, {"time": stamp(NOON + 7200), "event": "started"})  # it waited in the queue again
    append_json(run.events, {"time": stamp(NOON + 8100), "event": "finished"})
    assert row_of(status(run, "succeeded"), run, now=NOON + 9e6).duration == "30m"
    append_json(run.events, {"time": stamp(NOON + 8101), "event": "found", "usd_per_hour": 8.0})
    assert row_of(status(run, "succeeded"), run, now=NOON + 9e6).usd == "4.00", "the price that was paid"
    told = as_json(status(run, "succeeded"), run)
    assert (told["state"], told["seconds"], told["usd"]) == ("succeeded", 1800.0, 4.0)


def test_a_clock_that_is_set_back_gives_no_negative_time(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    sizes = {"micro_batch_size": 1, "grad_accum": 1}
    append_json(run.events, {"time": stamp(NOON + 61), "event": "attempt", "attempt": 0, "recipe": sizes})
    append_json(run.events, {"time": stamp(NOON - 3000), "event": "finished", "state": "succeeded"})
    row = row_of(status(run, "succeeded"), run, now=NOON + 9000)
    assert (row.duration, row.usd) == ("0s", "0.00")
    drawn = timeline_of(run, run.read_events(), {}, [], NOON + 9000, ended=True)
    assert drawn.spans and all(span.begin <= span.end for span in drawn.spans)


def test_each_pod_of_a_run_costs_its_own_price(tmp_path: Path) -> None:
    run = run_of(tmp_path)  # it starts at 1 minute

    def event(minute: int, name: str, **fields: object) -> None:
        append_json(run.events, {"time": stamp(NOON + minute * 60), "event": name, **fields})

    event(61, "finished")
    event(70, "rejected", usd_per_hour=99.0)
    event(80, "requeued", usd_per_hour=1.0)
    event(90, "started")
    event(150, "finished")
    event(160, "rejected", usd_per_hour=50.0)
    row = row_of(status(run, "failed"), run)
    assert (row.duration, row.usd) == ("2h", "2.00"), "no other price is known for the first hour"
    lines = run.events.read_text()
    first = {"time": stamp(NOON), "event": "submitted", "usd_per_hour": 3.0}
    run.events.write_text("")
    append_json(run.events, first)
    run.events.write_text(run.events.read_text() + lines)
    assert row_of(status(run, "failed"), run).usd == "4.00"


def test_a_step_of_an_evaluation_alone_keeps_the_last_loss(tmp_path: Path) -> None:
    pytest.importorskip("textual")
    from launcher.top.board import Entry
    from launcher.top.drawing import cells_of
    from launcher.top.live import Live

    run = run_of(tmp_path)
    live = Live(run)
    append_json(run.metrics, {"step": 4, "eval_loss": 2.5})
    live.read()
    entry = Entry(status(run), row_of(status(run), run), 0)
    assert entry.row.loss == cells_of(entry, live, 40)[3] == "2.113"
    append_json(run.metrics, {"step": 5, "loss": None})
    live.read()
    entry = Entry(status(run), row_of(status(run), run), 0)
    assert entry.row.loss == cells_of(entry, live, 40)[3] == ""


def test_a_long_id_is_whole_and_the_state_as_well() -> None:
    out, long = io.StringIO(), "x" * 63
    show_list(Console(file=out, width=50), [FULL._replace(run=long, state="succeeded")])
    assert "succeeded" in out.getvalue() and out.getvalue().count("x") == 63


def test_what_is_not_known_is_empty(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    row = row_of(Status("x", "", "damaged", ""), run)
    assert {*row} == {"x", "damaged", ""}


@pytest.mark.parametrize("width", range(30, 200, 7))
def test_no_line_is_wider_than_the_terminal_and_the_state_is_always_there(width: int) -> None:
    out = io.StringIO()
    show_list(Console(file=out, width=width), [FULL, FULL._replace(run="a", reason="x" * 300)])
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "STATE" in lines[0]


def test_columns_give_way_in_their_order() -> None:
    assert columns([FULL], 240) == list(Row._fields)
    assert columns([FULL], 80) == ["run", "state", "step", "age", "duration", "reason"]
    assert columns([FULL._replace(usd="", tags="", reason="")], 240) == [
        "run", "state", "step", "age", "duration", "cluster", "gpus", "loss", "attempt",
    ]  # fmt: skip


def test_a_notebook_shows_the_same_and_nothing_in_it_is_markup() -> None:
    text = as_html([FULL._replace(tags="<b>", usd="")])
    assert "<td>&lt;b&gt;</td>" in text and "<th>loss</th>" in text and "<th>usd</th>" not in text
    assert as_html([]) == "<table><tr><th>run</th></tr></table>"


def test_status_shows_the_same(tmp_path: Path) -> None:
    run, out = run_of(tmp_path), io.StringIO()
    now = status(run)
    show_status(Console(file=out, width=100), now, row_of(now, run, now=NOON + 1860), [])
    for text in (
        "step       3 of 9",
        "loss       2.113",
        "one, 8 GPUs",
        "31m ago, ran for 30m",
        "about 2.00 USD",
    ):
        assert text in out.getvalue()


def test_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first, second = run_of(tmp_path), run_of(tmp_path, "llama", created=stamp(NOON - 86400))
    root = tmp_path / "runs"

    state = next(iter(listed(Filter(), root=root).statuses.values())).state

    def found(**wanted: str) -> set[str]:
        return {run.id for run in listed(Filter(**wanted), root=root).statuses}

    assert found(name="gpt") == {first.id} and found(cluster="two") == set()
    assert found(tag="paper") == {first.id, second.id} and found(tag="pap") == set()
    assert found(since="2026-11-21T00:00") == {first.id} and found(since="36500d") == {first.id, second.id}
    assert found(state="stopping", name="gpt") == set() and found(state=state) == {first.id, second.id}
    assert (len(listed(Filter(), 1, root).statuses), listed(Filter(), 1, root).older) == (1, 1)
    of_state = listed(Filter(state=state), 1, root)
    assert (len(of_state.statuses), of_state.older) == (1, 1)
    with pytest.raises(UsageError, match="neither a duration"):
        found(since="yesterday")
