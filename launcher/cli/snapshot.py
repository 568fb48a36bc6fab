"""`launcher snapshot`: what fills the memory of a running job."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, RunName


def snapshot(
    run: RunName = None,
    rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--rank", min=0, help="record only this rank; all ranks if left out"),
    ] = None,
    json: AsJson = False,
) -> None:
    """Ask a running job for a memory snapshot of its next step."""
    from launcher.api.snapshot import request_snapshot
    from launcher.cli.output import print_json
    from launcher.rundir.find import find_run

    requested = request_snapshot(find_run(run), rank)
    if json:
        print_json(dataclasses.asdict(requested))
    else:
        print(requested)
