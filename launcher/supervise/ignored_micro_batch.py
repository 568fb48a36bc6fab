"""Detect a `command:` that ignores launcher's micro-batch.

launcher cannot see what the command reads, so it compares failures with different micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from pydantic import ValidationError

from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir
from launcher.spec.command import environment_name, uses
from launcher.spec.events import AttemptEnded, since_submission
from launcher.spec.quantities import format_bytes
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import Verdict

Earlier = Sequence[tuple[Recipe, Verdict]]
"Attempts of this run since it was last submitted or resumed, oldest first."

SAME_FAILURES = 3
"Number of consecutive attempts, each with a smaller micro-batch, that must fail at the same place."
SAME_FREE = 0.01
"""Maximum difference in free memory between two such failures, as a fraction of the requested bytes. For
failures at different places, free memory is anywhere below the requested bytes."""
MIN_REQUEST = 20 * 2**20
"""Smaller requests in bytes are ignored. PyTorch's allocator reserves up to this much for a small request
(`kLargeBuffer` of its CUDACachingAllocator), so free memory does not identify the place of the failure."""


def ignores_micro_batch(
    command: tuple[str, ...], recipe: Recipe, verdict: Verdict, earlier: Earlier
) -> str | None:
    """Return why a smaller micro-batch cannot help, or None if it may help.

    A placeholder shows that the command uses the value. It may also read environment variables, which
    launcher cannot see.
    """
    if uses(command, "micro_batch_size") or uses(command, "grad_accum"):
        return None
    latest = [*earlier[1 - SAME_FAILURES :], (recipe, verdict)]
    sizes = [recipe_.micro_batch_size for recipe_, _ in latest]
    falling = len(latest) == SAME_FAILURES and all(b < a for a, b in pairwise(sizes))
    if not falling or not all(_same_place(a, b) for (_, a), (_, b) in pairwise(latest)):
        return None
    assert verdict.memory is not None and verdict.memory.requested is not None
    return (
        f"the same failure with micro-batch {', '.join(map(str, sizes))}, each time asking for "
        f"{format_bytes(verdict.memory.requested)} with as much free: the command seems to ignore the "
        "micro-batch, so a smaller one does not help. It should use {micro_batch_size} or "
        f"{environment_name('micro_batch_size')} of its environment"
    )


def _same_place(a: Verdict, b: Verdict) -> bool:
    """Return whether two failures look alike. False unless both report requested and free bytes."""
    if a.failure != b.failure or a.memory is None or b.memory is None:
        return False
    size, free, other = a.memory.requested, a.memory.free, b.memory.free
    if size is None or size != b.memory.requested or size < MIN_REQUEST or free is None or other is None:
        return False
    # A weight's gradient has the same size with every micro-batch, but the free memory before it differs.
    return abs(free - other) <= SAME_FREE * size


def judged_since_start(run: RunDir) -> Earlier:
    """Return the attempts with verdicts since a user last submitted or resumed the run."""
    judged_attempts = []
    for event in since_submission(run.read_events()):
        if not isinstance(event, AttemptEnded):
            continue
        attempt = run.attempt(event.attempt)
        record = attempt.read_verdict()
        with suppress(ValidationError):
            recipe = Recipe.model_validate(read_record(attempt.recipe))
            if record is not None:
                judged_attempts.append((recipe, record.verdict))
    return judged_attempts
