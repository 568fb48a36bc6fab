"""`launcher clusters list | show | validate | detect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, complete_clusters

app = typer.Typer(no_args_is_help=True, help="Cluster profiles.")


@app.command("list")
def list_clusters(json: AsJson = False) -> None:
    """List the profiles. A profile in ./clusters replaces the user's one of the same name, and that replaces
    the shipped one."""
    from rich.table import Table

    from launcher.cli.output import console, print_json
    from launcher.render.shipped import clusters_dir
    from launcher.spec.errors import SpecError
    from launcher.spec.find_cluster import cluster_folders, find_clusters
    from launcher.spec.load import load_cluster
    from launcher.spec.quantities import format_bytes

    table = Table(box=None, pad_edge=False)
    for column in ("CLUSTER", "SCHEDULER", "NODES", "GPUS PER NODE", "FILE", "DESCRIPTION"):
        table.add_column(column, no_wrap=column in ("CLUSTER", "SCHEDULER"))
    records = []
    for name, file in find_clusters(cluster_folders(clusters_dir())).items():
        try:
            cluster = load_cluster(file)
        except (SpecError, OSError) as error:
            records.append({"name": name, "file": str(file), "error": str(error)})
            table.add_row(name, "[red]wrong[/]", "", "", str(file), f"launcher clusters validate {name}")
            continue
        gpu = cluster.node.gpu
        gpus = f"{gpu.count} x {gpu.type}, {format_bytes(gpu.memory)}" if gpu is not None else "as found"
        records.append(
            {
                "name": name,
                "file": str(file),
                "scheduler": cluster.scheduler,
                "description": cluster.description,
            }
        )
        table.add_row(
            name, cluster.scheduler, str(cluster.max_nodes), gpus, _short(file), cluster.description
        )
    print_json(records) if json else console().print(table)


def _short(file: Path) -> str:
    """Return "shipped" for a shipped profile, because its path is deep in the installation."""
    from launcher.render.shipped import clusters_dir

    return "shipped" if file.parent == clusters_dir() else str(file)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a profile's name or file", autocompletion=complete_clusters)],
    json: AsJson = False,
) -> None:
    """Print a profile with its comments, or (--json) its validated values."""
    from launcher.api.prepare import named_cluster
    from launcher.cli.output import print_json
    from launcher.render.shipped import clusters_dir
    from launcher.spec.find_cluster import cluster_folders, find_cluster
    from launcher.spec.yaml import read_bytes

    if json:
        print_json(named_cluster(name).model_dump(mode="json"))
        return
    file = find_cluster(name, cluster_folders(clusters_dir()))
    print(f"# {file}\n{read_bytes(file).decode(errors='replace')}", end="")


@app.command()
def validate(
    names: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[NAME|FILE]...",
            help="profiles to check; all if left out",
            autocompletion=complete_clusters,
        ),
    ] = None,
) -> None:
    """Check profiles, and show every error with its file and line."""
    from launcher.cli.output import EXIT_USAGE
    from launcher.render.shipped import clusters_dir
    from launcher.spec.errors import SpecError
    from launcher.spec.find_cluster import cluster_folders, find_cluster, find_clusters
    from launcher.spec.load import load_cluster

    folders = cluster_folders(clusters_dir())
    any_invalid = False
    for name in names or find_clusters(folders):
        try:
            cluster = load_cluster(find_cluster(name, folders))
            print(f"{name}: ok ({cluster.scheduler})")
        except (SpecError, OSError) as error:
            any_invalid = True
            print(error if isinstance(error, SpecError) else f"{error.filename}: {error.strerror}")
    if any_invalid:
        raise SystemExit(EXIT_USAGE)


@app.command()
def detect(
    login: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="HOST", help="ask this login node, named as for `ssh`; this host if left out"),
    ] = None,
    partition: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="use this partition; needed if there are several"),
    ] = None,
    gpu: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="TYPE", help="use this GPU type, as Slurm writes it; needed if there are several"
        ),
    ] = None,
    host: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="HOST", help="ask this host without a batch system, named as for `ssh`; may be repeated"
        ),
    ] = None,
) -> None:
    """Print a profile of a Slurm cluster, or of hosts, from what they report: `... > clusters/NAME.yaml`.

    It also contains what `launcher doctor` has found there.
    """
    import sys
    from functools import partial

    from launcher.api.doctor import found_earlier
    from launcher.cli.output import fail
    from launcher.doctor.profile_change import with_facts
    from launcher.schedulers.slurm import detect as slurm
    from launcher.schedulers.slurm.login import login_to

    if host:
        if login or partition or gpu:
            fail("--host is for hosts without a batch system: give it without --login, --partition and --gpu")
        from launcher.schedulers.ssh.first_profile import describes, first_profile

        print(with_facts(first_profile(host), found_earlier(partial(describes, host))), end="")
        print("Save it as clusters/NAME.yaml and check the lines with CHECK.", file=sys.stderr)
        return
    site = slurm.detect(login_to(login), login)
    choice = slurm.choose(site, partition, gpu)
    others = []
    for other in site.choices:
        if other is not choice:
            gpu_option = f" --gpu {other.gres_type}" if other.gres_type else ""
            others.append(f"  {other.words} (--partition {other.partition.name}{gpu_option})")
    if choice is None:
        fail("\n".join(["there is no such partition with such GPUs; there are", *others]))
    text = slurm.as_yaml(site, choice)
    facts = found_earlier(partial(slurm.describes, site, choice))
    print(with_facts(text, facts), end="")
    if others:
        print("\n".join(["There are others:", *others]), file=sys.stderr)
    print(
        f"Save it as clusters/{slurm.name_of(site, choice)}.yaml and check the lines with CHECK.",
        file=sys.stderr,
    )
