"""Properties of a run's model that its ranks found and the job does not declare."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.spec.events import BatchNorm, CouplesSamples, Event

_FIELDS = {BatchNorm: "batch_norm", CouplesSamples: "couples_samples"}
"Event -> field of the job's `model:`."


def found_in_model(events: Iterable[Event]) -> dict[str, bool]:
    """The fields of `model:` that are true although the job does not say so."""
    found = {type(event) for event in events}
    return {field: True for event, field in _FIELDS.items() if event in found}
