"""The failure classes: exit code, what launcher does next, and advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

Action = Literal["done", "retry-same", "retry-lower", "requeue", "stop"]
Budget = Literal["same", "lower", "preemptions", "time_limits"]


@dataclass(frozen=True)
class Failure:
    """How an attempt can end, and what follows."""

    name: str
    exit_code: int
    "Exit code of `launcher run`, `launcher status` and the supervisor. Stable, see docs/exit-codes.md."
    action: Action
    budget: Budget | None = None
    advice: str = ""
    "What the user can do if the run stops. RUN stands for the run."
    did: str = "failed"
    "What a failed rank did, as in `rank 3 raised an exception`."


_RESUME = "continue with `launcher resume RUN`"
_ROWS = (
    Failure("succeeded", 0, "done"),
    Failure(
        "gpu-oom", 10, "retry-lower", "lower",
        "choose a cheaper recipe: activations: checkpoint, an 8-bit optimizer, fsdp over more GPUs, offload",
        "ran out of GPU memory",
    ),
    Failure(
        "host-oom", 11, "retry-lower", "lower",
        "ask for more resources.memory_per_node, or use fewer DataLoader workers or less offload",
        "ran out of host memory",
    ),
    Failure(
        "nccl-timeout", 12, "retry-same", "same",
        "look for the rank that stopped answering: `launcher logs RUN --stderr`",
        "lost contact with the other ranks",
    ),
    Failure(
        "rendezvous-failed", 13, "retry-same", "same",
        "check that the nodes reach each other and network.interface in the cluster profile",
        "could not connect to the other ranks",
    ),
    Failure(
        "node-failed", 14, "retry-same", "same", _RESUME, "had a fault of its GPU, driver or network adapter"
    ),
    Failure("preempted", 15, "requeue", "preemptions", _RESUME, "was ended for another job"),
    Failure("time-limit", 16, "requeue", "time_limits", _RESUME, "was ended at the time limit"),
    Failure(
        "disk-full", 20, "stop", None,
        "free space or raise the quota where the run writes, then `launcher resume RUN`",
        "ran out of disk space",
    ),
    Failure(
        "image-error", 21, "stop", None,
        "fix the image or the environment of the ranks (`container:` and `setup:` of the cluster profile)",
        "cannot run in its image",
    ),
    Failure(
        "numerical", 22, "stop", None,
        "lower the learning rate, clip gradients, compute in bf16 or fp32, or look at the data of that step",
        "computed NaN, or a number that is too large",
    ),
    Failure(
        "desync", 23, "stop", None,
        "fix the program: every rank must call the same collectives, in the same order, with equal sizes "
        "(under FSDP, call the same blocks)",
        "disagreed with the other ranks",
    ),
    Failure(
        "user-error", 17, "stop", None,
        "fix the error, then `launcher resume RUN` or submit again", "raised an exception",
    ),
    Failure("cancelled", 18, "stop", None, _RESUME, "was interrupted"),
    Failure("unknown", 19, "retry-same", "same", "read `launcher logs RUN`, then `launcher resume RUN`"),
)  # fmt: skip

FAILURES = {row.name: row for row in _ROWS}
OF_THE_CLUSTER = frozenset({"nccl-timeout", "rendezvous-failed", "node-failed"})
"Failures that may be the cluster's fault."
EXIT_CODES = {row.name: row.exit_code for row in _ROWS}

if TYPE_CHECKING:
    FailureClass = str
else:
    FailureClass = Literal[tuple(FAILURES)]


def exit_code(failure: str | None) -> int:
    """Return the exit code of a run that ended with this class, or the code of `unknown` for None."""
    return FAILURES.get(failure or "unknown", FAILURES["unknown"]).exit_code
