"""`launcher report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from launcher.cli.options import RunName


def report(
    run: RunName = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="file to write; report.html in the run directory if left out",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="rewrite the page regularly until the run ends")
    ] = False,
    every: Annotated[
        int, typer.Option(metavar="SECONDS", help="with --watch: time between two writes", min=1)
    ] = 5,
) -> None:
    """Write one self-contained HTML page about a run: curves, memory of every rank, timeline, failures."""
    from launcher.api.pages import watch_report, write_report
    from launcher.cli.output import page_file, say
    from launcher.rundir.find import find_run
    from launcher.spec.progress import be_silent, working

    run_dir = find_run(run, by_job=True)
    page = page_file("--output", output) if output is not None else run_dir.report
    if not watch:
        with working(f"reading {run_dir.id}"):
            written = write_report(run_dir, page)
        say(written.outdated)
        print(output or page)
        return
    try:
        be_silent()
        print(f"{output or page}: rewritten every {every} s until the run ends; Ctrl-C stops")
        say(watch_report(run_dir, page, every).outdated)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
