"""Schedulers that other packages register, and their sections in a cluster profile."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, create_model

from launcher.spec.cluster import Cluster
from launcher.spec.scheduler_section import Section, ThisMachine, missing_section

SCHEDULERS = "launcher.schedulers"
"Group of entry points. An entry point's name is the `scheduler:` of a profile."

BUILT_IN: tuple[str, ...] = get_args(Cluster.model_fields["scheduler"].annotation)


@functools.cache
def registered() -> Mapping[str, EntryPoint]:
    """Return the entry point of each scheduler of another package, by name."""
    entries = entry_points(group=SCHEDULERS)
    return {entry.name: entry for entry in entries if entry.name not in BUILT_IN}


def cluster_model(scheduler: object) -> type[Cluster]:
    """Return the model of a profile with this `scheduler:`.

    If a registered scheduler has a `Section` (a pydantic model), the profile has a field of the scheduler's
    name. An unknown scheduler gets the plain model, whose validation refuses it.
    """
    if scheduler in BUILT_IN or not isinstance(scheduler, str) or scheduler not in registered():
        return Cluster
    return _with_section(scheduler)


_WITHOUT_SECTION: Mapping[str, type[Section]] = {"local": ThisMachine}


def facts_of(scheduler: str) -> type[Section]:
    """Return the class with the facts of a scheduler: that of its section, otherwise the defaults."""
    model = cluster_model(scheduler).section_type(scheduler)
    if model is not None and issubclass(model, Section):
        return model
    return _WITHOUT_SECTION.get(scheduler, Section)


@functools.cache
def _with_section(name: str) -> type[Cluster]:
    return with_section(name, getattr(registered()[name].load(), "Section", None))


def with_section(name: str, section: type[BaseModel] | None) -> type[Cluster]:
    """Return the model of a profile with the scheduler `name`, whose section is of the type `section`.

    A section without required fields is optional.
    """
    fields: dict[str, Any] = {"scheduler": (Literal[name], ...)}
    if section is None:
        return create_model("Cluster", __base__=Cluster, **fields)
    default = Field(None) if missing_section(section, name) else Field(default_factory=section)
    fields[name] = (section | None, default)
    return create_model("Cluster", __base__=Cluster, **fields)
