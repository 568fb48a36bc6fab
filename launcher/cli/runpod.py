"""`launcher runpod download | leaks | sandbox`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional, cast

import typer

from launcher.cli.options import AsJson, complete_runs
from launcher.cli.sandbox import sandbox

if TYPE_CHECKING:
    from launcher.schedulers.runpod.scheduler import RunPodScheduler

app = typer.Typer(no_args_is_help=True, help="RunPod: leaked pods, downloads, and a sandbox.")
app.command()(sandbox)


@app.command()
def leaks(
    pods: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="POD...",
            help="with --end: pods to end as well, e.g. of runs that another machine started",
        ),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="end the leaked pods and those named")] = False,
    json: AsJson = False,
) -> None:
    """List pods that launcher has rented and that nothing needs any more. Exits with 1 if there are any that
    were not ended."""
    from dataclasses import replace

    from rich.table import Table

    from launcher.cli.output import console, fail, print_json
    from launcher.rundir.find import runs_in
    from launcher.schedulers.base import SchedulerError
    from launcher.schedulers.lookup import statuses
    from launcher.schedulers.registry import of_record
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.errors import UnendedError
    from launcher.schedulers.runpod.leaks import in_use, is_past_deadline, rented
    from launcher.schedulers.runpod.pods import end as end_one

    if pods and not end:
        fail("ids are given to end them: add --end")
    client, runs = Client(), [run for run in runs_in() if run.read_about().get("runpod") is not None]
    first = rented(client, runs)
    named = {one.run_id for one in first}
    # Brings their records up to date; it would end a pod past its deadline, which is for --end.
    statuses([run for run in runs if run.id in named and not is_past_deadline(run)])
    by_id, stuck = {run.id: run for run in runs}, dict[str, str]()
    found = rented(client, runs)
    for place, one in enumerate(found):
        if one.why is not None:
            try:
                run = by_id[one.run_id]
                if in_use(
                    one, run, cast("RunPodScheduler", of_record(run.read_about()["cluster"])).copy(run)
                ):
                    found[place] = replace(one, why=None)
            except SchedulerError as error:
                stuck[one.path] = f"{one.why}; not ended, as it may have its run: {error}"
    unknown = set(pods or ()) - {one.path.rpartition("/")[2] for one in found}
    if unknown:
        fail(f"no pod or cluster of launcher's has the id {', '.join(sorted(unknown))}")
    by_name = {one.path for one in found if one.path.rpartition("/")[2] in (pods or ())}
    leaked = [one for one in found if one.why or one.path in by_name]
    ended = []
    for one in leaked if end else ():
        if one.path in stuck and one.path not in by_name:
            continue
        try:
            end_one(client, one.path)
            ended.append(one.path)
        except UnendedError as error:
            stuck[one.path] = str(error)
    if json:
        print_json([{**one.__dict__, "ended": one.path in ended} for one in found])
    elif not found:
        print("nothing of launcher's is rented")
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("ID", "RUN", "STATUS", "USD/H", "WHAT"):
            table.add_column(column, no_wrap=column != "WHAT")
        for one in found:
            needed = "is ending, as its run has" if one.ending else "needed by its run"
            what = one.why or (needed if one.known else "its run is not known on this machine")
            if one.path in ended:
                what = f"ended: {one.why or 'named'}"
            elif end and one.path in stuck:
                what = stuck[one.path]
            table.add_row(
                one.path.rpartition("/")[2], one.run_id, one.status, f"{one.usd_per_hour:.3f}", what
            )
        console().print(table)
    raise SystemExit(1 if len(ended) < len(leaked) else 0)


@app.command()
def download(
    run: Annotated[str, typer.Argument(metavar="RUN", autocompletion=complete_runs)],
    to: Annotated[Path, typer.Argument(metavar="DIR", help="directory to download to; created if missing")],
) -> None:
    """Download a run directory with its checkpoints from the network volume. No pod has to run."""
    from launcher.cli.output import fail
    from launcher.rundir.find import find_run
    from launcher.schedulers.lookup import scheduler_of
    from launcher.schedulers.runpod.scheduler import RunPodScheduler
    from launcher.spec.base import format_bytes

    found = find_run(run)
    scheduler = scheduler_of(found)
    if not isinstance(scheduler, RunPodScheduler):
        fail(f"{found.id} is not on RunPod: it is in {scheduler.where(found)}")
    came = scheduler.copy(found).download(to)
    print(f"{format_bytes(came)} of {found.id} came to {to}")
