"""Answers of a task's code are kept on disk, refusals too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.memory.states import Ranks
from launcher.memory.store import TraceStore
from launcher.memory.trace import NotAffineError
from launcher.planning.cached import CachedSource
from launcher.planning.model_source import NotCompiledError, NoTraceError
from launcher.planning.recipe_and_ladder import Decider, Decision
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train.tracing.task_source import TaskSource

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


def test_the_next_plan_reads_no_complete_trace_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"activations": "keep", "optimizer": "adamw", "offload": "none", "loss_chunks": 1}
    fields = {"name": "kept", "task": "launcher.tasks.llama:LanguageModel", "args": {"context": 16}}
    job = Job.model_validate({**fields, "batch": {"global": 4}, "steps": 1, "recipe": recipe})
    gpu = {"type": "NVIDIA A100-SXM4-80GB", "count": 1, "memory": "79.1GiB"}
    node = {"gpu": gpu, "cpus": 8, "memory": "100GiB"}
    cluster = Cluster.model_validate({"name": "one", "scheduler": "local", "node": node})
    asked: list[Any] = []
    get = TraceStore.get
    monkeypatch.setattr(TraceStore, "get", lambda self, key: [asked.append(key), get(self, key)][1])

    def decided(make: Any) -> Decision:
        store = TraceStore(tmp_path, str(job.task), job.shaped_by, "/here")
        return Decider(job, cluster, CachedSource(store, make)).decide(confirm_rungs=True)

    def complete() -> list[Any]:
        return [key for key in asked if key[0] == "trace" and key[-1]]

    first = decided(lambda: TaskSource(job, Path.cwd()))
    assert complete()
    asked.clear()
    assert decided(lambda: pytest.fail("the task's code was imported again")) == first
    assert asked and not complete()
