"""The progress bar of somebody who follows a run on a terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.progress import Progress

from launcher.cli.follow import _update
from launcher.schedulers.base import Status


def test_the_bar_shows_step_loss_and_speed() -> None:
    status = Status(
        run_id="demo-1",
        handle="local:x",
        name="demo",
        state="running",
        path="/x",
        created="",
        attempt=1,
        step=7,
        steps=20,
    )
    with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as progress:
        bar = progress.add_task("starting", total=None, detail="")
        _update(progress, bar, status, {})
        assert progress.tasks[0].fields["detail"] == "step 7"
        _update(progress, bar, status, {"loss": 2.5, "tokens_per_second": 8470.0, "mfu": 0.41})
        [task] = progress.tasks
        assert (task.description, task.completed, task.total) == ("running attempt 1", 7, 20)
        assert task.fields["detail"] == "step 7  loss 2.5000  8,470 tokens/s  MFU 41.0%"
