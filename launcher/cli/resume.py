"""`launcher resume`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, RunName, complete_clusters

_MORE = "for the rest of the run, which is planned again"


def resume(
    run: RunName = None,
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--set",
            "-s",
            metavar="A.B=C",
            help=f"override any field of the job, or with cluster.A.B of the profile, {_MORE}",
        ),
    ] = None,
    cluster: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--cluster", "-c", help=f"use another cluster profile {_MORE}", autocompletion=complete_clusters
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="stream the logs until the run ends")
    ] = False,
    json: AsJson = False,
) -> None:
    """Continue from the last checkpoint, with the recipe of the last attempt or with your changes."""
    from launcher.api.resume import resume as go_on
    from launcher.cli.follow import follow_run
    from launcher.cli.output import fail, print_json
    from launcher.rundir.find import find_run
    from launcher.rundir.time import now

    if json and follow:
        fail("give --json or --follow, not both")
    found, since = find_run(run), now()
    resumed = go_on(found, set_ or [], cluster)
    before, again = resumed.before, resumed.again
    changed = again.about["changed"] if again is not None else {}
    if json:
        answer = {
            "run_id": found.id,
            "handle": resumed.scheduler.handle(found),
            "from_step": before.checkpoint_step,
        }
        print_json(answer | ({"changed": changed} if again is not None else {}))
        return
    if again is not None:
        from launcher.cli.output import console
        from launcher.planning.replanning import consequences
        from launcher.report.terminal import show_plan

        request = again.request
        show_plan(console(), request.job, request.cluster, request.plan, again.warnings, again.offered)
        for name, (old, new) in changed.items():
            print(f"{name}: {old} -> {new}")
        for note in consequences(changed) if request.job.task is not None else []:
            print(f"note: {note}")
    if found.read_about().job.task is None:
        print(f"{found.id}: its command is started again and finds what it has saved")
    else:
        start = "the start" if before.checkpoint_step is None else f"step {before.checkpoint_step}"
        print(f"{found.id} goes on from {start}")
    if follow:
        raise SystemExit(follow_run(resumed.scheduler, found, since))
