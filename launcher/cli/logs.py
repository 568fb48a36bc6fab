"""`launcher logs`."""

from __future__ import annotations

import sys
from typing import Annotated, Optional

import typer

from launcher.cli.options import RunName

_Text = Optional[str]  # noqa: UP045
_Int = Optional[int]  # noqa: UP045


def logs(
    run: RunName = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="follow the logs until the run ends")
    ] = False,
    rank: Annotated[_Text, typer.Option("--rank", metavar="0,3-5", help="show only these ranks")] = None,
    node: Annotated[_Text, typer.Option("--node", metavar="0,2", help="show only these nodes")] = None,
    attempt: Annotated[_Int, typer.Option("--attempt", help="show only this attempt")] = None,
    since: Annotated[
        _Text,
        typer.Option("--since", metavar="10m", help="show only lines since then: a duration or a UTC time"),
    ] = None,
    grep: Annotated[_Text, typer.Option("--grep", metavar="REGEX", help="show only matching lines")] = None,
    stderr: Annotated[bool, typer.Option("--stderr", help="show only standard error")] = False,
    stdout: Annotated[bool, typer.Option("--stdout", help="show only standard output")] = False,
    fold: Annotated[
        bool, typer.Option("--fold/--no-fold", help="show equal lines of several ranks once")
    ] = True,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="show the supervisor's own output")
    ] = False,
) -> None:
    """Show the lines of all ranks and attempts, merged by time."""
    from launcher.cli.output import fail, print_harmless, say
    from launcher.logs.files import parse_selection
    from launcher.logs.show import LogOptions, show_logs
    from launcher.rundir.find import find_run
    from launcher.schedulers.base import Streaming
    from launcher.schedulers.lookup import fetch_to_read, scheduler_of
    from launcher.schedulers.wanted_files import Wanted
    from launcher.spec.progress import be_silent

    run_dir = find_run(run, by_job=True)
    scheduler = scheduler_of(run_dir)
    try:
        ranks = parse_selection(rank, "rank") if rank is not None else None
        nodes = parse_selection(node, "node") if node is not None else None
    except ValueError as error:
        fail(str(error))
    say(fetch_to_read(run_dir, Wanted(logs=not supervisor, ranks=ranks, nodes=nodes)))
    if supervisor and follow and isinstance(scheduler, Streaming):
        for line in scheduler.stream(run_dir):
            print_harmless(line)
        return
    if supervisor:
        print_harmless(scheduler.logs(run_dir, 0))
        return
    if stdout and stderr:
        fail("give --stdout or --stderr, not both; without them both are shown")
    be_silent()
    options = LogOptions(
        attempt=attempt, ranks=rank, nodes=node, since=since, grep=grep, follow=follow, fold=fold,
        streams="err" if stderr else "out" if stdout else "both",
    )  # fmt: skip
    try:
        show_logs(
            run_dir, options, sys.stdout.buffer, sys.stdout.isatty(), lambda: scheduler.status(run_dir).ended
        )
    except ValueError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
