"""Schedulers that other packages register, and their sections in a cluster profile."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

from pydantic import create_model

from launcher.spec.cluster import Cluster

SCHEDULERS = "launcher.schedulers"
"Group of entry points. An entry point's name is the `scheduler:` of a profile."

BUILT_IN: tuple[str, ...] = get_args(Cluster.model_fields["scheduler"].annotation)


@functools.cache
def registered() -> Mapping[str, EntryPoint]:
    """Return the entry point of each scheduler of another package, by name."""
    found = entry_points(group=SCHEDULERS)
    return {entry.name: entry for entry in found if entry.name not in BUILT_IN}


def cluster_model(scheduler: object) -> type[Cluster]:
    """Return the model of a profile with this `scheduler:`.

    If a registered scheduler has a `Section` (a pydantic model), the profile has a field of the scheduler's
    name. An unknown scheduler gets the plain model, whose validation refuses it.
    """
    if scheduler in BUILT_IN or not isinstance(scheduler, str) or scheduler not in registered():
        return Cluster
    return _with_section(scheduler)


@functools.cache
def _with_section(name: str) -> type[Cluster]:
    section = getattr(registered()[name].load(), "Section", None)
    fields: dict[str, Any] = {"scheduler": (Literal[name], ...)}
    if section is not None:
        fields[name] = (section | None, None)
    return create_model("Cluster", __base__=Cluster, **fields)
