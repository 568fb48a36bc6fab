"""`launcher resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from launcher.cli.options import AsJson, RunName, complete_clusters

if TYPE_CHECKING:
    from launcher.api.resume import Resumed
    from launcher.rundir.layout import RunDir

_REST = "for the rest of the run, which is planned again"


def resume(
    run: RunName = None,
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set",
            "-s",
            metavar="A.B=C",
            help=f"override any field of the job, or with cluster.A.B of the profile, {_REST}",
        ),
    ] = None,
    cluster: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--cluster",
            "-c",
            help=f"use another cluster profile {_REST}",
            autocompletion=complete_clusters,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="stream the logs until the run ends")
    ] = False,
    json: AsJson = False,
) -> None:
    """Continue from the last checkpoint, with the recipe of the last attempt or with your changes."""
    from launcher.api.resume import resume as resume_run
    from launcher.cli.follow import follow_run
    from launcher.cli.output import fail, telling_of
    from launcher.rundir.find import find_run
    from launcher.rundir.time import now

    if json and follow:
        fail("give --json or --follow, not both")
    run_dir, since = find_run(run), now()
    resumed = resume_run(run_dir, set_ or [], cluster)
    with telling_of(f"{run_dir.id} was resumed"):
        _show(resumed, run_dir, json)
    if follow:
        raise SystemExit(follow_run(resumed.scheduler, run_dir, since))


def _show(resumed: Resumed, run_dir: RunDir, json: bool) -> None:
    from launcher.cli.output import print_json

    replanned, saved = resumed.again, resumed.before.checkpoint_step
    changed = (replanned.about.changed or {}) if replanned is not None else {}
    if json:
        fields = {
            "run_id": run_dir.id,
            "handle": resumed.scheduler.handle(run_dir),
            "from_step": saved,
        }
        print_json(fields | ({"changed": changed} if replanned is not None else {}))
        return
    if replanned is not None:
        from launcher.cli.output import console
        from launcher.planning.replanning import consequences
        from launcher.report.terminal import show_plan

        request, plan = replanned.request, replanned.request.plan
        show_plan(console(), request.job, request.cluster, plan, replanned.warnings, replanned.offered)
        for name, (old, new) in changed.items():
            print(f"{name}: {old} -> {new}")
        for note in consequences(changed) if request.job.task is not None else []:
            print(f"note: {note}")
    if run_dir.read_about().job.task is None:
        print(f"{run_dir.id}: its command is started again and finds what it has saved")
    else:
        start = "the start" if saved is None else f"step {saved}"
        print(f"{run_dir.id} goes on from {start}")
