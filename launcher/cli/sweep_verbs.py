"""`launcher sweep`: the verbs of runs, for a sweep, and `resume` for all of its runs."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from launcher.cli import compare, runs
from launcher.cli.options import AsJson, complete_runs

app = typer.Typer(no_args_is_help=True, help="Show, compare, cancel or resume the runs of a sweep.")
app.command("compare")(compare.compare)

SweepOrNewest = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="SWEEP",
        help="id of a sweep or its beginning; this project's newest sweep if left out",
        autocompletion=complete_runs,
    ),
]


@app.command()
def status(sweep: SweepOrNewest = None, json: AsJson = False) -> None:
    """Show the state of each run of a sweep.

    The exit code is 0 until all have ended, and then that of the first that did not succeed.
    """
    from launcher.rundir.find import newest_sweep

    runs.status(newest_sweep() if sweep is None else sweep, json)


@app.command()
def cancel(sweep: SweepOrNewest = None, json: AsJson = False) -> None:
    """Ask all runs of a sweep to write a checkpoint and stop. A second call ends the ranks at once."""
    from launcher.rundir.find import newest_sweep

    runs.cancel(newest_sweep() if sweep is None else sweep, json)


@app.command()
def resume(
    sweep: Annotated[
        str,
        typer.Argument(metavar="SWEEP", help="id of a sweep or its beginning", autocompletion=complete_runs),
    ],
) -> None:
    """Resume the runs of a sweep that ended without success, such as after a restart of the machine.

    If a run cannot be resumed, the others still are.
    """
    from launcher.api.resume import resume as resume_run
    from launcher.cli.output import fail
    from launcher.rundir.find import SweepRuns, find
    from launcher.schedulers.base import UNFINISHED, SchedulerError
    from launcher.schedulers.lookup import states_of

    match = find(sweep)
    if not isinstance(match, SweepRuns):
        fail(f"{sweep} is a run, not a sweep: launcher resume {sweep}")
    states = states_of(match.runs).items()
    ended = [run for run, status in states if status.state in UNFINISHED or status.state == "damaged"]
    errors: list[SchedulerError] = []
    for run in ended:
        try:
            resume_run(run, [], None)
        except SchedulerError as error:
            errors.append(error)
        else:
            print(f"{run.id} goes on")
    if errors:
        raise type(errors[0])("\n".join(map(str, errors)))
    if not ended:
        print(f"{match.id}: all runs are running or have succeeded")
