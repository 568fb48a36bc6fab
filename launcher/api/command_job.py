"""A job that consists of a command only: `launcher run -- python train.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from launcher.api.given_job import as_given_job
from launcher.api.prepare import named_cluster, with_hardware
from launcher.spec.command import uses
from launcher.spec.errors import UsageError

BATCH_PLACEHOLDERS = ("micro_batch_size", "grad_accum", "global_batch")


def job_of_command(command: Sequence[str], cluster: str, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of a job file for `command`.

    If the command does not use the batch, it is one sample per rank. Raises SpecError, and UsageError if the
    command uses the batch and `sets` has none.
    """
    if not command:
        raise UsageError("there is no command after `--`")
    job: dict[str, Any] = {"name": _name(command), "command": list(command), "batch": {"global": 1}}
    if any(text.startswith(("batch.global=", "batch=")) for text in sets):
        return job
    if any(uses(tuple(command), name) for name in BATCH_PLACEHOLDERS):
        raise UsageError("the command uses the batch: give the samples of a step, e.g. --set batch.global=64")
    validated = as_given_job(job).job(sets)
    resources = validated.resources
    profile = with_hardware(named_cluster(cluster, sets), validated)
    gpus = profile.gpus_per_node if resources.gpus_per_node is None else resources.gpus_per_node
    return {**job, "batch": {"global": resources.nodes * (resources.ranks_per_node or gpus or 1)}}


def _name(command: Sequence[str]) -> str:
    """Name the job after its script or module, otherwise after the program."""
    program, rest = PurePath(command[0]), command[1:]
    if re.fullmatch(r"python[\d.]*", program.name) and "-c" not in rest:
        if "-m" in rest[:-1]:
            return rest[rest.index("-m") + 1].rpartition(".")[2][:100]
        program = next((PurePath(part) for part in rest if part.endswith(".py")), program)
    return program.stem[:100] or "command"
