"""`launcher submit` and `launcher run`."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Optional

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from launcher.api.given_job import JobLike

from launcher.cli.options import (
    Account,
    AsJson,
    ClusterName,
    Dependency,
    Nodelist,
    Partition,
    Qos,
    Reservation,
    Sets,
)

DryRun = Annotated[bool, typer.Option("--dry-run", help="show every file and command, and do nothing")]

NoDowngrade = Annotated[
    bool, typer.Option("--no-downgrade", help="fail when memory runs out: no probe, no cheaper recipe")
]


def _positive(value: float | None) -> float | None:
    if value is not None and not (isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value:g} is not a number above 0")
    return value


MaxPrice = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        callback=_positive,
        metavar="USD",
        help="maximum price per hour of all pods; more expensive offers are skipped",
    ),
]
Budget = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        callback=_positive,
        metavar="USD",
        help="maximum cost of all pods of the run; limits their hours",
    ),
]
MaxHours = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        callback=_positive,
        metavar="HOURS",
        help="maximum hours of a pod; then it is ended, whatever the training does",
    ),
]
Unplanned = Annotated[
    bool,
    typer.Option("--unplanned", help="rent although launcher does not know whether the job fits on the GPU"),
]
NO_DOWNGRADE_SETS = ("retries.lower=0",)
"The overrides of the job for --no-downgrade."


class WithCommand(TyperCommand):
    """A command that accepts another command after `--` in place of a job file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = args[at + 1 :]
            args = args[:at]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


COMMAND = "launcher.command"
JobOrCommand = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Argument(metavar="JOB | -- COMMAND", help="job file, e.g. job.yaml; or a command after --"),
]


def _job(file: Path | None, command: list[str] | None, cluster: str, sets: list[str]) -> JobLike:
    from launcher.cli.output import fail

    if command is not None and file is None:
        from launcher.api.command_job import job_of_command

        return job_of_command(command, cluster, sets)
    if file is None or command is not None:
        fail("give a job file, or a command after `--`: launcher run -- python train.py")
    return file


def submit(
    ctx: typer.Context,
    job: JobOrCommand = None,
    cluster: ClusterName = "local",
    set_: Sets = None,
    dry_run: DryRun = False,
    no_downgrade: NoDowngrade = False,
    sweep: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--sweep",
            metavar="A=X,Y",
            help="submit a run for each value, or for each combination if repeated; or draw values at "
            "random, such as train.lr=loguniform(1e-5,1e-3)",
        ),
    ] = None,
    samples: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--samples", metavar="N", min=1, help="number of values that a sweep draws at random"),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="seed of the values that a sweep draws")
    ] = 0,
    at_once: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--at-once",
            metavar="N",
            min=1,
            help="maximum number of runs of a sweep at the same time; all if left out",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="stream the logs until the run ends")
    ] = False,
    max_price: MaxPrice = None,
    budget: Budget = None,
    max_hours: MaxHours = None,
    unplanned: Unplanned = False,
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    reservation: Reservation = None,
    dependency: Dependency = None,
    nodelist: Nodelist = None,
    json: AsJson = False,
) -> None:
    """Plan a job as `launcher plan` does, show the plan, and start the job detached."""
    from launcher.api.prepare import Limits, prepared, queue_sets
    from launcher.cli.output import console, fail, print_json, telling_of
    from launcher.report.terminal import show_plan, show_prepared

    limits = Limits(max_price, budget, max_hours, unplanned or None)
    queue = queue_sets(partition, account, qos, reservation, dependency, nodelist)
    sets = [*(set_ or []), *(NO_DOWNGRADE_SETS if no_downgrade else ()), *queue]
    job_like = _job(job, ctx.meta.get(COMMAND), cluster, sets)
    if json and (follow or sweep):
        fail(f"give --json or {'--follow' if follow else '--sweep'}, not both")
    if sweep:
        from launcher.cli.sweep import submit_sweep

        if follow:
            fail("give --sweep or --follow, not both: `launcher logs RUN -f` follows one run of a sweep")
        submit_sweep(job_like, cluster, sets, sweep, at_once, samples, seed, limits, dry_run)
        return
    if at_once is not None or samples is not None:
        fail("--at-once and --samples need a sweep: give --sweep as well")
    from launcher.api.submit import checked

    scheduler, ready = prepared(job_like, cluster, sets, limits=limits)
    if dry_run:
        if json:
            from launcher.report.data import submitted_data

            print_json(submitted_data(ready, ready.warnings, None))
        else:
            show_prepared(console(), ready)
        return
    request = ready.request
    warnings = checked(scheduler, ready)
    if not json:
        show_plan(console(), request.job, request.cluster, request.plan, warnings, ready.offered)
    try:
        run_dir = scheduler.submit(ready)
    except KeyboardInterrupt:
        _interrupted(request.run_id)
    handle = scheduler.handle(run_dir)
    ways = f"follow: launcher logs {request.run_id} -f    cancel: launcher cancel {request.run_id}"
    with telling_of(f"{request.run_id} was submitted ({ways})"):
        if json:
            from launcher.report.data import submitted_data

            print_json(submitted_data(ready, warnings, handle))
            return
        print(f"\n{request.run_id} submitted ({handle})")
        if not follow:
            print(ways)
    if follow:
        from launcher.cli.follow import follow_run

        raise SystemExit(follow_run(scheduler, run_dir))


def _interrupted(run_id: str) -> NoReturn:
    """Print whether an interrupted submission may have started the run, and exit."""
    from launcher.cli.output import EXIT_DETACHED, fail
    from launcher.rundir.find import RunNotFoundError, find_run

    try:
        find_run(run_id)
    except RunNotFoundError:
        fail(f"interrupted: {run_id} was not submitted", EXIT_DETACHED)
    fail(
        f"interrupted: {run_id} may have been started: `launcher status {run_id}` shows it, "
        f"`launcher cancel {run_id}` ends it",
        EXIT_DETACHED,
    )


def run(
    ctx: typer.Context,
    job: JobOrCommand = None,
    cluster: ClusterName = "local",
    set_: Sets = None,
    no_downgrade: NoDowngrade = False,
    max_price: MaxPrice = None,
    budget: Budget = None,
    max_hours: MaxHours = None,
    unplanned: Unplanned = False,
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    reservation: Reservation = None,
    dependency: Dependency = None,
    nodelist: Nodelist = None,
) -> None:
    """Submit a job and follow its logs. The exit code is that of the run's verdict."""
    submit(
        ctx, job, cluster, set_, dry_run=False, no_downgrade=no_downgrade, follow=True,
        max_price=max_price, budget=budget, max_hours=max_hours, unplanned=unplanned,
        partition=partition, account=account, qos=qos, reservation=reservation,
        dependency=dependency, nodelist=nodelist,
    )  # fmt: skip
