"""A step traced on tensors without memory: what is cut short and scaled is what would have been run."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param

from launcher.memory.recipe_trace import Profile
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks
from launcher.memory.trace import (
    ALL_GATHER,
    BATCH,
    COMPUTE,
    GATHERED,
    GRADIENTS,
    REDUCE_SCATTER,
    NotAffineError,
    Trace,
    combine,
)
from launcher.memory.unroll import NotUniformError, unroll
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.train import Task
from launcher.train.task import load_task
from launcher.train.tracing.fake_mode import ASSUMPTIONS, TraceMode
from launcher.train.tracing.fake_model import make_fake, only_chunks_that_are_read
from launcher.train.tracing.tracer import Tracer, UntraceableError

GPT = ("launcher.tasks.gpt:PydocGPT", {"layers": 9, "dim": 32, "heads": 2, "context": 16, "dropout": 0.1})
LLAMA = (
    "launcher.tasks.llama:LanguageModel",
    {
        "model": {"layers": 8, "dim": 32, "heads": 2, "kv_heads": 1, "hidden": 64, "vocabulary": 128},
        "context": 16,
    },
)
JOB = Job.model_validate({"name": "traced", "task": "a:B", "batch": {"global": 8}, "steps": 1})


def tracer(reference: str, args: dict[str, Any]) -> Tracer:
    return Tracer(load_task(reference, args, "."), JOB, "cuda")


def recipe(**fields: Any) -> Recipe:
    chosen = {"precision": "bf16-mixed", "optimizer": "adamw", "sharding": "fsdp", **fields}
    return Recipe.model_validate({"micro_batch_size": 1, "grad_accum": 1, **chosen})


@pytest.mark.slow
def test_the_shorter_way_to_results_of_operators_leads_to_the_same_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, args = LLAMA
    args = {**args, "model": {**args["model"], "kv_heads": 2}}
    ranks = Ranks(4, 4, on_gpu=True)
    steps = [recipe(activations="checkpoint", tensor=2), recipe(sharding="none")]
    found = [tracer(task, args).trace(step, ranks) for step in steps]
    monkeypatch.setattr("launcher.train.tracing.fake_mode._HAS_PRIVATE_PARTS", False)
    assert found == [tracer(task, args).trace(step, ranks) for step in steps]


def test_results_of_operators_are_told_apart_by_all_that_decides_about_them() -> None:
    with TraceMode():
        x = torch.empty(4, 6)
        for again in range(2):  # the second time from what is kept
            results = [x + 1, x.to(torch.int32) + 1, x.to(torch.int32) + 1.0, x[:2], x.t() + x.t(), x.t()]
            shapes = [(tuple(one.shape), one.stride(), one.dtype) for one in results]
            assert shapes == [
                ((4, 6), (6, 1), torch.float32),
                ((4, 6), (6, 1), torch.int32),
                ((4, 6), (6, 1), torch.float32),
                ((2, 6), (6, 1), torch.float32),
                ((6, 4), (1, 6), torch.float32),
                ((6, 4), (1, 6), torch.float32),
            ], again
            same = [one.untyped_storage()._cdata == x.untyped_storage()._cdata for one in results]
            assert same == [False, False, False, True, False, True]
            assert x.add_(1) is x and [half.shape[0] for half in x.split(3)] == [3, 1]


def test_what_fsdp_allocates_on_streams_of_its_own_is_told_apart() -> None:
    traced = tracer(*LLAMA).trace(recipe(), Ranks(2, 2, on_gpu=True))
    streams: dict[str, set[str]] = {}
    for storage in traced.storages:
        streams.setdefault(storage.stream, set()).add(storage.category)
    assert set(streams) == {COMPUTE, ALL_GATHER, REDUCE_SCATTER}
    assert streams[ALL_GATHER] == {GATHERED} and GRADIENTS in streams[REDUCE_SCATTER]
    assert GRADIENTS not in streams[COMPUTE] and GATHERED in streams[COMPUTE]  # the copied-out parameters
    alone = tracer(*LLAMA).trace(recipe(sharding="none"), Ranks(1, 1, on_gpu=True))
    assert {storage.stream for storage in alone.storages} == {COMPUTE}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "fields", "world"),
    [
        (GPT, {"sharding": "none"}, 1),
        (GPT, {"sharding": "none", "activations": "checkpoint", "grad_accum": 2}, 1),
        (LLAMA, {}, 8),
        (LLAMA, {"activations": "checkpoint", "grad_accum": 2}, 8),
        (LLAMA, {"activations": "selective"}, 4),
        (LLAMA, {"activations": "offload", "precision": "bf16"}, 2),
        (LLAMA, {"activations": "compress"}, 2),
        (LLAMA, {"sharding": "fsdp-keep", "grad_accum": 2, "grad_sync": "last"}, 8),
    ],
)
def test_a_few_blocks_stand_for_all(of: Any, fields: dict[str, Any], world: int) -> None:
    traced, chosen, ranks = tracer(*of), recipe(**fields), Ranks(world, world, on_gpu=True)
    folded = traced.record(chosen, ranks)
    assert [run.extra for run in folded.runs] == [of[1].get("layers", 8) - 5]
    assert len(unroll(folded).storages) > len(folded.storages)
    # All that a trace is: every size, event, module's name, phase, and the work.
    for complete in (False, True):
        whole = traced.sample(chosen, ranks, 1, whole=True, complete=complete)
        assert whole == traced.sample(chosen, ranks, 1, complete=complete)


STAGES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"activations": "checkpoint", "precision": "bf16"}, (6, 7, 6)),
    ({"activations": "checkpoint", "grad_accum": 2, "loss_chunks": 2}, (6, 7, 7, 6)),
    ({"activations": "checkpoint", "schedule": "zero-bubble"}, (7, 8, 6)),
    ({"activations": "selective", "tensor": 2, "grad_accum": 2}, (6, 7, 6)),
    ({"activations": "keep", "sharding": "none"}, (6, 7, 9, 3)),
    ({"activations": "checkpoint"}, (7, 3, 3, 12)),
]


def traced_blocks(traced: Tracer, monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Return a list that gets the number of blocks of each recording of `traced`; None for all of them."""
    numbers: list[int | None] = []
    record = traced.record

    def noted(recipe: Recipe, ranks: Ranks, most: int | None, *, complete: bool) -> Any:
        numbers.append(most)
        return record(recipe, ranks, most, complete=complete)

    monkeypatch.setattr(traced, "record", noted)
    return numbers


