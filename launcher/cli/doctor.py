"""`launcher doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from launcher.cli.options import AsJson, Sets, complete_clusters

if TYPE_CHECKING:
    from launcher.doctor.results import Results
    from launcher.rundir.layout import RunDir

EXIT_BROKEN = 1
"Something is broken, or some checks are missing because the run ended too early."


def doctor(
    cluster: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--cluster",
            "-c",
            help="cluster profile: a name or a file; local if left out",
            autocompletion=complete_clusters,
        ),
    ] = None,
    nodes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--nodes", "-N", metavar="N", min=1, help="number of nodes to examine; 1 if left out"),
    ] = None,
    job: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--job", metavar="JOB", help="also examine whether this job can start there"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="examine only the nodes and the network between them: seconds")
    ] = False,
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="also send messages of up to 1 GiB and write larger files: minutes"),
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="also measure settings of NCCL or gloo and choose the fastest")
    ] = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="write the chosen setting into network.env of the profile"),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="show what has changed since this cluster was last found healthy"),
    ] = False,
    show: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--show", metavar="RUN", help="show the results of an earlier examination"),
    ] = None,
    set_: Sets = None,
    json: AsJson = False,
) -> None:
    """Examine a cluster, to find out whether the job or the cluster is at fault.

    The exit code is 1 if something is broken or the examination was cut off. Ctrl-C cancels the examination.
    """
    import sys

    from launcher.api.doctor import collected, last_healthy, submit_doctor
    from launcher.cli.output import fail, print_json
    from launcher.doctor.compare import changes, lines
    from launcher.doctor.options import Options
    from launcher.rundir.find import find_run
    from launcher.schedulers.lookup import scheduler_of

    if quick and (thorough or tune):
        fail(f"give --quick or --{'thorough' if thorough else 'tune'}, not both")
    if show is not None:
        run = find_run(show, by_job=True)
        scheduler = scheduler_of(run)
        ended = scheduler.status(run).ended
        scheduler.fetch(run)
        results = collected(run, ended=ended)
    else:
        options = Options("quick" if quick else "thorough" if thorough else "standard", tune)
        run, warnings = submit_doctor(cluster or "local", nodes, options, set_ or [], job)
        for line in (*(f"warning: {text}" for text in warnings), f"{run.id} submitted; to see it again: "
                     f"launcher doctor --show {run.id}"):  # fmt: skip
            print(line, file=sys.stderr)
        results = _wait_for_results(run)
        if not results.ended:
            print(f"a node has died: {run.id} is cancelled, and ends within two minutes", file=sys.stderr)
    before = last_healthy(results) if compare else None
    changed = changes(before.findings, results.findings) if before is not None else []
    if json:
        comparison_fields = {"healthy": before.run.id if before is not None else None, "changes": changed}
        print_json({**results.as_json(), **(comparison_fields if compare else {})})
    else:
        print("\n".join(results.page()))
        if before is not None:
            comparison = lines(before.run.id, changed, complete=not results.unfinished)
            print("", *comparison, sep="\n")
        elif compare:
            print(f"\nno earlier run of the doctor found {results.cluster} healthy")
    if write:
        _write(results, cluster or results.cluster)
    if results.verdict == "broken" or results.cut_off:
        raise SystemExit(EXIT_BROKEN)


def _wait_for_results(run: RunDir) -> Results:
    """Wait for the results. Ctrl-C cancels the run, because half an examination is useless."""
    import sys

    from launcher.api.doctor import wait_for_results, wait_for_start
    from launcher.schedulers.lookup import scheduler_of
    from launcher.spec.progress import working

    try:
        with working("waiting for the run to start"):
            wait_for_start(run)
        with working("examining"):
            return wait_for_results(run)
    except KeyboardInterrupt:
        print(f"cancelling {run.id}; Ctrl-C again does not wait for its end", file=sys.stderr)
        scheduler_of(run).cancel(run)
        with working("waiting for its end"):
            wait_for_results(run)
        raise


def _write(results: Results, cluster: str) -> None:
    """Show the change of the profile, and write it."""
    import sys

    from launcher.api.doctor import changed_profile, write_profile

    change = changed_profile(results, cluster)
    if change is None:
        print("nothing to change was found: the profile is unchanged", file=sys.stderr)
        return
    print(change.difference, end="", file=sys.stderr)
    write_profile(change)
    print(f"written: {change.file}", file=sys.stderr)
