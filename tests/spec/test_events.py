"""Events: the lines that they are, and lines of other versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.rundir.layout import RunDir
from launcher.spec.events import KINDS, CheckpointSaved, Event, Resumed, Submitted, read_event

TIME = "2026-11-21T08:54:01.123456Z"


def test_an_event_is_the_line_that_is_written_and_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append(Resumed(step=7, from_="shared-memory"))
    line = json.loads(run.events.read_text())
    assert list(line) == ["time", "event", "step", "from"] and line["event"] == "resumed"
    [event] = run.read_events()
    assert isinstance(event, Resumed) and (event.step, event.from_) == (7, "shared-memory")
    assert event.as_json() == line


def test_a_scheduler_of_another_package_has_kinds_of_its_own(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.event("parked", until="noon")
    [event] = run.read_events()
    assert (event.kind, event.as_json()["until"]) == ("parked", "noon")


def test_a_field_that_was_not_given_is_not_written_and_none_is_null() -> None:
    assert CheckpointSaved(step=3, path=None).as_json() == {"event": "checkpoint", "step": 3, "path": None}
    assert CheckpointSaved(step=3).path is None


def test_what_another_version_has_written_is_kept() -> None:
    unknown = {"time": TIME, "event": "of another version", "any": [1]}
    event = read_event(unknown)
    assert event is not None and type(event) is Event
    assert event.kind == "of another version" and event.time == TIME and event.as_json() == unknown
    more = read_event({"time": TIME, "event": "checkpoint", "step": 3, "items": 5})
    assert isinstance(more, CheckpointSaved) and more.as_json()["items"] == 5 and more.step == 3


@pytest.mark.parametrize(
    "line",
    [
        5,
        {"event": 7, "time": TIME},
        {"event": "checkpoint", "step": 3},
        {"event": "checkpoint", "step": 3, "time": "2026-99-99T08:54:01Z"},
        {"event": "resumed", "time": TIME},
        {"event": "resumed", "time": TIME, "step": True},
        {"event": "resumed", "time": TIME, "step": None},
        {"event": "attempt", "time": TIME, "attempt": 0, "recipe": {"micro_batch_size": 1}},
        {"event": "downgrade", "time": TIME, "changes": {"a": 5}},
        {"event": "downgrade", "time": TIME, "changes": {"a": [1, 2, 3]}},
        {"event": "finished", "time": TIME, "last_state": {"step": 1}},
    ],
)
def test_a_line_without_what_every_version_writes_is_no_event(line: object) -> None:
    assert read_event(line) is None


def test_an_event_is_a_value() -> None:
    event = CheckpointSaved(step=3)
    with pytest.raises(AttributeError, match="CheckpointSaved is a value: step cannot be set"):
        event.step = 4
    assert event == CheckpointSaved(step=3) != CheckpointSaved(step=4)


def test_a_resumed_run_counts_as_submitted() -> None:
    assert issubclass(KINDS["resubmitted"], Submitted)
