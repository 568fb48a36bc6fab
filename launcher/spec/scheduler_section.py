"""The section of a profile that one scheduler reads. Its class is in that scheduler's package."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from launcher.spec.value import Value

if TYPE_CHECKING:
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job

S = TypeVar("S", bound="Section")


class Section(Value):
    """What other packages read from a section. The defaults apply to a scheduler without a section."""

    missing: ClassVar[str] = ""
    "Message if the profile has no such section; empty if the section is optional."
    runs_elsewhere: ClassVar[bool] = False
    "Whether run directories are on another machine and launcher keeps copies of them here."
    requeues: ClassVar[bool] = False
    "Whether an interrupted run continues in another job of the same length."
    has_queue: ClassVar[bool] = True
    """Whether the scheduler starts a run when its GPUs are free. Otherwise `resources.time` counts from the
    moment when the run's supervisor has them."""
    replaces_nodes: ClassVar[bool] = True
    "Whether a run may continue without a new submission after a node has lost its supervisor."
    rents: ClassVar[bool] = False
    "Whether nodes are rented for the run, and paid by the hour."
    starts_container: ClassVar[bool] = False
    "Whether the ranks always run in an image."
    asks_price: ClassVar[str] = ""
    "How a user finds a price that is not in the profile, as the end of a sentence."

    @classmethod
    def of(cls: type[S], cluster: Cluster) -> S | None:
        """Return the section of the profile's scheduler if it is of this class."""
        return cluster.section if isinstance(cluster.section, cls) else None

    @classmethod
    def used_by(cls: type[S], cluster: Cluster) -> S:
        """Return the section of a profile with this section's scheduler, or the defaults if it has none."""
        return cls.of(cluster) or cls()

    @classmethod
    def implied(cls, section: Any) -> Mapping[str, Any]:
        """Return fields of the profile that follow from a section as it was written, valid or not."""
        return {}

    def contradictions(self, cluster: Cluster) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (key path of a field of the profile, message) for each contradiction with the section."""
        yield from ()

    @property
    def assigns_gpus(self) -> bool:
        """Whether the scheduler tells each job which GPUs of a node to use."""
        return False

    def alternatives(self, cluster: Cluster) -> tuple[Cluster, ...]:
        """Return the same profile for other GPUs that the run may get instead."""
        return ()

    def worst_case(
        self, job: Job, nodes: int, usd_per_hour: float | None, dearest: tuple[float, int] | None
    ) -> tuple[float | None, str]:
        """Return the highest cost of rented nodes in USD (None: no limit), and what limits it.

        `dearest`: USD per hour and seconds of the offer that can cost the most, if the provider was asked.
        """
        raise NotImplementedError


class ThisMachine(Section):
    """The facts of `scheduler: local`, which has no section in a profile."""

    has_queue: ClassVar[bool] = False


@dataclass(frozen=True)
class At:
    """Marks a field whose section is the class `name` in `launcher.schedulers.{package}.profile`.

    The class is imported when a profile is first read: `spec` cannot import from the schedulers.
    """

    package: str
    name: str

    @property
    def section_class(self) -> type[Section]:
        return _imported(self.package, self.name)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.section_class | None)


@functools.cache
def _imported(package: str, name: str) -> type[Section]:
    cls: type[Section] = getattr(importlib.import_module(f"launcher.schedulers.{package}.profile"), name)
    return cls


def missing_section(model: type[BaseModel], scheduler: str) -> str:
    """Return what a profile without its scheduler's section lacks; empty if the section is optional."""
    if issubclass(model, Section) and model.missing:
        return model.missing
    required = [name for name, info in fields_in(model).items() if info.is_required()]
    return f"a `{scheduler}:` section with {', '.join(required)}" if required else ""


def fields_in(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by their names in a file."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def annotation_of(info: FieldInfo) -> Any:
    """Return the type of a field's value. For a section, return its class."""
    return next((mark.section_class for mark in info.metadata if isinstance(mark, At)), info.annotation)
