"""Follow a run: stream its logs, show a progress bar, handle Ctrl-C."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from launcher.cli.output import EXIT_DETACHED, harmless_text
from launcher.logs.show import LogOptions, show_logs
from launcher.report.event_lines import Story
from launcher.report.why import skipped, why
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import last_metrics, progress_text
from launcher.schedulers.base import Scheduler, Status
from launcher.schedulers.wanted_files import Wanted
from launcher.spec.progress import be_silent


def follow_run(scheduler: Scheduler, run: RunDir, since: str | None = None) -> int:
    """Stream all lines, or those since the time stamp `since`, until the run ends.

    Return the run's exit code, or EXIT_DETACHED if the user leaves it running.
    """
    scheduler.fetch(run, Wanted(logs=True))
    be_silent()  # the progress bar follows
    while True:
        try:
            _stream(run, lambda: scheduler.status(run), since)
            break
        except KeyboardInterrupt:
            if not _wants_cancel():
                print(f"\ndetached; the run goes on. To follow it again: launcher logs {run.id} -f")
                return EXIT_DETACHED
            print(f"\ncancelling {run.id} (cancel it again to end its ranks at once)")
            scheduler.cancel(run)
    status = scheduler.status(run)
    print(f"\n{run.id}: {status.state}" + (f": {status.reason}" if status.reason else ""))
    for line in skipped(run) if status.state == "succeeded" else why(run, status):
        print(line)
    return status.exit_code


def _wants_cancel() -> bool:
    """Ask whether to cancel the run. Return False if stdin is not a terminal."""
    if not sys.stdin.isatty():
        return False
    try:
        answer = input("\n[d]etach and leave it running, or [c]ancel it? ")
    except (EOFError, KeyboardInterrupt):
        return False
    return answer.strip().lower().startswith("c")


def _stream(run: RunDir, get_status: Callable[[], Status], since: str | None) -> None:
    options, story = LogOptions(follow=True, since=since), Story(run, since or "")
    if not sys.stdout.isatty():

        def ended() -> bool:
            status = get_status()
            for line in story.news():
                print(line, flush=True)
            return status.ended

        show_logs(run, options, sys.stdout.buffer, False, ended)
        return
    screen = Console(file=sys.__stdout__, highlight=False)  # the progress bar moves the cursor
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as progress:
        bar = progress.add_task("starting", total=None, detail="")

        def done() -> bool:
            status = get_status()
            for line in story.news():
                progress.console.print(Text(harmless_text(line), style="bold"), soft_wrap=True)
            _update(progress, bar, status, last_metrics(run))
            return status.ended

        show_logs(run, options, cast(BinaryIO, _AboveTheBar(progress.console)), True, done)


def _update(progress: Progress, bar: TaskID, status: Status, metrics: dict[str, Any]) -> None:
    step = f"step {status.step}" if status.step is not None else ""
    attempt = f"attempt {status.attempt}" if status.attempt else ""
    progress.update(
        bar,
        description=" ".join(part for part in (status.state, attempt) if part),
        total=status.steps,
        completed=status.step or 0,
        detail="  ".join(part for part in (step, progress_text(metrics)) if part),
    )


class _AboveTheBar(io.RawIOBase):
    """A stream whose lines scroll above the progress bar."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        text = bytes(data).decode(errors="replace").rstrip("\n")
        if text:
            self._screen.print(Text.from_ansi(text), soft_wrap=True)
        return len(data)
