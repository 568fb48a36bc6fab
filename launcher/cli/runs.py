"""`launcher list | status | cancel | clean`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, RunOrSweep, complete_runs

_Text = Optional[str]  # noqa: UP045


def list_runs(
    limit: Annotated[
        int,
        typer.Option("--limit", "-n", min=0, help="maximum number of runs, newest first; 0 shows all"),
    ] = 20,
    state: Annotated[_Text, typer.Option(help="show only runs in this state, e.g. running")] = None,
    name: Annotated[_Text, typer.Option(help="show only runs of this job")] = None,
    cluster: Annotated[_Text, typer.Option("--cluster", "-c", help="show only runs on this cluster")] = None,
    tag: Annotated[_Text, typer.Option(help="show only runs with this tag")] = None,
    since: Annotated[
        _Text,
        typer.Option(metavar="7d", help="show only runs submitted since then: a duration or a UTC time"),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the runs in all folders where runs were started, newest first."""
    from launcher.api.listing import Filter, listed
    from launcher.cli.output import console, print_json
    from launcher.report.listing import as_json, row_of, show_list

    chosen = listed(Filter(state, name, cluster, tag, since), limit)
    if json:
        print_json([as_json(status, run) for run, status in chosen.statuses.items()])
        return
    show_list(console(), [row_of(status, run) for run, status in chosen.statuses.items()])
    if chosen.older:
        print(f"({chosen.older} older: --limit 0)")


def status(run: RunOrSweep = None, json: AsJson = False) -> None:
    """Show the state of a run, or of each run of a sweep.

    The exit code is 0 while it runs or if it succeeded, otherwise its verdict's.
    """
    from dataclasses import replace

    from launcher.cli.output import console, print_json
    from launcher.report.listing import as_json, row_of, show_status
    from launcher.report.why import skipped, unsaved, why
    from launcher.rundir.find import SweepRuns, find
    from launcher.schedulers.lookup import scheduler_of

    target = find(run, by_job=True)
    if isinstance(target, SweepRuns):
        from launcher.cli.sweep_runs import status_of_all

        status_of_all(target, json)
    scheduler = scheduler_of(target)
    current = scheduler.status(target)
    if json:
        print_json({**as_json(current, target), "why": why(target, current)})
    else:
        noted = [*unsaved(target), *skipped(target)]
        lines = why(target, current)[1:4] if current.resumable else noted
        show_status(console(), replace(current, path=scheduler.where(target)), row_of(current, target), lines)
    raise SystemExit(current.exit_code)


def cancel(run: RunOrSweep = None, json: AsJson = False) -> None:
    """Ask a run, or all of a sweep, to write a checkpoint and stop. A second call ends the ranks at once."""
    from launcher.api.cancel import cancel as cancel_run
    from launcher.cli.output import print_json
    from launcher.rundir.find import SweepRuns, find
    from launcher.schedulers.lookup import scheduler_of

    target = find(run)
    if isinstance(target, SweepRuns):
        from launcher.cli.sweep_runs import cancel_all

        cancel_all(target, json)
        return
    message = cancel_run(target)
    if json:
        ended = scheduler_of(target).status(target).state == "cancelled"  # not while a checkpoint is written
        print_json({"run_id": target.id, "cancelled": ended, "message": message})
    else:
        print(message)


def clean(
    runs: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="RUN...", help="runs or sweeps to delete", autocompletion=complete_runs),
    ] = None,
    older_than: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--older-than",
            metavar="TIME",
            help="delete every ended run that has not changed for this long, e.g. 7d",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    json: AsJson = False,
) -> None:
    """Delete runs that have ended, with logs and checkpoints. Runs that have not ended are refused.

    If a run cannot be deleted, the others still are.
    """
    from launcher.api.clean import to_delete
    from launcher.cli.output import fail, message_of, print_json
    from launcher.schedulers.base import SchedulerError
    from launcher.schedulers.lookup import remove
    from launcher.spec.quantities import counted

    if not runs and older_than is None:
        fail("name the runs to delete, or give --older-than 7d")
    if json and not yes:
        fail("--json cannot ask: give --yes as well")
    chosen = to_delete(runs or [], older_than)
    paths = [run.path for run in chosen]
    if paths and not yes:
        print("\n".join(str(path) for path in paths))
        typer.confirm(f"delete {counted(len(paths), 'run')}?", abort=True)
    kept = remove(chosen)
    paths = [run.path for run in chosen if run not in kept]
    if json:
        print_json({"deleted": [path.name for path in paths]})
    elif paths or not kept:
        print(f"deleted {counted(len(paths), 'run')}")
    if errors := [*dict.fromkeys(kept.values())]:
        refused = any(isinstance(error, SchedulerError) for error in errors)
        raise (SchedulerError if refused else OSError)("\n".join(map(message_of, errors)))
