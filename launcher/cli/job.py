"""`launcher job init` and `launcher schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Job files.")


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="file to write")] = Path("job.yaml"),
) -> None:
    """Write a commented starter job file. An existing file is never overwritten."""
    from launcher.cli.output import fail
    from launcher.render.shipped import templates_dir

    starter = (templates_dir() / "job" / "job.yaml").read_text(encoding="utf-8")
    try:
        with open(file, "x", encoding="utf-8") as target:
            target.write(starter)
    except FileExistsError:
        fail(f"{file} exists; give another name: launcher job init other.yaml")
    print(f"wrote {file}; start it with: launcher run {file} -c local")


def schema(
    name: Annotated[str, typer.Argument(metavar="job|cluster")],
) -> None:
    """Print the JSON Schema of a job or cluster file, with which an editor completes and checks the file."""
    from launcher.cli.output import fail, print_json
    from launcher.spec.schema import MODELS, json_schema

    if name not in MODELS:
        fail(f"schema {name!r}: it must be one of {', '.join(MODELS)}")
    print_json(json_schema(name))
