"""Options that several verbs share, and their shell completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def complete_clusters(incomplete: str) -> list[str]:
    from launcher.render.shipped import clusters_dir
    from launcher.spec.find_cluster import cluster_folders, find_clusters

    names = find_clusters(cluster_folders(clusters_dir()))
    return sorted(name for name in names if name.startswith(incomplete))


def complete_runs(incomplete: str) -> list[str]:
    from launcher.rundir.find import runs_in

    return [run.id for run in runs_in() if run.id.startswith(incomplete)]


# typer reads these annotations at run time, also on Python 3.10, so they use Optional instead of `|`.
JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="job file, e.g. job.yaml")]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", help="cluster profile: a name or a file", autocompletion=complete_clusters
    ),
]
Sets = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--set",
        "-s",
        metavar="A.B=C",
        help="override any field of the job, or of the profile as cluster.A.B=C; may be repeated",
    ),
]
_SLURM = "Slurm: override the profile for this submission"
Partition = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="partitions, separated by commas", rich_help_panel=_SLURM),
]
Account = Annotated[Optional[str], typer.Option(help="account to charge", rich_help_panel=_SLURM)]  # noqa: UP045
Qos = Annotated[Optional[str], typer.Option(help="quality of service", rich_help_panel=_SLURM)]  # noqa: UP045
Reservation = Annotated[Optional[str], typer.Option(help="reservation", rich_help_panel=_SLURM)]  # noqa: UP045
Dependency = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="start after other jobs, e.g. afterok:1234", rich_help_panel=_SLURM),
]
Nodelist = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="nodes that the job must get, e.g. n[1-2]", rich_help_panel=_SLURM),
]
RunName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="RUN",
        help="id of a run, its beginning or end, or a path; this project's newest run if left out",
        autocompletion=complete_runs,
    ),
]
RunOrSweep = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="RUN",
        help="id of a run or sweep, its beginning or end, or a path; this project's newest run if left out",
        autocompletion=complete_runs,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