def test_a_pass_needs_four_blocks_where_the_last_one_is_like_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced, ranks = tracer(*LLAMA), Ranks(8, 8, on_gpu=True)
    chosen = recipe(activations="checkpoint")
    whole = traced.sample(chosen, ranks, 2, whole=True)
    numbers = traced_blocks(traced, monkeypatch)
    assert whole == traced.sample(chosen, ranks, 2) and numbers == [4]


class Shared(Task):
    """Each layer uses a tensor of the model, which the last one is the last to need."""

    def model(self) -> nn.Module:
        return Rotated()

    def data(self, split: str) -> Any:
        return [torch.zeros(4) for _ in range(8)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch).sum(), len(batch)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Turn() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = x.cos()
        for layer in self.layers:
            x = layer(x, table)
        return x


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.linear(x * table).sin()


def test_five_blocks_are_traced_where_four_are_too_few_and_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced, ranks = Tracer(Shared(), JOB, "cuda"), Ranks(4, 4, on_gpu=True)
    chosen = recipe(precision="bf16-mixed")
    whole = traced.sample(chosen, ranks, 2, whole=True)
    numbers = traced_blocks(traced, monkeypatch)
    assert whole == traced.sample(chosen, ranks, 2) == traced.sample(chosen, ranks, 2)
    assert numbers == [4, 5, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "blocks"), STAGES)
