"""`launcher submit` and `launcher run`."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    pass

from launcher.cli.options import ClusterName, JobFile, Sets

DryRun = Annotated[bool, typer.Option("--dry-run", help="show every file and command; do nothing")]

NoDowngrade = Annotated[
    bool, typer.Option("--no-downgrade", help="fail when memory runs out: no probe, no smaller recipe")
]


def _above_0(value: float | None) -> float | None:
    if value is not None and not (isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value:g} is not a number above 0")
    return value


MaxPrice = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        callback=_above_0,
        metavar="USD",
        help="per hour of all that is rented; what costs more is not, or ended",
    ),
]
Budget = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        callback=_above_0, metavar="USD", help="for all that is rented for the run; limits its hours"
    ),
]
MaxHours = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        callback=_above_0, metavar="HOURS", help="after which what is rented ends, whatever the training does"
    ),
]
Unplanned = Annotated[
    bool, typer.Option("--unplanned", help="rent although it is not known whether the job fits on the card")
]
FORBIDDEN = ("retries.lower=0",)
"What --no-downgrade overrides in the job."


def submit(
    job: JobFile,
    cluster: ClusterName = "local",
    set_: Sets = None,
    dry_run: DryRun = False,
    no_downgrade: NoDowngrade = False,
    sweep: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--sweep",
            metavar="A=X,Y",
            help="a run for each value, or each combination when repeated, in one submission",
        ),
    ] = None,
    at_once: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--at-once", metavar="N", min=1, help="runs of a sweep at the same time; all if left out"
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="stream the logs until the run ends")
    ] = False,
    max_price: MaxPrice = None,
    budget: Budget = None,
    max_hours: MaxHours = None,
    unplanned: Unplanned = False,
) -> None:
    """Plan a job, show the plan, start it detached."""
    from launcher.cli.output import console
    from launcher.cli.prepare import Limits, prepared
    from launcher.report.terminal import show_plan, show_prepared
    from launcher.runs.find import find_run

    limits = Limits(max_price, budget, max_hours, unplanned or None)
    sets = [*(set_ or []), *(FORBIDDEN if no_downgrade else ())]
    if sweep:
        from launcher.cli.output import fail
        from launcher.cli.sweep import submit_sweep

        if limits != Limits():
            fail("--max-price, --budget, --max-hours and --unplanned are of one run; a sweep rents nothing")
        if follow:
            fail("give --sweep or --follow, not both: `launcher logs RUN -f` follows one run of a sweep")
        submit_sweep(job, cluster, sets, sweep, at_once, dry_run)
        return
    if at_once is not None:
        from launcher.cli.output import fail

        fail("--at-once says how many runs of a sweep go on at the same time: give --sweep as well")
    scheduler, ready = prepared(job, cluster, sets, limits=limits)
    if dry_run:
        show_prepared(console(), ready)
        return
    request = ready.request
    warnings = (*ready.warnings, *scheduler.check(ready))
    show_plan(console(), request.job, request.cluster, request.plan, warnings)
    handle = scheduler.submit(ready)
    print(f"\n{request.run_id} submitted ({handle})")
    if follow:
        from launcher.cli.follow import follow_run

        name = request.run_id if request.cluster.runs_elsewhere else ready.run_dir
        raise SystemExit(follow_run(scheduler, handle, find_run(name)))
    print(f"follow: launcher logs {request.run_id} -f    cancel: launcher cancel {request.run_id}")


def run(
    job: JobFile,
    cluster: ClusterName = "local",
    set_: Sets = None,
    no_downgrade: NoDowngrade = False,
    max_price: MaxPrice = None,
    budget: Budget = None,
    max_hours: MaxHours = None,
    unplanned: Unplanned = False,
) -> None:
    """Submit and follow; the exit code is the run's verdict."""
    submit(
        job, cluster, set_, dry_run=False, no_downgrade=no_downgrade, follow=True,
        max_price=max_price, budget=budget, max_hours=max_hours, unplanned=unplanned,
    )  # fmt: skip
