"""`launcher render` and `launcher templates`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from launcher.cli.options import (
    Account,
    ClusterName,
    Dependency,
    JobFile,
    Nodelist,
    Partition,
    Qos,
    Reservation,
    Sets,
)

templates_app = typer.Typer(no_args_is_help=True, help="Templates of the rendered files.")


def render(
    job: JobFile,
    cluster: ClusterName = "local",
    set_: Sets = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", "-o", metavar="DIR", help="write a complete run directory instead of printing"),
    ] = None,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="show differences from the files in DIR, or from the shipped templates"),
    ] = False,
    image: Annotated[
        bool, typer.Option("--image", help="show the Dockerfile and the Apptainer definition instead")
    ] = False,
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    reservation: Reservation = None,
    dependency: Dependency = None,
    nodelist: Nodelist = None,
) -> None:
    """Show every file that submitting would write. Notes about the job go to standard error.

    Content packed into a pod's script is shown by its size.
    """
    from launcher.api.prepare import prepared, queue_sets
    from launcher.cli.output import fail
    from launcher.cli.rendered_files import image_files, show_diff, show_files, write_image, write_run_dir

    run_dir = out.absolute() if out is not None and not image else None
    queue = queue_sets(partition, account, qos, reservation, dependency, nodelist)
    _, ready = prepared(job, cluster, [*(set_ or []), *queue], run_dir)
    files = image_files(ready) if image else ready.files
    if diff:
        show_diff(ready, files, out, image)
        return
    if out is not None and out.exists() and any(out.iterdir()):
        fail(f"{out} is not empty; give another folder, or compare with --diff")
    if out is None:
        show_files(files)
    elif image:
        write_image(files, out)
    else:
        write_run_dir(ready, out)
    for warning in ready.warnings:
        print(f"note: {warning}", file=sys.stderr)


@templates_app.command("list")
def list_(
    diff: Annotated[
        bool, typer.Option("--diff", help="show how ejected templates differ from the shipped ones")
    ] = False,
) -> None:
    """List the templates, and which ejected ones in ./templates are used instead."""
    from rich.table import Table

    from launcher.cli.output import console
    from launcher.render.eject import diff_template, list_templates

    project = Path.cwd()
    infos = list_templates(project)
    if diff:
        for info in infos:
            if info.ejected:
                print(diff_template(info.name, project), end="")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("TEMPLATE", "FROM", "WHAT"):
        table.add_column(column, no_wrap=column == "TEMPLATE")
    for info in infos:
        table.add_row(info.name, "./templates" if info.ejected else "shipped", info.description)
    console().print(table)


@templates_app.command()
def eject(
    name: Annotated[str, typer.Argument(help="name of a template in `launcher templates list`")],
) -> None:
    """Copy a template into ./templates, where your changes take effect. Never overwrites a file."""
    from launcher.render.eject import eject as eject_template

    path = eject_template(name, Path.cwd())
    print(
        f"wrote {path}; launcher now uses it in this folder. "
        "`launcher templates list --diff` shows your changes"
    )