def test_equal_stages_of_a_pipeline_share_a_recording(
    fields: dict[str, Any], blocks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, args = LLAMA
    wide = {**args["model"], "layers": sum(blocks), "kv_heads": 2}
    traced = tracer(reference, {**args, "model": wide})
    chosen, complete = recipe(pipeline=len(blocks), stages=blocks, **fields), "grad_accum" in fields
    world = 2 * len(blocks) * fields.get("tensor", 1)
    ranks = [Ranks(world, world, on_gpu=True, stage=stage) for stage in range(len(blocks))]
    whole = [traced.sample(chosen, one, 2, whole=True, complete=complete) for one in ranks]
    recorded: list[tuple[int, ...]] = []
    record = Tracer._record

    def counted(tracer: Tracer, recipe: Recipe, *args: Any, **kwargs: Any) -> Any:
        recorded.append(recipe.stages or ())
        return record(tracer, recipe, *args, **kwargs)

    monkeypatch.setattr(Tracer, "_record", counted)
    assert whole == [traced.sample(chosen, one, 2, complete=complete) for one in ranks]
    assert len(recorded) == 3 and max(sum(blocks) for blocks in recorded) <= 7


@pytest.mark.slow
def test_sizes_are_a_law_of_the_micro_batch() -> None:
    traced, chosen, ranks = tracer(*LLAMA), recipe(activations="checkpoint"), Ranks(4, 4, on_gpu=True)
    law, seven = traced.trace(chosen, ranks), traced.sample(chosen, ranks, 7)
    assert [one.at(7) for one in law.storages] == [one.fixed for one in seven.storages]
    assert law.events == seven.events
    assert law.work.backward_flops.at(7) == pytest.approx(seven.work.backward_flops.fixed)
    live = peak = 0
    for event in seven.events[: seven.phases[1][1]]:
        live += seven.storages[event].fixed if event >= 0 else -seven.storages[~event].fixed
        peak = max(peak, live)
    assert max(moment.at(7) for moment in law.highest()["forward"]) == peak


def test_what_is_live_adds_up_at_every_peak() -> None:
    law = tracer(*GPT).trace(recipe(sharding="none"), Ranks(1, 1, on_gpu=True))
    for moments in law.highest().values():
        for moment in moments:
            alive = [law.storages[number] for number in law.live_at(moment.event)]
            assert sum(storage.at(3) for storage in alive) == moment.at(3)


class Blocks(Task):
    """Blocks that differ in what no shape shows (`odd`), or that ask for a value (`asks`)."""

    def __init__(self, odd: bool = False, asks: bool = False) -> None:
        self.odd, self.asks = odd, asks

    def model(self) -> nn.Module:
        return Stack(self.odd, self.asks)

    def data(self, split: str) -> Any:
        return [torch.zeros(16) for _ in range(8)]

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch).sum(), len(batch)


