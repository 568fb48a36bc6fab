"""Options that several verbs share, and what completes them in a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def complete_clusters(incomplete: str) -> list[str]:
    from launcher.render.shipped import clusters_dir
    from launcher.spec.find import cluster_folders, find_clusters

    names = find_clusters(cluster_folders(clusters_dir()))
    return sorted(name for name in names if name.startswith(incomplete))


def complete_runs(incomplete: str) -> list[str]:
    from launcher.runs.find import runs_in

    return [run.id for run in runs_in() if run.id.startswith(incomplete)]


# typer reads these annotations at run time, on Python 3.10 as well: Optional, not `|`.
JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="job file, e.g. job.yaml")]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", help="cluster profile: a name or a file", autocompletion=complete_clusters
    ),
]
Sets = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--set", "-s", metavar="A.B=C", help="override any field of the job; may be repeated"),
]
RunName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="RUN",
        help="run: id, its beginning, or a path; the newest if left out",
        autocompletion=complete_runs,
    ),
]
RunOrSweep = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="RUN",
        help="run or sweep: id, its beginning, or a run's path; the newest run if left out",
        autocompletion=complete_runs,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
