"""Check whether a job can start: its files, imports and secrets exist, and memory and disk suffice."""

from __future__ import annotations

from typing import Any

from launcher.doctor.checks.row import Check
from launcher.doctor.values import Expected, Measured, Opinion
from launcher.spec.quantities import format_bytes


def _must_be_empty(cause: str, cure: str) -> Any:
    """Return a judge of a list that must be empty."""

    def judge(measured: Measured, expected: Expected) -> Opinion:
        if not measured.value:
            return Opinion("good", "all")
        problems = "; ".join(measured.value)
        end = "" if problems.endswith("?") else "."
        return Opinion("broken", "all", f"{cause}: {problems}{end}", cure)

    return judge


def _enough_bytes(cause: str, cure: str, need: str) -> Any:
    """Return a judge of free bytes. `need` is the field of JobNeeds that says how many are needed."""

    def judge(measured: Measured, expected: Expected) -> Opinion:
        least = getattr(expected.job, need)
        wanted = f"at least {format_bytes(least)}"
        return Opinion("good", wanted) if measured.value >= least else Opinion("broken", wanted, cause, cure)

    return judge


def _show(value: list[str]) -> str:
    return f"{len(value)} missing" if value else "all"


ROWS = (
    Check(
        "job-image", "job's image", "job",
        unmeasured=Opinion(
            "poor", "used", "The profile starts no container: the job runs with paths.python.",
            "Set container.runtime of the profile, or install there what the job needs.",
        ),
    ),
    Check(
        "job-files", "job's files", "job",
        _must_be_empty(
            "The job file does not match what is on this node",
            "Correct the job file, or put the files where every node sees them.",
        ),
        _show,
    ),
    Check(
        "job-imports", "job's programs and imports", "job",
        _must_be_empty(
            "The job's code cannot be started here",
            "Install it for the Python of the job: paths.python, the image, or `setup:` of the profile.",
        ),
        _show,
    ),
    Check(
        "job-secrets", "job's secrets", "job",
        _must_be_empty("Secrets are empty on this node", "Set them as `secrets:` of the job says."), _show,
    ),
    Check(
        "job-disk", "room for checkpoints", "job",
        _enough_bytes(
            "The checkpoints that are kept do not fit on the disk.",
            "Free space, set paths.runs to another folder, or lower train.keep_checkpoints.", "checkpoints",
        ),
        format_bytes,
    ),
    Check(
        "job-host-memory", "host memory for the job", "job",
        _enough_bytes(
            "The plan needs more host memory than is free now.",
            "End other processes there, ask for the node alone, or offload less.", "host",
        ),
        format_bytes,
    ),
    Check(
        "job-gpu-memory", "GPU memory for the job", "job",
        _enough_bytes(
            "The plan needs more memory than a GPU has free now.",
            "End the other process (nvidia-smi), or plan for less: `launcher plan`.", "gpu",
        ),
        format_bytes,
    ),
)  # fmt: skip