class Stack(nn.Module):
    def __init__(self, odd: bool, asks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.odd, self.asks = odd, asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.odd and number % 2:
                x = x.exp().exp()
            if self.asks and number == 2 and x.sum().item() > 0:
                x = x * 2
        return x


def test_blocks_that_do_not_behave_alike_are_all_run() -> None:
    traced, ranks = Tracer(Blocks(odd=True), JOB, "cpu"), Ranks(1, 1, on_gpu=True)
    chosen = recipe(precision="fp32", sharding="none")
    with pytest.raises(NotUniformError):
        unroll(traced.record(chosen, ranks))
    assert traced.sample(chosen, ranks, 2) == traced.sample(chosen, ranks, 2, whole=True)


class Numbered(Blocks):
    """Names its blocks by number, also those that were removed."""

    def blocks(self, model: nn.Module) -> Any:
        assert isinstance(model, Stack)
        return [model.layers[number] for number in range(8)]


def test_a_model_whose_blocks_cannot_be_removed_runs_them_all() -> None:
    traced, ranks = Tracer(Numbered(), JOB, "cpu"), Ranks(1, 1, on_gpu=True)
    chosen = recipe(precision="fp32", sharding="none")
    with pytest.raises(NotUniformError, match="cannot have fewer blocks: index 5"):
        traced.record(chosen, ranks)
    assert traced.sample(chosen, ranks, 2) == traced.sample(chosen, ranks, 2, whole=True)


def test_an_error_of_the_tracer_itself_is_no_reason_to_run_all_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("storage")

    monkeypatch.setattr("launcher.train.tracing.tracer.unroll", fails)
    traced, ranks = Tracer(Blocks(), JOB, "cpu"), Ranks(1, 1, on_gpu=True)
    with pytest.raises(KeyError, match="storage"):
        traced.sample(recipe(precision="fp32", sharding="none"), ranks, 2)


def test_tensors_in_containers_of_a_module_are_traced_as_well() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
        one = torch.ones(2)
        module.kept = {"states": [(one, torch.ones(3))], "tied": module.weight}  # type: ignore[assignment]
    fake = FakeTensorMode()
    make_fake(module, fake)
    [(first, second)] = module.kept["states"]
    assert [type(t) for t in (first, second)] == [FakeTensor] * 2 and first.device.type == "cpu"
    assert module.kept["tied"] is module.weight and isinstance(module.weight.data, FakeTensor)


class Remembering(nn.Module):
    """Keeps what each layer computes in an attribute, such as attention maps for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(7))
        self.seen: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            self.seen[number] = x = torch.tanh(layer(x))
        return x


class Remembers(Task):
    def model(self) -> nn.Module:
        return Remembering()

    def data(self, split: str) -> torch.Tensor:
        return torch.zeros(8, 16)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return model(batch).square().sum(), len(batch)


def test_activations_that_a_model_keeps_in_attributes_are_there_in_the_next_step() -> None:
    for task, kept in ((Remembers(), 7 * 16 * 4), (Blocks(), 0)):
        traced, chosen = Tracer(task, JOB, "cpu"), recipe(precision="fp32", sharding="none")
        found = Profile(traced.trace(chosen, Ranks(1, 1, on_gpu=True)), ModelShapes((), 0), chosen).left
        assert (found.fixed, found.per_sample) == (0, kept), task


SCALE = torch.full((16,), 2.0)


class Scaled(Remembering):
    """Computes with a tensor that has values, although the model is built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = SCALE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x * self.scale)


class Scales(Remembers):
    def model(self) -> nn.Module:
        return Scaled()


def test_a_tensor_with_values_in_an_attribute_is_traced_without_them() -> None:
    traced = Tracer(Scales(), JOB, "cpu").trace(
        recipe(precision="fp32", sharding="none"), Ranks(1, 1, on_gpu=True)
    )
    assert traced is not None and type(SCALE) is torch.Tensor


class Exchanging(nn.Module):
    """Gathers 24 numbers per sample, and asks on the meta device for the stride of 40."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.empty(len(x), 40, device="meta").stride() == (40, 1)
        everyones = all_gather_tensor(x.new_zeros(len(x), 24), 0, dist.group.WORLD) + 1
        return self.layer(x) * everyones[:, :1]


class Exchanges(Blocks):
    def model(self) -> nn.Module:
        return Exchanging()


@pytest.mark.filterwarnings("ignore:.*all_gather_tensor:FutureWarning")
def test_a_collective_allocates_its_result_once_and_a_meta_tensor_nothing() -> None:
    chosen = recipe(precision="fp32", sharding="none")
    traced = Tracer(Exchanges(), JOB, "cpu").trace(chosen, Ranks(1, 1, on_gpu=True))
    sizes = [storage.per_sample // 4 for storage in traced.storages]
    assert sizes.count(24) == 3 and 40 not in sizes  # what is sent, what arrives, and the sum


@pytest.mark.parametrize("sends", [True, False])
def test_a_stage_evaluates_beside_the_output_that_it_has_sent_before(sends: bool) -> None:
    chosen = recipe(precision="fp32", sharding="none", pipeline=2)
    ranks = Ranks(2, 1, on_gpu=True, stage=0 if sends else 1)
    traced = tracer(*LLAMA).sample(chosen, ranks, 2, complete=True)
    first, *rest = traced.events[dict(traced.phases)["evaluation"] :]
    there = traced.storages[first]
    if sends:
        last = max(place for place, event in enumerate(rest) if event >= 0)
        assert there.at(1) == 2 * 16 * 32 * 4 and ~first in rest[last:]
    else:
        assert there.category == BATCH


def test_a_model_that_asks_for_values_says_where() -> None:
    traced, ranks = Tracer(Blocks(asks=True), JOB, "cpu"), Ranks(1, 1, on_gpu=True)
    with pytest.raises(UntraceableError, match="_local_scalar_dense"):
        traced.sample(recipe(precision="fp32", sharding="none"), ranks, 2)


class Waits(Blocks):
    """A loop until a number that the model computes is small, which an assumed number never is."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        output = model(batch)
        while output.abs().max() > 0.5:
            output = output / 2
        return output.sum(), len(batch)


