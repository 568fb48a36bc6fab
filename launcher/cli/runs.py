"""`launcher list | status | cancel | clean`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, RunOrSweep, complete_runs


def list_runs(
    limit: Annotated[int, typer.Option("--limit", "-n", help="how many, the newest first; 0 for all")] = 20,
    json: AsJson = False,
) -> None:
    """Every run below the folders that runs were started in, the newest first."""
    from launcher.cli.output import console, print_json
    from launcher.runs.find import runs_in
    from launcher.schedulers.of_run import statuses

    runs = runs_in()
    found = statuses(runs[:limit] if limit else runs)
    if json:
        print_json([status.as_json() for status in found])
        return
    from launcher.report.terminal import show_list

    show_list(console(), found)
    if limit and len(runs) > limit:
        print(f"({len(runs) - limit} older: --limit 0)")


def status(run: RunOrSweep = None, json: AsJson = False) -> None:
    """The true state of a run, or of each run of a sweep.

    Exit code 0 while it runs or when it succeeded, else its verdict's.
    """
    from dataclasses import replace

    from launcher.cli.output import console, print_json
    from launcher.report.terminal import show_status
    from launcher.report.why import why
    from launcher.runs.find import SweepRuns, find
    from launcher.schedulers.of_run import scheduler_of

    found = find(run)
    if isinstance(found, SweepRuns):
        from launcher.cli.sweep_runs import status_of_all

        status_of_all(found, json)
    scheduler, handle = scheduler_of(found)
    now = scheduler.status(handle)
    if json:
        print_json({**now.as_json(), "why": why(found, now.state, now.reason)})
    else:
        lines = why(found, now.state, now.reason)[1:4] if now.resumable else []
        show_status(console(), replace(now, path=scheduler.where(found)), lines)
    raise SystemExit(now.exit_code)


def cancel(run: RunOrSweep = None, json: AsJson = False) -> None:
    """Checkpoint, then stop: a run, or all of a sweep. A second call ends the ranks at once."""
    from launcher.cli.output import print_json
    from launcher.runs.find import SweepRuns, find
    from launcher.schedulers.of_run import scheduler_of

    found = find(run)
    if isinstance(found, SweepRuns):
        from launcher.cli.sweep_runs import cancel_all

        cancel_all(found, json)
        return
    again = found.cancel.exists() or not found.read_about().get("job", {}).get("task")
    scheduler, handle = scheduler_of(found)
    scheduler.cancel(handle)
    last = found.read_events()[-1]
    ended_by = last.get("by") if last.get("event") == "finished" else None
    if json:
        print_json({"run_id": found.id, "cancelled": True})
    elif ended_by == "slurm":
        print(f"{found.id}: taken out of the queue")
    elif ended_by == "runpod":
        print(f"{found.id}: {last['reason']}")
    elif again:
        print(f"{found.id}: its ranks are being ended; `launcher status {found.id}` shows when they have")
    else:
        print(
            f"{found.id}: asked to write a checkpoint and stop; "
            f"`launcher status {found.id}` shows when it has"
        )


def clean(
    runs: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="RUN...", help="runs or sweeps to delete", autocompletion=complete_runs),
    ] = None,
    older_than: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--older-than", metavar="TIME", help="every ended run that last changed before, e.g. 7d"
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    json: AsJson = False,
) -> None:
    """Delete runs that have ended: logs, checkpoints, everything. Running ones are refused."""
    import time
    from pathlib import Path

    from launcher.cli.output import EXIT_REFUSED, fail, print_json
    from launcher.runs.find import SweepRuns, find, runs_in
    from launcher.runs.layout import RunDir
    from launcher.schedulers.of_run import remove, statuses
    from launcher.spec.base import parse_seconds

    if not runs and older_than is None:
        fail("name the runs to delete, or give --older-than 7d")
    if json and not yes:
        fail("--json cannot ask: give --yes as well")
    chosen: list[RunDir] = []
    for name in runs or []:
        one = find(name)
        chosen += one.runs if isinstance(one, SweepRuns) else [one]
    for run in chosen:
        if run.read_about().get("id") != run.id or not run.plan.is_file():
            fail(f"{run.path} does not look like a run directory as launcher makes them; delete it by hand")
    for now in statuses(chosen):
        if not now.ended:
            fail(f"{now.run_id} is still running; cancel it first", EXIT_REFUSED)
    if older_than is not None:
        try:
            limit = time.time() - parse_seconds(older_than)
        except ValueError as error:
            fail(f"--older-than: {error}")
        old = [run for run in runs_in() if run.state.exists() and run.state.stat().st_mtime < limit]
        chosen += [RunDir(Path(now.path)) for now in statuses(old) if now.ended]
    paths = list(dict.fromkeys(run.path for run in chosen))
    if paths and not yes:
        print("\n".join(str(path) for path in paths))
        typer.confirm(f"delete {len(paths)} run(s)?", abort=True)
    remove(RunDir(path) for path in paths)
    if json:
        print_json({"deleted": [path.name for path in paths]})
    else:
        print(f"deleted {len(paths)} run(s)")
