"""`launcher doctor`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, ClusterName, Sets

EXIT_BROKEN = 1
"Something is broken."


def doctor(
    cluster: ClusterName = "local",
    nodes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--nodes", "-N", metavar="N", min=1, help="number of nodes to examine; 1 if left out"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="nodes and the ways between them: seconds")] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="messages of 8 bytes to 1 GiB, larger files: minutes")
    ] = False,
    show: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--show", metavar="RUN", help="show the results of an earlier doctor's run"),
    ] = None,
    set_: Sets = None,
    json: AsJson = False,
) -> None:
    """Examine a cluster: is it the job, or the cluster? Exits with 1 if something is broken."""
    import sys

    from launcher.api.doctor import collected, submit_doctor, wait_for_results
    from launcher.cli.output import fail, print_json, working
    from launcher.doctor.options import Options
    from launcher.rundir.find import find_run
    from launcher.schedulers.of_run import scheduler_of

    if quick and thorough:
        fail("give --quick or --thorough, not both")
    if show is not None:
        run = find_run(show, by_job=True)
        scheduler_of(run).fetch(run)
        results = collected(run)
    else:
        options = Options("quick" if quick else "thorough" if thorough else "standard")
        run, warnings = submit_doctor(cluster, nodes, options, set_ or [])
        for line in (*(f"warning: {one}" for one in warnings), f"{run.id} submitted; it can be seen again: "
                     f"launcher doctor --show {run.id}"):  # fmt: skip
            print(line, file=sys.stderr)
        with working("examining"):
            results = wait_for_results(run)
    if json:
        print_json(results.as_json())
    else:
        print("\n".join(results.page()))
    if results.verdict == "broken":
        raise SystemExit(EXIT_BROKEN)
