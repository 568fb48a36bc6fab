"""`launcher export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, RunName


def export(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="write into this new or empty directory")],
    run: RunName = None,
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--step", help="export the checkpoint of this step; the newest complete one if left out"
        ),
    ] = None,
    best: Annotated[
        bool,
        typer.Option("--best", help="export the checkpoint with the lowest held-out loss (train.keep_best)"),
    ] = False,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--dtype", metavar="fp32|bf16", help="convert the weights; unchanged if left out"),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="after training with an adapter: write the whole model, with the adapter merged"
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Write the weights of a checkpoint as safetensors, with the names of your model.

    After training with an adapter, only the adapter is written, in peft's format.
    """
    from launcher.cli.output import EXIT_REFUSED, fail, print_json
    from launcher.rundir.find import find_run
    from launcher.schedulers.lookup import scheduler_of
    from launcher.spec.progress import working
    from launcher.spec.quantities import format_bytes

    if dtype not in (None, "fp32", "bf16"):
        fail(f"--dtype {dtype}: it must be fp32 or bf16")
    run_dir = find_run(run)
    if (where := scheduler_of(run_dir).where(run_dir)) != str(run_dir.path):
        if where.startswith("runpod:"):
            instead = f"run `launcher runpod download {run_dir.id} DIR`, then `launcher export DIR --to DIR2`"
            fail(f"its checkpoints are on {where}: {instead}", EXIT_REFUSED)
        host, _, path = where.partition(":")
        fail(f"its checkpoints are on {host}: run `launcher export {path} --to DIR` there", EXIT_REFUSED)
    try:
        with working("importing torch"):
            import safetensors  # noqa: F401
            import torch
    except ImportError as error:
        fail(
            f"{error}; reading a checkpoint needs launcher's extra `train`: "
            "pip install '.[train]' in its checkout"
        )
    from launcher.train.checkpoints.export import ExportError
    from launcher.train.checkpoints.export import export as write
    from launcher.train.checkpoints.folder import RefusedError, check_markers, complete_checkpoints
    from launcher.train.checkpoints.retention import best as best_of

    complete = complete_checkpoints(run_dir.checkpoints)
    if step is None:
        try:
            check_markers(run_dir.checkpoints, max(complete, default=0))
        except RefusedError as error:
            fail(str(error), EXIT_REFUSED)
    if not complete:
        fail(f"{run_dir.id} has no complete checkpoint of launcher's own entrypoint", EXIT_REFUSED)
    if best and step is not None:
        fail("give --step or --best, not both")
    if best and (step := best_of(complete)) is None:
        fail(f"no checkpoint of {run_dir.id} has a held-out loss: train.keep_best was not set", EXIT_REFUSED)
    chosen = step if step is not None else max(complete)
    if chosen not in complete:
        steps = ", ".join(map(str, complete))
        fail(f"{run_dir.id} has no complete checkpoint of step {chosen}; there are {steps}")
    types = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}
    try:
        if merge:
            from launcher.api.merged_adapter import export_merged

            files = export_merged(run_dir, complete[chosen], to, types[dtype])
        else:
            files = write(complete[chosen], to, types[dtype])
    except ExportError as error:
        fail(str(error), EXIT_REFUSED)
    size = sum(file.stat().st_size for file in files)
    if json:
        print_json(
            {"run_id": run_dir.id, "step": chosen, "files": [str(file) for file in files], "bytes": size}
        )
        return
    what = files[0].name if len(files) == 1 else f"{len(files)} files and model.safetensors.index.json"
    print(f"wrote {what} ({format_bytes(size)}) of step {chosen} into {to}")
