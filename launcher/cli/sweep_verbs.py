"""`launcher sweep`: the verbs of runs, for a sweep, and `resume` for all of its runs."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli import compare, runs
from launcher.cli.options import complete_runs

app = typer.Typer(no_args_is_help=True, help="Show, compare, cancel or resume the runs of a sweep.")
app.command("status")(runs.status)
app.command("compare")(compare.compare)
app.command("cancel")(runs.cancel)


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
    from launcher.api.resume import resume as go_on
    from launcher.cli.output import fail
    from launcher.rundir.find import SweepRuns, find
    from launcher.schedulers.base import SchedulerError
    from launcher.schedulers.lookup import states_of

    found = find(sweep)
    if not isinstance(found, SweepRuns):
        fail(f"{sweep} is a run, not a sweep: launcher resume {sweep}")
    states = states_of(found.runs).items()
    ended = [run for run, status in states if status.resumable or status.state == "damaged"]
    refused: list[SchedulerError] = []
    for run in ended:
        try:
            go_on(run, [], None)
        except SchedulerError as error:
            refused.append(error)
        else:
            print(f"{run.id} goes on")
    if refused:
        raise type(refused[0])("\n".join(map(str, refused)))
    if not ended:
        print(f"{found.id}: all runs are running or have succeeded")
