"""`launcher submit --sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.api.given_job import JobLike
    from launcher.api.prepare import Limits
    from launcher.schedulers.base import PreparedSweep


def submit_sweep(
    job: JobLike,
    cluster_name: str,
    sets: Sequence[str],
    sweeps: Sequence[str],
    at_once: int | None,
    samples: int | None,
    seed: int,
    limits: Limits,
    dry_run: bool,
) -> None:
    from launcher.api.sweep import checked_sweep, prepared_sweep
    from launcher.cli.output import EXIT_DETACHED, console, fail, telling_of
    from launcher.report.terminal import show_plan, show_prepared
    from launcher.schedulers.lookup import scheduler_of

    scheduler, sweep = prepared_sweep(job, cluster_name, sets, sweeps, at_once, samples, seed, limits)
    first = sweep.runs[0]
    if dry_run:
        show_prepared(console(), first)
        if sweep.script is not None:
            print(f"\n# ==> {sweep.folder / sweep.script.path} <==\n{sweep.script.text}")
        print(f"\n{len(sweep.runs)} runs:")
        for ready in sweep.runs:
            print(f"{ready.request.run_id}  {' '.join(ready.values)}")
        return
    request = first.request
    warnings = checked_sweep(sweep, scheduler)
    show_plan(console(), request.job, request.cluster, request.plan, warnings)
    try:
        runs = scheduler.submit_sweep(sweep)
    except KeyboardInterrupt:
        fail(_interrupted_message(sweep), EXIT_DETACHED)
    handles = [scheduler_of(run).handle(run) for run in runs]
    array = f" as one array ({handles[0].rpartition('_')[0]})" if sweep.script is not None else ""
    ways = f"all of them: launcher status {sweep.id}    cancel: launcher cancel {sweep.id}"
    with telling_of(f"{len(handles)} runs were submitted ({ways})"):
        print(f"\n{len(handles)} runs submitted{array}")
        for ready, handle in zip(sweep.runs, handles, strict=True):
            print(f"{ready.request.run_id}  {handle}  {' '.join(ready.values)}")
        print(ways)


def _interrupted_message(sweep: PreparedSweep) -> str:
    """Return a message about the runs that an interrupted submission has submitted."""
    from launcher.rundir.find import RunNotFoundError, SweepRuns, find

    try:
        match = find(sweep.id)
    except RunNotFoundError:
        return f"interrupted: no run of {sweep.id} was submitted"
    if sweep.script is not None:  # one request for all runs, whose answer is not known
        what = f"{sweep.id} may have been submitted"
    else:
        count = len(match.runs) if isinstance(match, SweepRuns) else 1
        what = f"{count} of {len(sweep.runs)} runs of {sweep.id} were submitted"
    return (
        f"interrupted: {what}: "
        f"`launcher sweep status {sweep.id}` shows them, `launcher sweep cancel {sweep.id}` ends them, "
        f"`launcher sweep resume {sweep.id}` resumes those that ended without success"
    )
