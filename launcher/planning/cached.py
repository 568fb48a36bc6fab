"""A source that keeps the answers of another source on disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks
from launcher.memory.store import TraceStore, pack_shapes, pack_trace, unpack_shapes, unpack_trace
from launcher.memory.trace import NotAffineError, Trace
from launcher.planning.model_source import About, Args, NotCompiledError, NoTraceError, Source
from launcher.spec.mesh import WHOLE, Part
from launcher.spec.recipe import Precision, Recipe

T = TypeVar("T")
REFUSALS = {"no trace": NoTraceError, "not compiled": NotCompiledError, "not affine": NotAffineError}
"Key in the store -> the error that is kept in place of a trace."


class FromFiles(Source, Protocol):
    def files(self) -> list[Path]:
        """Return the files that determine the answers. Raises OSError if the answers are not those of the
        files as they are now."""


class CachedSource:
    """Answers from `store`, else from the source that `make` returns.

    `make` may import torch and the user's code. It is called once, when needed.
    """

    def __init__(self, store: TraceStore, make: Callable[[], FromFiles]) -> None:
        self.store, self._make = store, make

    @cached_property
    def _source(self) -> FromFiles:
        return self._make()

    @cached_property
    def _files(self) -> list[Path] | None:
        """The files that determine the answers; None if what they say now is not known."""
        try:
            return self._source.files()
        except OSError:
            return None

    def about(self, args: Args | None = None) -> About:
        return About(*self._kept(["about", args], lambda: list(self._source.about(args)), list))

    def shapes(self, precision: Precision, args: Args | None = None, part: Part = WHOLE) -> ModelShapes:
        key = ["shapes", precision, args, part]
        packed = self._kept(key, lambda: pack_shapes(self._source.shapes(precision, args, part)), dict)
        return unpack_shapes(packed)

    def trace(self, recipe: Recipe, ranks: Ranks, args: Args | None = None, *, exact: bool = False) -> Trace:
        shards = [ranks.world, ranks.per_node] if recipe.sharding != "none" else None
        key = ["trace", recipe.model_dump(), shards, ranks.stage, args, exact]

        def make() -> dict[str, Any]:
            try:
                return pack_trace(self._source.trace(recipe, ranks, args, exact=exact))
            except tuple(REFUSALS.values()) as error:
                return {name: str(error) for name, cls in REFUSALS.items() if isinstance(error, cls)}

        packed = self._kept(key, make, dict)
        for name in REFUSALS.keys() & packed.keys():
            raise REFUSALS[name](packed[name])
        return unpack_trace(packed)

    def _kept(self, key: Any, make: Callable[[], T], cls: type[T]) -> T:
        stored = self.store.get(key)
        if isinstance(stored, cls):
            return stored
        value = make()
        if self._files is None:
            return value
        # If the disk is full, the next plan only takes longer.
        with suppress(OSError):
            if not self.store.valid:
                self.store.reset(self._files)
            self.store.put(key, value)
        return value


def from_store(source: Source, key: Any, make: Callable[[], T], cls: type[T]) -> T:
    """Return the result of `make`, a JSON value of type `cls`. Use the source's store if it has one."""
    return source._kept(key, make, cls) if isinstance(source, CachedSource) else make()
