"""What a job needs on every node before it can start. The doctor's command carries it to the nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from launcher.spec.optimizer_table import OPTIMIZERS, State

if TYPE_CHECKING:  # `launcher why` reads the doctor's options, and needs none of these
    from launcher.planning.plan import Plan
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job
    from launcher.spec.recipe import Recipe

FIELDS = ("name", "task", "args", "command", "batch", "steps", "epochs")
"Fields of the job that name what it needs."
SAVED_BYTES: Mapping[State, int] = {"bf16": 2, "8-bit": 1, "fp32-per-row": 0}
"Bytes per parameter of an optimizer state in a checkpoint. Other states are as large as the parameter."


@dataclass(frozen=True)
class JobNeeds:
    """What a job needs. Memory and disk are in bytes."""

    job: Mapping[str, Any]
    "FIELDS of the job file."
    secrets: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    "`setup:` of the profile, which may create files."
    image: str | None = None
    "Image of the job, or of the profile."
    contained: bool = False
    "Whether the ranks, and therefore the doctor, run in that image."
    gpu: int | None = None
    "Memory needed on each GPU, or None if the plan has no memory estimate."
    host: int | None = None
    "Host memory needed on each node."
    checkpoints: int | None = None
    "Size of all checkpoints that exist at the same time."

    @classmethod
    def of(cls, job: Job, plan: Plan, cluster: Cluster) -> JobNeeds:
        fields = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
        estimate = plan.estimate
        return cls(
            {name: fields[name] for name in FIELDS if name in fields},
            tuple(secret.name for secret in job.secrets),
            cluster.setup,
            job.image or cluster.container.image,
            cluster.starts_container,
            estimate.needed if estimate is not None and plan.layout.gpus_per_node else None,
            estimate.host_per_node if estimate is not None else None,
            _checkpoints(job, plan),
        )

    @property
    def argument(self) -> str:
        """Argument of the doctor's command that holds the needs."""
        return f"--job={json.dumps(asdict(self))}"

    @classmethod
    def of_argument(cls, argument: str) -> JobNeeds:
        """Read the argument. Raises ValueError, TypeError."""
        fields = json.loads(argument.removeprefix("--job="))
        return cls(**{**fields, "secrets": tuple(fields["secrets"]), "setup": tuple(fields["setup"])})


def checkpoint_bytes(parameters: int, recipe: Recipe) -> int:
    """Return the bytes of one checkpoint: parameters and optimizer states."""
    width = 2 if recipe.precision == "bf16" else 4
    states = OPTIMIZERS[recipe.optimizer].states
    return parameters * (width + sum(SAVED_BYTES.get(state, width) for state in states))


def _checkpoints(job: Job, plan: Plan) -> int | None:
    if plan.parameters is None or job.adapter is not None or job.task is None:
        return None
    # One more than kept, because the newest is written before the oldest is deleted.
    count = job.train.keep_checkpoints + 1 + job.train.keep_best
    return count * checkpoint_bytes(plan.parameters, plan.recipe)
