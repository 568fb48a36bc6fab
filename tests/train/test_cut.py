"""What a stage keeps of a model, in one process; and which models cannot be cut."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.rundir.layout import RunDir
from launcher.tasks.brain import BrainAutoencoder
from launcher.tasks.gpt import PydocGPT
from launcher.tasks.llama import LanguageModel
from launcher.tasks.video import VideoLanguageModel
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.optimizers.build import build_optimizer
from launcher.train.pipeline.cut import Batch, cut
from launcher.train.pipeline_parts import Pipeline, chunks_of, in_turn
from launcher.train.rank import Rank, SetupError
from launcher.train.task import Task, TaskError
from tests.train.runs import one_rank, recipe

TASKS: dict[str, Callable[[], Task]] = {
    "gpt": lambda: PydocGPT(layers=4, dim=32, heads=2, context=16),
    "llama": lambda: LanguageModel(context=16, model={"layers": 4}),
    "video": lambda: VideoLanguageModel(max_frames=2, context=16),
    "brain": BrainAutoencoder,
}


def rank(number: int, **fields: Any) -> Rank:
    asked = recipe("none", pipeline=2, **fields)
    return one_rank(RunDir(Path("run")), number=number, world=2, recipe=asked)


def a_model(task: Task) -> nn.Module:
    model = task.model()
    if task.built_on_meta:
        task.initialise(model, 0)
    return model.eval()


@pytest.mark.parametrize("name", TASKS)
def test_what_is_in_other_stages_is_freed(name: str) -> None:
    task = TASKS[name]()
    model = a_model(task)
    parameters = {name: weakref.ref(p) for name, p in model.named_parameters()}
    cut(model, task, rank(0))
    gc.collect()
    left = {name for name, parameter in parameters.items() if parameter() is not None}
    assert left == dict(model.named_parameters()).keys() < parameters.keys()


@pytest.mark.parametrize("name", TASKS)
def test_each_parameter_is_in_one_stage_and_the_stages_together_compute_the_loss(name: str) -> None:
    task = TASKS[name]()
    torch.manual_seed(0)
    whole = a_model(task)
    stages = [copy.deepcopy(whole) for _ in range(2)]
    for number, stage in enumerate(stages):
        cut(stage, task, rank(number))
    names = [dict(stage.named_parameters()) for stage in stages]
    assert names[0] and names[1] and not names[0].keys() & names[1].keys()
    assert names[0].keys() | names[1].keys() == dict(whole.named_parameters()).keys()
    data = task.data("train")
    batch = task.collate([data[index] for index in range(2)])
    first, last = (chunk for stage in stages for chunk in chunks_of(stage))
    total, weight = last(first(batch, Batch(batch)), Batch(batch))
    expected, its_weight = task.loss(whole, batch)
    assert torch.equal(total, expected) and weight == its_weight


class Scaled(PydocGPT):
    """Its pipeline scales the embedding in each stage."""

    def pipeline(self, model: nn.Module) -> Pipeline:
        parts = super().pipeline(model)
        return replace(parts, middle=lambda x, batch: parts.middle(x * 2, batch))


class ScaledInPlace(PydocGPT):
    def pipeline(self, model: nn.Module) -> Pipeline:
        parts = super().pipeline(model)
        return replace(parts, middle=lambda x, batch: parts.middle(x.mul_(2), batch))


class Several(PydocGPT):
    def pipeline(self, model: nn.Module) -> Pipeline:
        parts = super().pipeline(model)
        return replace(parts, begin=lambda batch: (parts.begin(batch), batch))


class Remembering(PydocGPT):
    """Its pipeline calls the blocks that the model had before it was cut."""

    def pipeline(self, model: nn.Module) -> Pipeline:
        parts = super().pipeline(model)
        return replace(parts, middle=in_turn(lambda: parts.blocks))


class Backwards(PydocGPT):
    def pipeline(self, model: nn.Module) -> Pipeline:
        gpt: Any = model
        return replace(super().pipeline(model), middle=in_turn(lambda: list(gpt.blocks)[::-1]))


class Breaking(PydocGPT):
    def pipeline(self, model: nn.Module) -> Pipeline:
        gpt: Any = model
        middle = in_turn(lambda: gpt.blocks)
        return replace(super().pipeline(model), middle=lambda x, batch: middle(x, batch)[:, None] + x.mT)


class Looking(PydocGPT):
    """Its pipeline looks at a weight of the first stage in the last one."""

    def pipeline(self, model: nn.Module) -> Pipeline:
        gpt: Any = model
        parts = super().pipeline(model)
        return replace(parts, end=lambda x, batch: parts.end(x + gpt.tokens.weight.mean(), batch))


class Embedding(PydocGPT):
    """Its pipeline calls a module of the first stage in the last one."""

    def pipeline(self, model: nn.Module) -> Pipeline:
        gpt: Any = model
        parts = super().pipeline(model)
        return replace(parts, end=lambda x, batch: parts.end(gpt.tokens(x), batch))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Scaled, "middle must return its input, but it changes it"),
        (ScaledInPlace, "middle must return its input, but it changes it"),
        (Several, "begin returned tuple, not a tensor"),
        (Remembering, "look it up in the model at each call; it called none"),
        (Backwards, r"it called blocks\.3, blocks\.2, blocks\.1, blocks\.0"),
        (Breaking, "middle must return its input, but it fails: "),
    ],
)
def test_a_middle_that_does_something_apart_from_the_blocks_is_found_in_the_first_pass(
    kind: type[PydocGPT], words: str
) -> None:
    task = kind(layers=4, dim=32, heads=2, context=16)
    model = a_model(task)
    cut(model, task, rank(0))
    batch = torch.zeros((2, 17), dtype=torch.int64)
    with pytest.raises(TaskError, match=words):
        chunks_of(model)[0](batch, Batch(batch))


@pytest.mark.parametrize(
    ("kind", "raised", "words"),
    [
        (Looking, AttributeError, "tokens is in another stage of the pipeline, and so is its 'weight'"),
        (Embedding, TaskError, "tokens is in another stage, and only begin may call it"),
    ],
)
def test_a_module_of_another_stage_cannot_be_used(
    kind: type[PydocGPT], raised: type[Exception], words: str
) -> None:
    task = kind(layers=4, dim=32, heads=2, context=16)
    model = a_model(task)
    cut(model, task, rank(1))
    with pytest.raises(raised, match=words):
        chunks_of(model)[0](torch.zeros(2, 16, 32), Batch(torch.zeros((2, 17), dtype=torch.int64)))


class Forgetful(PydocGPT):
    def pipeline(self, model: nn.Module) -> Pipeline:
        return replace(super().pipeline(model), before=[model.tokens])


class Synchronous(PydocGPT):
    def model(self) -> nn.Module:
        model = super().model()
        model.synchronous = nn.SyncBatchNorm(4, affine=False)
        return model


class Uncut(PydocGPT):
    def pipeline(self, model: nn.Module) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("task", "fields", "words"),
    [
        (
            LanguageModel(model={"tied": True}),
            {},
            r"tokens\.weight is used in tokens and in tokens \(tied weights\)",
        ),
        (Forgetful(), {}, r"does not say where positions\.weight is used"),
        (Synchronous(), {}, "SyncBatchNorm waits for all ranks"),
        (Uncut(), {}, r"pipeline: 2 needs pipeline\(\) of the task, which Uncut does not have"),
        (PydocGPT(), {"stages": (2, 3)}, r"stages: \[2, 3\] are 5 blocks, but the model has 4"),
        (PydocGPT(layers=1), {}, "pipeline: 2: 2 stages are more than the 1 blocks of the model"),
    ],
    ids=["tied", "forgotten", "SyncBatchNorm", "no pipeline()", "other stages", "few blocks"],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(
    task: Task, fields: dict[str, Any], words: str
) -> None:
    with torch.device("meta"):
        model = task.model()
    with pytest.raises(SetupError, match=words):
        cut(model, task, rank(0, **fields))


def test_a_stage_without_a_trainable_parameter_is_told_by_its_number() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(SetupError, match="stage 1 of the pipeline has no trainable parameter"):
        build_optimizer(frozen, rank(1), Unlimited())