def test_a_loop_that_waits_for_a_number_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.train.tracing.fake_mode.MOST_READS", 50)
    traced, ranks = Tracer(Waits(), JOB, "cpu"), Ranks(1, 1, on_gpu=True)
    with (
        pytest.raises(UntraceableError, match="reads more than"),
        patch.object(traced, "_record", wraps=traced._record) as recorded,
    ):
        traced.sample(recipe(precision="fp32", sharding="none"), ranks, 2)
    recorded.assert_called_once()  # with fewer or more blocks it would not end either


class Halts(Blocks):
    """Asks for conditions: one decides how often a block runs, unless it is about finite numbers."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.ask = ask

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        output = model(batch)
        if self.ask(output):
            output = model(output)
        return output.sum(), len(batch)


def raises_if_any(output: torch.Tensor) -> bool:
    if (output > 9).any():
        raise ArithmeticError(f"output {output.max().item()}")
    return False


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.isnan().any(),
        lambda x: not x.isfinite().all(),
        lambda x: (x.isnan() | x.isinf())[:1].any(),
        lambda x: (x != x).any(),
        raises_if_any,
        lambda x: torch.distributions.Normal(x, x.exp()).log_prob(x) is None,
    ],
)
def test_checks_of_computed_numbers_are_assumed_to_pass(ask: Any) -> None:
    one, ranks = recipe(precision="fp32", sharding="none"), Ranks(1, 1, on_gpu=True)
    once = Tracer(Halts(lambda x: False), JOB, "cpu").sample(one, ranks, 2)
    assert Tracer(Halts(ask), JOB, "cpu").sample(one, ranks, 2).work.forward_flops == once.work.forward_flops


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: (x < 0.9).any(),
        lambda x: not (x.isnan() | (x < 1)).all(),
        lambda x: x.abs().max() > 30,
        lambda x: x.count_nonzero() > 5,
    ],
)
def test_a_step_whose_memory_depends_on_a_condition_is_not_traced(ask: Any) -> None:
    traced, ranks = Tracer(Halts(ask), JOB, "cpu"), Ranks(1, 1, on_gpu=True)
    with pytest.raises(UntraceableError):
        traced.sample(recipe(precision="fp32", sharding="none"), ranks, 2)


class Drops(Blocks):
    """Chooses at random which of its layers run."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        assert isinstance(model, Stack)
        batch.requires_grad_(True)
        for layer in self.layers(model.layers):
            batch = layer(batch)
        return batch.sum(), len(batch)


