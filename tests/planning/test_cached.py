"""Answers of a task's code are kept on disk, refusals too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.memory.states import Ranks
from launcher.memory.store import TraceStore
from launcher.memory.trace import NotAffineError
from launcher.planning.cached import CachedSource
from launcher.planning.source import NotCompiledError, NoTraceError
from launcher.spec.recipe import Recipe

RECIPE = Recipe(precision="fp32", optimizer="adamw", sharding="none", micro_batch_size=1, grad_accum=1)


@pytest.mark.parametrize("kind", [NoTraceError, NotCompiledError, NotAffineError])
def test_what_cannot_be_traced_is_not_traced_again_by_the_next_plan(
    tmp_path: Path, kind: type[Exception]
) -> None:
    code = tmp_path / "mine.py"
    code.write_text("")

    class Refuses:
        def files(self) -> list[Path]:
            return [code]

        def trace(self, *_: Any, **__: Any) -> Any:
            raise kind("for this reason")

    def source(make: Any) -> CachedSource:
        return CachedSource(TraceStore(tmp_path, "mine:Task", {}, "/here"), make)

    with pytest.raises(kind, match="for this reason"):
        source(Refuses).trace(RECIPE, Ranks(1, 1, on_gpu=True))
    again = source(lambda: pytest.fail("the task's code was imported again"))
    with pytest.raises(kind, match="for this reason"):
        again.trace(RECIPE, Ranks(1, 1, on_gpu=True))
