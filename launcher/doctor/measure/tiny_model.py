"""Train a tiny model with the built-in entrypoint, in a temporary run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.rundir.files import read_json
from launcher.rundir.layout import RunDir

STEPS = 3
SAMPLES = 2
"Samples of each rank in a step."
TASK = "launcher.tasks.gpt:PydocGPT"
ARGS = {"layers": 2, "dim": 32, "heads": 2, "context": 32}
"A model of 36,000 parameters."


def tiny_run(folder: Path, sharding: str, ranks: int, all_ranks: int, gpus: int, nodes: int) -> RunDir:
    """Write a run directory for `ranks` ranks into `folder`. The batch is that of `all_ranks` ranks."""
    run = RunDir(folder / sharding)
    run.attempt(0).path.mkdir(parents=True)
    job = {
        "name": "tiny",
        "task": TASK,
        "args": ARGS,
        "batch": {"global": SAMPLES * all_ranks},
        "steps": STEPS,
        "resources": {"gpus_per_node": gpus},
        "train": {"checkpoint_every": None, "lr": 1e-2, "probe": "never", "collective_timeout": 600},
    }
    # Each node has its own folder, so that no shared folder is needed.
    about = {"id": run.id, "job": job, "workdir": str(folder), "gpus_per_node": gpus, "apart": nodes > 1}
    recipe = {
        "precision": "fp32",
        "optimizer": "adamw",
        "sharding": sharding,
        "micro_batch_size": SAMPLES,
        "grad_accum": all_ranks // ranks,
    }
    run.run.write_text(json.dumps(about))
    run.attempt(0).recipe.write_text(json.dumps(recipe))
    return run


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    """Return the loss and gradient norm of each step that rank 0 has recorded."""
    return [{"loss": line["loss"], "grad_norm": line["grad_norm"]} for line in run.read_metrics()]


def error_of(run: RunDir) -> str:
    """Return the first error that a rank of this node has recorded, or "" if there is none."""
    for file in sorted((run.attempt(0).path / "errors").glob("rank-*.json")):
        error = read_json(file) or {}
        return str(error.get("exception") or error.get("message") or "")
    return ""
