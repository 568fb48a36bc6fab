"""`launcher submit --sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.api.given import JobLike


def submit_sweep(
    job: JobLike,
    cluster_name: str,
    sets: Sequence[str],
    sweeps: Sequence[str],
    at_once: int | None,
    dry_run: bool,
) -> None:
    from launcher.api.sweep import checked_sweep, prepared_sweep, scheduler_of_sweep
    from launcher.cli.output import console
    from launcher.report.terminal import show_plan, show_prepared
    from launcher.schedulers.slurm.sweep import submit

    sweep = prepared_sweep(job, cluster_name, sets, sweeps, at_once)
    first = sweep.runs[0]
    if dry_run:
        show_prepared(console(), first)
        print(f"\n# ==> {sweep.folder / sweep.array.path} <==\n{sweep.array.text}")
        print(f"{len(sweep.runs)} runs: {sweep.runs[0].request.run_id} .. {sweep.runs[-1].request.run_id}")
        return
    request, scheduler = first.request, scheduler_of_sweep(sweep)
    warnings = checked_sweep(scheduler, sweep)
    show_plan(console(), request.job, request.cluster, request.plan, warnings)
    handles = submit(sweep, scheduler)
    print(f"\n{len(handles)} runs submitted as one array ({handles[0].rpartition('_')[0]})")
    for ready, handle in zip(sweep.runs, handles, strict=True):
        print(f"{ready.request.run_id}  {handle}  {' '.join(ready.about['sweep']['values'])}")
    print(f"all of them: launcher status {sweep.id}    cancel: launcher cancel {sweep.id}")
