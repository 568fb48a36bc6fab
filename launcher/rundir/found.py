"""What the ranks of a run have found in its model and the job does not declare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_FIELDS = {"batch-norm": "batch_norm", "couples-samples": "couples_samples"}
"Event -> field of the job's `model:`."


def found_in_model(events: Iterable[dict[str, Any]]) -> dict[str, bool]:
    """The fields of `model:` that are true all the same."""
    kinds = {event.get("event") for event in events}
    return {field: True for kind, field in _FIELDS.items() if kind in kinds}
