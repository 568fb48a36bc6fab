"""`launcher runpod download | leaks | sandbox`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from launcher.cli.options import AsJson, complete_runs
from launcher.cli.sandbox import sandbox

if TYPE_CHECKING:
    from launcher.schedulers.runpod.leaks import Rented

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
    """List pods that launcher has rented and that no run needs any more. The exit code is 1 if any of them
    was not ended."""
    from launcher.cli.output import fail, print_json
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.leaks import end as end_all
    from launcher.schedulers.runpod.leaks import list_rented

    if pods and not end:
        fail("pods are named only to end them: add --end")
    client, named = Client(), set(pods or ())
    listing = list_rented(client)
    if unknown := named - {pod.id for pod in listing.rented}:
        fail(f"no pod or cluster of launcher's has the id {', '.join(sorted(unknown))}")
    leaked = [pod for pod in listing.rented if pod.why or pod.id in named]
    chosen = [pod for pod in leaked if pod.id in named or pod.path not in listing.doubts] if end else []
    problems = end_all(client, chosen)
    ended = {pod.path for pod in chosen} - problems.keys()
    if json:
        print_json([{**pod.__dict__, "ended": pod.path in ended} for pod in listing.rented])
    elif not listing.rented:
        print("nothing of launcher's is rented")
    else:
        _show(listing.rented, ended, {**listing.doubts, **problems} if end else {})
    raise SystemExit(1 if len(ended) < len(leaked) else 0)


def _show(rented: Sequence[Rented], ended: Collection[str], not_ended: Mapping[str, str]) -> None:
    """Print a table. `ended` has the paths that were ended, `not_ended` the reasons why others were not."""
    from rich.table import Table

    from launcher.cli.output import console

    table = Table(box=None, pad_edge=False)
    for column in ("ID", "RUN", "STATUS", "USD/H", "WHAT"):
        table.add_column(column, no_wrap=column != "WHAT")
    for pod in rented:
        needed = "is ending, as its run has" if pod.ending else "needed by its run"
        what = pod.why or (needed if pod.known else "this machine does not know its run")
        if pod.path in ended:
            what = f"ended: {pod.why or 'named'}"
        elif pod.path in not_ended:
            what = not_ended[pod.path]
        table.add_row(pod.id, pod.run_id, pod.status, f"{pod.usd_per_hour:.3f}", what)
    console().print(table)


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
    from launcher.spec.quantities import format_bytes

    run_dir = find_run(run)
    scheduler = scheduler_of(run_dir)
    if not isinstance(scheduler, RunPodScheduler):
        fail(f"{run_dir.id} is not on RunPod: it is in {scheduler.where(run_dir)}")
    received = scheduler.copy(run_dir).download(to)
    print(f"downloaded {format_bytes(received)} of {run_dir.id} to {to}")
