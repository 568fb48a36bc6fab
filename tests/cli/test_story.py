"""Following a run: what the supervisor did, as it happens."""

from __future__ import annotations

from pathlib import Path

from launcher.report.event_lines import Story
from launcher.rundir.layout import RunDir
from launcher.rundir.time import now


def test_each_event_is_told_once_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    story = Story(run)
    assert story.news() == []
    run.event("downgrade", reason="micro-batch 4 -> 2")
    with open(run.events, "ab") as file:
        file.write(b'{"event": "ret\n')
    run.event("resumed", step=7)
    with open(run.events, "ab") as file:
        file.write(b'{"event": "half')
    assert story.news() == [
        "[launcher] trying again: micro-batch 4 -> 2",
        "[launcher] continuing after step 7",
    ]
    assert story.news() == []


def test_a_resumed_run_is_not_told_from_its_beginning(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.event("downgrade", reason="long ago")
    story = Story(run, since=now())
    run.event("resumed", step=3)
    assert story.news() == ["[launcher] continuing after step 3"]