@pytest.mark.parametrize(
    "layers",
    [
        lambda layers: [layer for layer in layers if random.random() < 0.2],
        lambda layers: [layer for layer in layers if not random.random() < 0.2],
        lambda layers: [layer for layer in layers if numpy.random.rand() > 0.2],
        lambda layers: layers[: random.randrange(9)],
    ],
)
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_layers_that_are_dropped_at_random_are_traced_as_if_none_were(layers: Any, sharding: Any) -> None:
    one, ranks = recipe(precision="fp32", sharding=sharding), Ranks(2, 2, on_gpu=True)
    state = random.getstate()
    dropped = Tracer(Drops(layers), JOB, "cpu").sample(one, ranks, 2)
    assert random.getstate() == state
    assert dropped == Tracer(Drops(lambda layers: layers), JOB, "cpu").sample(one, ranks, 2)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randint(2, (1,)),
        lambda: torch.randint(0, 2, ()),
        lambda: torch.bernoulli(torch.tensor(0.5)),
        lambda: torch.empty(1).bernoulli_(0.5),
        lambda: torch.zeros(1, dtype=torch.int64).random_(2),
        lambda: torch.zeros(1, dtype=torch.int64).random_(0, 2),
    ],
)
def test_a_step_that_drops_layers_by_numbers_that_torch_draws_is_not_traced(draw: Any) -> None:
    """It was planned as if no layer ran."""
    traced = Tracer(Drops(lambda layers: [layer for layer in layers if not draw().item()]), JOB, "cpu")
    with pytest.raises(UntraceableError):
        traced.sample(recipe(precision="fp32", sharding="none"), Ranks(1, 1, on_gpu=True), 2)


def test_a_whole_number_that_torch_draws_is_in_its_range() -> None:
    drawn = list[int]()

    def draw(layers: Any) -> Any:
        drawn.append(int(torch.randint(3, 6, ())))
        return layers

    one, ranks = recipe(precision="fp32", sharding="none"), Ranks(1, 1, on_gpu=True)
    Tracer(Drops(draw), JOB, "cpu").sample(one, ranks, 2)
    assert {*drawn} == {3, 5}


@pytest.mark.parametrize(("draws", "runs"), [(False, 1), (True, 2)])
def test_only_a_step_that_draws_is_traced_twice(draws: bool, runs: int) -> None:
    traced = Tracer(
        Drops(lambda layers: [layer for layer in layers if not draws or random.random() < 0.9]), JOB, "cpu"
    )
    with patch.object(Tracer, "_run", autospec=True, side_effect=Tracer._run) as run:
        traced.sample(recipe(precision="fp32", sharding="fsdp"), Ranks(2, 2, on_gpu=True), 2, whole=True)
    assert run.call_count == runs


def test_a_step_that_trains_one_of_two_layers_at_random_is_not_traced() -> None:
    traced, ranks = (
        Tracer(Drops(lambda layers: [random.choice(layers)]), JOB, "cpu"),
        Ranks(1, 1, on_gpu=True),
    )
    with pytest.raises(UntraceableError, match="other parameters"):
        traced.sample(recipe(precision="fp32", sharding="none"), ranks, 2)


def test_a_model_that_leaves_out_its_last_blocks_is_traced_whole() -> None:
    one, ranks = recipe(precision="fp32", sharding="none"), Ranks(1, 1, on_gpu=True)
    traced = Tracer(Drops(lambda layers: layers[:2]), JOB, "cpu").sample(one, ranks, 2)
    assert sorted(traced.complete) == [f"layers.{at}.{name}" for at in (0, 1) for name in ("bias", "weight")]


class Adapted(Blocks):
    """Each third of its blocks uses a further layer, which all have."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(WithExtra(number % 3 == 0) for number in range(12)))


class WithExtra(nn.Module):
    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.layer, self.extra, self.uses = nn.Linear(16, 16), nn.Linear(16, 16), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x + self.extra(x) if self.uses else x


def test_blocks_that_stand_for_others_use_all_their_parameters() -> None:
    task, one = Adapted(), recipe(precision="fp32", sharding="none")
    traced = Tracer(task, JOB, "cpu").sample(one, Ranks(1, 1, on_gpu=True), 2)
    model = task.model()
    model(torch.zeros(2, 16)).sum().backward()
    assert traced.complete == {name for name, p in model.named_parameters() if p.grad is not None}


class ReadsIntegers(Blocks):
    """Reads what its samples contain, also in ways that torch does for real tensors only."""

    def data(self, split: str) -> Any:
        return [(torch.ones(6, 16), torch.tensor(4), torch.tensor([True] * 3 + [False] * 3))] * 8

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        rows, lengths, mask = batch
        assert lengths.tolist() == [4] * len(rows) and (lengths == torch.tensor(list(lengths))).all()
        inside = torch.arange(6) < lengths[:, None]
        inside[:, 0] = False
        kept = model(rows[inside & mask])
        return kept.sum(), int(mask.sum())


def test_code_may_read_the_integers_of_the_sample() -> None:
    traced, ranks = Tracer(ReadsIntegers(), JOB, "cpu"), Ranks(1, 1, on_gpu=True)
    trace = traced.sample(recipe(precision="fp32", sharding="none"), ranks, 4)
    rows_of_a_sample = 2  # the second and the third
    outputs = [one.at(1) for one in trace.storages if one.module == "layers.7"]
    assert 4 * rows_of_a_sample * 16 * 4 in outputs
    batch = [one.at(1) for one in trace.storages if one.category == BATCH]
    assert sorted(batch) == [4 * 6, 4 * 8, 4 * 6 * 16 * 4]


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_the_chunks_of_fsdp_are_those_of_torch(rows: int, ranks: int) -> None:
    x = torch.arange(3 * rows).view(rows, 3)
    with only_chunks_that_are_read():
        ours = _fsdp_param._chunk_with_empty(x, ranks, dim=0)
    theirs = _fsdp_param._chunk_with_empty(x, ranks, dim=0)
    assert len(ours) == len(theirs) and [*map(torch.Tensor.tolist, ours)] == [
        *map(torch.Tensor.tolist, theirs)
    ]


def test_computed_indices_are_assumed_to_occur_equally_often() -> None:
    x = torch.empty(3, 4)
    with TraceMode(knows_integers=True, assumed=ASSUMPTIONS[0]) as mode:
        fake = mode.new(x)
        assert fake.topk(2).indices.tolist() == [[0, 1], [2, 3], [0, 1]]
        assert fake.argsort(0).tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]]
        assert fake.argmax(-1).tolist() == [0, 1, 2]
        assert fake.max(0).indices.bincount(minlength=3).tolist() == [2, 1, 1]


def test_another_order_of_events_is_no_law() -> None:
    traced, ranks = tracer(*GPT), Ranks(1, 1, on_gpu=True)
    kept = traced.sample(recipe(sharding="none"), ranks, 2)
    recomputed = traced.sample(recipe(sharding="none", activations="checkpoint"), ranks, 3)
    with pytest.raises(NotAffineError):
        combine(kept, recomputed, 2)


def test_a_trace_survives_the_disk(tmp_path: Any) -> None:
    from launcher.memory.store import TraceStore, pack_trace, unpack_trace

    law = tracer(*GPT).trace(recipe(), Ranks(2, 2, on_gpu=True))
    source = tmp_path / "mine.py"
    source.write_text("a = 1")
    store = TraceStore(tmp_path, "mine:Task", {}, "/here")
    assert store.get("law") is None
    store.reset([source])
    store.put("law", pack_trace(law))
    again = TraceStore(tmp_path, "mine:Task", {}, "/here")
    packed = again.get("law")
    assert isinstance(packed, dict)
    assert unpack_trace(packed) == law and isinstance(unpack_trace(packed), Trace)
    source.write_text("a = 2")  # the code has changed: what was traced does not hold any more
    assert TraceStore(tmp_path, "mine:Task", {}, "/here").get("law") is None
    source.write_text("a = 1")
    assert TraceStore(tmp_path, "mine:Task", {}, "/here").get("law") == packed
    (tmp_path / "torch.py").touch()  # would be imported in place of another module
    assert TraceStore(tmp_path, "mine:Task", {}, "/here").get("law") is None
