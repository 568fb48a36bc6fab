"""What trips up others' training loops, under real ranks."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.rundir.files import read_json_lines
from launcher.rundir.layout import RunDir
from launcher.spec.adapter import Adapter
from launcher.spec.events import StepLeftOut
from launcher.spec.verdict import EXIT_STOPPED
from launcher.supervise.judge import Evidence, judge, read_records
from launcher.train.batch_norm_modules import compute_in_fp32
from launcher.train.checkpoints.export import export
from launcher.train.ddp import DDP
from launcher.train.forward import check_loss, loss_of
from launcher.train.mesh import SHARD, TENSOR
from launcher.train.model import new_model
from launcher.train.rank import SetupError
from launcher.train.replaced_parameters import Originals
from launcher.train.shapes import read_shapes
from launcher.train.sharding.gathered_weights import refuse_changes
from launcher.train.sharding.kept_memory import KeptMemory
from launcher.train.sharding.sharding import check_shardable, check_types, shared_with_root
from launcher.train.task import Task, TaskError
from launcher.train.task_metrics import open_logged
from launcher.train.tensor_parallel import whole as whole_of
from launcher.train.undo.state_finder import StateFinder
from tests.train import traps
from tests.train.runs import any_error, error, job, losses, prepare, recipe, start


def trap(path: Path, train: dict[str, Any] | None = None, **args: Any) -> RunDir:
    return prepare(path, job(task="traps:Trap", steps=3, args=args, train=train or {}))


@pytest.mark.slow
def test_weights_that_a_block_shares_with_the_rest_stay_one_parameter_under_fsdp(tmp_path: Path) -> None:
    curves = {}
    for sharding, ranks in (("none", 1), ("ddp", 2), ("fsdp", 2)):
        run = trap(tmp_path / sharding, tied="head")
        ended = start(run, recipe(sharding, micro=8 // ranks), ranks=ranks)
        assert set(ended.codes.values()) == {0}, ended.output
        curves[sharding] = losses(run)
    assert curves["fsdp"] == pytest.approx(curves["none"], rel=1e-5)
    assert curves["ddp"] == pytest.approx(curves["none"], rel=1e-5)


@pytest.mark.slow
def test_weights_that_two_blocks_share_are_refused_under_fsdp_with_what_to_do(tmp_path: Path) -> None:
    run = trap(tmp_path / "run", tied="layers")
    assert set(start(run, recipe("fsdp")).codes.values()) <= {1, 128 + signal.SIGTERM}
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error"
    assert "layers.0.weight is shared by 2 of the units" in failure["exception"]


@pytest.mark.parametrize(
    ("sharding", "where"),
    [
        ("ddp", "same block"),
        ("none", "extra state"),
        pytest.param("zero1", "another block", marks=pytest.mark.slow),
        pytest.param("fsdp", "outside", marks=pytest.mark.slow),
    ],
)
def test_a_model_with_a_module_twice_or_an_extra_state_trains_as_on_one_rank_and_is_resumed(
    sharding: str, where: str, tmp_path: Path
) -> None:
    whole = prepare(tmp_path / "whole", job(task="traps:Repeated", steps=4, args={"where": where}))
    assert start(whole, recipe("none", micro=8), ranks=1).codes == {0: 0}
    args = {"where": where, "stop_at": 2}
    run = prepare(tmp_path / "stopped", job(task="traps:Repeated", steps=4, args=args))
    for code in (EXIT_STOPPED, 0):
        ranks = 1 if sharding == "none" else 2
        ended = start(run, recipe(sharding, micro=8 // ranks), ranks=ranks)
        assert set(ended.codes.values()) == {code}, ended.output
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


def test_a_module_that_two_blocks_have_is_refused_under_fsdp_with_what_to_do() -> None:
    for where in ("outside", "same block"):
        model = traps.Twice(where)
        shared = shared_with_root(model, [*model.blocks])
        assert shared == ({*model.again.parameters()} if where == "outside" else set())
    model = traps.Twice("another block")
    with pytest.raises(SetupError, match=r"blocks\.0\.0\.weight is shared by 2 of the units"):
        shared_with_root(model, [*model.blocks])


def test_a_parameter_without_dimensions_is_refused_under_fsdp_with_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    check_shardable(model)
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(SetupError, match=r"temperature .*torch\.zeros\(1\).* sharding: ddp"):
        check_shardable(model)


def test_a_parameter_without_elements_is_refused_under_fsdp_with_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 3)))
    with pytest.raises(SetupError, match=r"nothing .*of shape \(0, 3\).* sharding: ddp"):
        check_shardable(model)
    model.nothing.requires_grad_(False)
    check_shardable(model)


def test_a_transposed_parameter_is_refused_under_fsdp_with_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("turned", nn.Parameter(torch.randn(2, 3).t()))
    with pytest.raises(SetupError, match=r"turned .*\.contiguous\(\).* zero1"):
        check_shardable(model)


@pytest.mark.parametrize(
    ("ranks", "size", "fits"), [(2, 2, True), (2, 1, False), (4, 5, False), (4, 7, True)]
)
def test_under_fsdp_no_rank_of_a_tensor_parallel_group_has_nothing_of_a_parameter(
    ranks: int, size: int, fits: bool
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model = nn.Linear(8, size)
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), ColwiseParallel())
        refused = pytest.raises(SetupError, match=rf"weight .* size {size}.*leave the layer out")
        with nullcontext() if fits else refused:
            check_shardable(model)
    finally:
        dist.destroy_process_group()


class Turned(traps.Normed):
    def model(self) -> nn.Module:
        model = super().model()
        model.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        return model


class Sparse(traps.Normed):
    def model(self) -> nn.Module:
        model = super().model()
        model.words = nn.Embedding(4, 2, sparse=True)
        return model


class Half(traps.Normed):
    def model(self) -> nn.Module:
        return super().model().half()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Sparse(), r"^words of the model has sparse gradients.*leave out sparse=True"),
        (Turned(), r"^turn is a complex parameter.*view_as_complex"),
        (Half(), "would be trained in torch.float16.*let model\\(\\) return fp32"),
        (traps.Trap(frozen=True), "^the model has no trainable parameter"),
    ],
)
def test_a_model_that_no_optimizer_trains_is_refused_by_the_plan_too(task: Task, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        read_shapes(task, recipe("none", micro=8))


def test_ddp_has_the_attributes_of_the_model_and_refuses_its_modules() -> None:
    model = nn.Linear(2, 2)
    model.config = {"width": 2}  # type: ignore[assignment]
    with one_rank():
        replicated = DDP(model)
        assert replicated.config == {"width": 2} and replicated.module is model
        with pytest.raises(AttributeError, match=r"DDP.*absent"):
            replicated.absent  # noqa: B018
        with pytest.raises(TaskError, match=r"uses weight of the model by itself: under DDP"):
            replicated.weight  # noqa: B018


class Methods(traps.Normed):
    """Calls a method of the model, and the model itself if `calls`."""

    def __init__(self, calls: bool) -> None:
        self.calls = calls

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return (model(batch) if self.calls else model.encode(batch)).sum(), len(batch)


class Encoder(nn.Linear):
    encode = nn.Linear.forward


class Ungraded(Methods):
    def loss(self, model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        torch.set_grad_enabled(False)
        return super().loss(model, batch)


def test_code_that_switches_gradients_off_is_named() -> None:
    """torch's message in the backward pass was that a tensor has no grad_fn."""
    rank: Any = SimpleNamespace(recipe=recipe("none"), device=torch.device("cpu"))
    with torch.enable_grad(), pytest.raises(TaskError, match=r"^loss\(\) of Ungraded has switched grad"):
        loss_of(Ungraded(calls=True), Encoder(2, 2), torch.ones(2, 2), rank)


class Empty(traps.Normed):
    def model(self) -> nn.Module:
        with torch.device("meta"):
            return super().model()


def test_a_model_without_values_is_refused_unless_the_task_fills_it() -> None:
    with pytest.raises(
        TaskError, match=r"^model\(\) of Empty returned .* on the meta device, without values"
    ):
        new_model(Empty(), recipe("none"))


def test_a_loss_that_calls_only_methods_of_a_model_in_ddp_is_refused_in_its_first_step() -> None:
    rank: Any = SimpleNamespace(recipe=recipe("ddp"), device=torch.device("cpu"))
    batch = torch.ones(2, 2)
    with one_rank():
        model = DDP(Encoder(2, 2))
        loss_of(Methods(calls=True), model, batch, rank)
        with torch.no_grad():
            loss_of(Methods(calls=False), model, batch, rank)
            model(batch)
        with pytest.raises(TaskError, match=r"^loss\(\) of Methods did not call model"):
            loss_of(Methods(calls=False), model, batch, rank)


def test_fsdp_refuses_parameters_of_two_types_in_a_unit_and_a_loss_over_divided_parameters() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    with one_rank():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=(SHARD,))
        for one in (model, other):
            fully_shard(one, mesh=mesh)
        check_types(model)  # type: ignore[arg-type]
        with pytest.raises(SetupError, match=r"^bias of a block.* is torch.float64, .* torch.float32"):
            check_types(other)  # type: ignore[arg-type]
        penalty = sum(p.square().sum() for p in model.parameters())
        with pytest.raises(TaskError, match=r"^loss returned a sum that contains parameters .*weight_decay"):
            check_loss("loss", (penalty, 1))


class Penalized(traps.Normed):
    """A loss that `add`s to its sum what it computes from the model."""

    metrics = ("norm",)

    def __init__(self, add: Callable[[Penalized, nn.Module], Any]) -> None:
        self.add = add

    def loss(self, model: nn.Module, batch: Any) -> Any:
        more = self.add(self, model)
        return model(batch).square().sum() + more, len(batch)


def _in_new_data(_: object, model: nn.Module) -> float:
    model.weight.data = model.weight.data.clamp(-1, 1)
    return 0.0


def _in_place(_: object, model: nn.Module) -> float:
    model.weight.data.clamp_(-1, 1)
    return 0.0


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (lambda _, model: model.weight.norm().item(), "reads a number, .* of which each rank has a part"),
        (lambda _, model: int(model.weight.detach().max()), "reads a number"),
        (lambda task, model: task.log("norm", model.weight.norm()) or 0.0, "reads a number"),
        (_in_new_data, r"assigns `\.data` of a tensor of shape \(4, 4\) .* in place"),
        (_in_place, None),
    ],
    ids=["item", "int", "log", "data", "in place"],
)
@pytest.mark.parametrize("dimension", [SHARD, TENSOR])
def test_a_number_of_a_part_and_new_data_of_a_part_are_refused(
    add: Any, said: str | None, dimension: str
) -> None:
    sharding = "fsdp" if dimension == SHARD else "none"
    rank: Any = SimpleNamespace(recipe=recipe(sharding), device=torch.device("cpu"))
    model, cure = nn.Linear(4, 4, bias=False), {SHARD: "zero1$", TENSOR: "tensor: 1$"}[dimension]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dimension,))
        if dimension == SHARD:
            fully_shard(model, mesh=mesh)
        else:
            parallelize_module(model, mesh, ColwiseParallel(output_layouts=Replicate()))
        open_logged(Penalized.metrics)
        refused = pytest.raises(TaskError, match=f"{said}{'' if add is _in_new_data else '.* ' + cure}")
        with refused if said is not None else nullcontext():
            loss_of(Penalized(add), model, torch.ones(2, 4), rank)
        model.weight.data = model.weight.data  # torch's own again
        if dimension == TENSOR:
            penalty = model.weight.square().sum()
            with pytest.raises(
                TaskError, match=f"^loss returned a sum of which each rank has a part.* {cure}"
            ):
                check_loss("loss", (penalty, 1))
            check_loss("loss", (whole_of(penalty), 1))
    finally:
        dist.destroy_process_group()


def test_fsdp_refuses_a_gradient_that_it_would_not_add_up(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(task="traps:Penalizing", steps=2))
    assert any(start(run, recipe("fsdp", micro=4)).codes.values())
    failure = any_error(run.attempt(0))
    assert "the loss depends on layers.0.weight outside of the forward of its" in failure["exception"]
    assert failure["failure"] == "user-error" and not losses(run)


@pytest.mark.parametrize("through", [lambda one: one, lambda one: one.data], ids=["in place", "data"])
def test_fsdp_refuses_a_weight_that_forward_changes_and_one_that_is_replaced(through: Any) -> None:
    class Clamped(nn.Linear):
        changes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                if self.changes:
                    through(self.bias).clamp_(1, 2)
            return super().forward(x)

    with one_rank():
        model, x = nn.Sequential(nn.Linear(4, 4), Clamped(4, 4)), torch.ones(2, 4)
        for name, one in (("1", model[1]), ("", model)):
            fully_shard(one, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=(SHARD,)))
            refuse_changes(one, name)  # type: ignore[arg-type]
        for _ in range(3):
            model(x).sum().backward()
        weights = {name: p * 2 for name, p in model.named_parameters()}
        with pytest.raises(TaskError, match=r"^0\.weight was replaced, .*functional_call.* or zero1"):
            torch.func.functional_call(model, weights, (x,))
    with one_rank():
        one = Clamped(4, 4)
        fully_shard(one, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=(SHARD,)))
        refuse_changes(one, "1")  # type: ignore[arg-type]
        one.changes = True
        with pytest.raises(TaskError, match=r"^1\.bias was changed while FSDP had gathered it .* or zero1"):
            one(x)


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_transposed_parameter_trains_under_zero1_as_under_ddp(tmp_path: Path) -> None:
    curves = []
    for sharding in ("ddp", "zero1"):
        run = trap(tmp_path / sharding, tied="turned")
        assert start(run, recipe(sharding)).codes == {0: 0, 1: 0}
        curves.append(losses(run))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5) and len(curves[0]) == 3


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_changes_its_rows_in_the_forward_pass_is_refused_under_fsdp(kind: Any) -> None:
    with pytest.raises(SetupError, match=r"0 has max_norm.* sharding: ddp"):
        check_shardable(nn.Sequential(kind(8, 4, max_norm=1.0)))
    check_shardable(nn.Sequential(kind(8, 4)))


def test_torchscript_in_a_model_keeps_its_parameters_but_is_refused_under_fsdp() -> None:
    model = nn.Sequential(nn.Linear(2, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    Originals(model).check(model)
    with pytest.raises(SetupError, match=r"1 is TorchScript.* sharding: ddp"):
        check_shardable(model)


def sharded(model: nn.Linear) -> None:
    """Do to the parameters what FSDP does to them: put others in their place."""
    originals = Originals(model)
    model.weight = nn.Parameter(model.weight.detach()[:1])
    originals.check(model)


@pytest.mark.parametrize("use", [lambda w: w.detach(), lambda w: nn.functional.linear(torch.ones(2), w)])
def test_a_kept_reference_to_a_parameter_raises_when_it_is_used_after_sharding(use: Any) -> None:
    model = nn.Linear(2, 2)
    model.kept = [model.weight, model.bias]
    sharded(model)
    StateFinder(model)()
    assert model.kept[0].shape == (2, 2), "what asks for its size only may go on"
    use(model.weight)
    use(model.kept[1].expand(2, 2))  # a parameter that was not replaced
    with pytest.raises(TaskError, match=r"weight of the model .* kept .* zero1"):
        use(model.kept[0])


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)


def in_other_memory(model: nn.Module, task: Any) -> None:
    """Do to the parameters what a cast or a move to a GPU does: give them other memory."""
    kept = KeptMemory(model, task)
    kept.check(model)
    kept.check(model.double())


@pytest.mark.parametrize(
    "take",
    [lambda w: w.data, lambda w: w.detach(), lambda w: w.view(-1), lambda w: w[2:4], lambda w: w.t()],
    ids=["data", "detach", "view", "slice", "turned"],
)
@pytest.mark.parametrize("where", ["model", "task"])
def test_a_kept_tensor_in_the_memory_of_a_parameter_raises_when_it_is_used_after_a_cast(
    take: Any, where: str
) -> None:
    model, task = Keeps(), traps.Trap()
    owner: Any = {"model": model, "task": task}[where]
    owner.kept = {"one": [take(model.embed.weight)]}
    in_other_memory(model, task)
    StateFinder(model)()
    [kept] = owner.kept["one"]
    assert kept.numel() <= 32, "what asks for its size only may go on"
    with pytest.raises(TaskError, match=r"kept\.one\[0\] uses the memory of embed\.weight .*\.clone\(\)"):
        kept + 1


def test_buffers_arrays_and_parameters_in_the_memory_of_a_parameter_are_refused() -> None:
    model = Keeps()
    model.register_buffer("kept", model.embed.weight.data)
    with pytest.raises(SetupError, match=r"^kept uses the memory of embed\.weight"):
        in_other_memory(model, traps.Trap())
    model = Keeps()
    model.kept = model.embed.weight.detach().numpy()[::-1, 1:]  # type: ignore[assignment]
    with pytest.raises(SetupError, match=r"^kept uses the memory of embed\.weight"):
        in_other_memory(model, traps.Trap())
    model = Keeps()
    model.head = nn.Linear(4, 8)
    model.head.weight = nn.Parameter(model.embed.weight.data)
    with pytest.raises(SetupError, match=r"head\.weight .* the same nn\.Parameter"):
        in_other_memory(model, traps.Trap())


def test_what_is_in_no_memory_of_a_trained_parameter_or_is_the_parameter_goes_on() -> None:
    class Norm(nn.Linear):
        pass

    model, task = Keeps(), traps.Trap()
    model.head = nn.Linear(4, 8)
    model.head.weight = model.embed.weight
    model.same = [model.embed.weight]  # type: ignore[assignment]
    model.rnn = nn.LSTM(4, 4)
    model.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model.spectral = nn.utils.spectral_norm(Norm(4, 4))  # it has weight_orig.data until its first pass
    model.frozen = nn.Linear(4, 4).requires_grad_(False)
    model.register_buffer("table", torch.ones(4))
    model.register_buffer("part", model.table[:2])
    model.scripted = torch.jit.trace(nn.BatchNorm1d(4).eval(), torch.ones(2, 4))
    task.kept = [model.table, model.frozen.weight.data, model.embed.weight.detach().clone()]  # type: ignore[attr-defined]
    in_other_memory(model, task)
    for kept in task.kept:  # type: ignore[attr-defined]
        kept + 1
    with torch.no_grad():
        model.spectral(model.head.weight)
        model.rnn(model.normed(model.same[0]))


class Teaches(nn.Module):
    """A frozen layer and buffers, one of which is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("center", torch.zeros(6))
        self.register_buffer("part", self.center[:2])


TAKEN = {
    "data": lambda tensor: tensor.data,
    "view": lambda tensor: tensor.detach()[1:3],
    "turned": lambda tensor: tensor.data.t(),
    "itself": lambda tensor: tensor,
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN.keys())
@pytest.mark.parametrize("name", ["teacher.weight", "center"])
def test_what_is_kept_of_a_frozen_parameter_or_a_buffer_follows_it_through_a_cast(
    name: str, take: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Otherwise a teacher or a center that a task updates through it would never change."""
    model, task = Teaches(), traps.Trap()
    task.kept = [take(model.get_parameter(name) if "." in name else model.get_buffer(name))]  # type: ignore[attr-defined]
    kept = KeptMemory(model, task)
    model.bfloat16()
    kept.check(model)
    now = model.get_parameter(name) if "." in name else model.get_buffer(name)
    [mine] = task.kept  # type: ignore[attr-defined]
    mine.fill_(7)
    assert mine.dtype == torch.bfloat16
    assert torch.equal(take(now).float(), torch.full_like(take(now), 7, dtype=torch.float32))
    assert (now == 7).sum() == mine.numel(), "and nothing else was written"
    model.center[:2] = 3
    assert model.part.tolist() == [3, 3]


@pytest.mark.parametrize("name", ["teacher.weight", "center"])
def test_an_array_in_memory_of_a_frozen_parameter_or_a_buffer_is_read_only_after_a_cast(name: str) -> None:
    """The array keeps the memory that the model no longer reads: what a task wrote there was lost."""
    model, task = Teaches(), traps.Trap()
    array = model.state_dict()[name].numpy()
    before = array.copy()
    task.kept = [array[1:]]  # type: ignore[attr-defined]
    kept = KeptMemory(model, task)
    kept.check(model)
    task.kept[0][:] = before[1:]  # type: ignore[attr-defined]
    model.bfloat16()
    kept.check(model)
    assert (task.kept[0] == before[1:]).all()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="read-only"):
        task.kept[0][:] = 7  # type: ignore[attr-defined]


def keeps(where: str, model: Keeps, task: Any) -> None:
    memory = model.embed.weight.data

    def closes() -> None:
        memory.zero_()

    def by_default(values: torch.Tensor = memory) -> None:
        values.zero_()

    match where:
        case "closure":
            task.clamp = closes
        case "partial":
            task.clamp = partial(closes)
        case "default":
            task.clamp = by_default
        case "class":
            type(task).kept = [memory]
        case "hook":
            model.embed.register_forward_pre_hook(lambda module, args: memory.zero_())


@pytest.mark.parametrize("where", ["closure", "partial", "default", "class", "hook"])
def test_memory_of_a_parameter_is_found_wherever_a_task_keeps_it(where: str) -> None:
    class Task(traps.Trap):
        pass

    model, task = Keeps(), Task()
    keeps(where, model, task)
    in_other_memory(model, task)
    with pytest.raises(TaskError, match=r"uses the memory of embed\.weight"):
        {
            "class": lambda: Task.kept[0] + 1,  # type: ignore[attr-defined]
            "hook": lambda: model.embed(torch.tensor([1])),
        }.get(where, getattr(task, "clamp", None))()  # type: ignore[misc]


def test_what_is_kept_of_a_frozen_parameter_raises_when_it_is_used_after_sharding() -> None:
    model, task = Teaches(), traps.Trap()
    task.kept = [model.teacher.weight.data, model.teacher.bias.data, model.center.data]  # type: ignore[attr-defined]
    kept = KeptMemory(model, task)
    model.teacher.weight = nn.Parameter(model.teacher.weight.detach()[:1].clone(), requires_grad=False)
    kept.check(model)
    for one in task.kept[1:]:  # type: ignore[attr-defined]
        one.fill_(7)
    assert (model.teacher.bias == 7).all() and (model.center == 7).all()
    with pytest.raises(TaskError, match=r"kept\[0\] uses the memory of teacher\.weight"):
        task.kept[0].fill_(7)  # type: ignore[attr-defined]


def test_under_an_adapter_all_that_is_kept_of_the_model_is_frozen() -> None:
    model, task = Keeps(), traps.Trap()
    task.adapter, task.kept = Adapter(kind="lora"), [model.embed.weight.data]  # type: ignore[attr-defined]
    in_other_memory(model, task)
    assert torch.equal(task.kept[0], model.embed.weight)  # type: ignore[attr-defined]


def test_a_kept_parameter_of_another_stage_raises_when_it_is_used() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = [model[0].weight, model[1].weight]
    originals = Originals(model)
    model[0] = nn.Identity()
    originals.check(model)
    kept[1] + 1
    with pytest.raises(TaskError, match=r"0\.weight of the model .* another stage"):
        kept[0] + 1


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_that_sharding_replaces_is_refused(register: str) -> None:
    model = nn.Linear(2, 2)
    getattr(model.bias, register)(lambda gradient: None)
    sharded(model)
    getattr(model.weight, register)(lambda gradient: None)
    with pytest.raises(SetupError, match=r"^weight of the model had a gradient hook.* zero1"):
        sharded(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trap_", "says"),
    [
        ("kept", "through a reference"),
        ("kept data", "kept[0] uses the memory of"),
        ("hooked", "a gradient hook"),
    ],
)
def test_fsdp_refuses_hooks_and_kept_references_of_parameters_and_ddp_trains_with_them(
    trap_: str, says: str, tmp_path: Path
) -> None:
    run = trap(tmp_path / "fsdp", tied=trap_)
    start(run, recipe("fsdp", micro=8), ranks=1)
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error" and "embedding.weight of the model" in failure["exception"]
    assert says in failure["exception"]
    assert start(trap(tmp_path / "ddp", tied=trap_), recipe("ddp")).codes == {0: 0, 1: 0}


@pytest.mark.slow
def test_parameters_without_part_in_the_loss_run_under_fsdp_and_under_ddp_when_asked(tmp_path: Path) -> None:
    for sharding, asked in (("fsdp", False), ("ddp", True)):
        run = trap(tmp_path / sharding, unused=True, train={"find_unused_parameters": asked})
        ended = start(run, recipe(sharding))
        assert ended.codes == {0: 0, 1: 0}, ended.output
    run = trap(tmp_path / "unasked", unused=True)
    start(run, recipe("ddp"))
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error"
    assert "train.find_unused_parameters: true" in failure["exception"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"activations": "checkpoint"},
        {"activations": "keep", "offload": "cpu"},
        {"activations": "selective", "precision": "bf16-mixed"},
    ],
    ids=lambda fields: fields["activations"],
)
def test_blocks_under_fsdp_may_change_the_lists_and_dictionaries_that_they_are_called_with(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    curves = {}
    for sharding, ranks in (("none", 1), ("fsdp", 2)):
        run = prepare(tmp_path / sharding, job(task="traps:Collecting", steps=3))
        chosen = fields if sharding == "fsdp" else {"precision": fields.get("precision", "fp32")}
        ended = start(run, recipe(sharding, micro=8 // ranks, **chosen), ranks=ranks)
        assert set(ended.codes.values()) == {0}, ended.output
        curves[sharding] = losses(run)
    rel = 1e-5 if fields.get("precision") is None else 2e-2
    assert curves["fsdp"] == pytest.approx(curves["none"], rel=rel) and len(curves["fsdp"]) == 3


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_fsdp_gathers_the_layers_of_lists_in_a_list(kind: str, tmp_path: Path) -> None:
    curves = []
    for fields in ({"sharding": "none"}, {"sharding": "fsdp", "activations": "checkpoint"}):
        asked = job(task="traps:Paired", steps=2, args={"kind": kind})
        run = prepare(tmp_path / fields["sharding"], asked)
        ended = start(run, recipe(micro=8, **fields), ranks=1)
        assert ended.codes == {0: 0}, ended.output
        curves.append(losses(run))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(16, 16), (16, 48)])
def test_ranks_that_take_different_branches_have_the_gradients_of_one(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    """Of equal sizes FSDP by itself would add up those of one branch and of the other."""
    norms = {}
    for sharding, ranks in (("none", 1), ("fsdp", 2)):
        asked = job(task="traps:Branching", steps=1, args={"sizes": list(sizes)})
        run = prepare(tmp_path / sharding, asked)
        ended = start(run, recipe(sharding, micro=4, accumulation=2 // ranks), ranks=ranks)
        assert set(ended.codes.values()) == {0}, ended.output
        norms[sharding] = [json.loads(line)["grad_norm"] for line in run.metrics.read_text().splitlines()]
    assert norms["fsdp"] == pytest.approx(norms["none"], rel=1e-5)


@pytest.mark.slow
def test_where_fsdp_cannot_do_that_it_is_refused_and_no_step_is_done(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(task="traps:Branching", steps=1, args={"by_itself": True}))
    assert set(start(run, recipe("fsdp")).codes.values()) <= {1, 128 + signal.SIGTERM}
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error" and "used different parameters" in failure["exception"]
    assert not run.metrics.exists() or not run.metrics.read_text()


@pytest.mark.parametrize(
    ("when", "fields"),
    [
        ("train", {}),
        pytest.param("eval", {}, marks=pytest.mark.slow),
        pytest.param("train", {"sharding": "fsdp-keep"}, marks=pytest.mark.slow),
        pytest.param("train", {"sharding": "fsdp-layers"}, marks=pytest.mark.slow),
        pytest.param("train", {"optimizer_step": "backward"}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_call_blocks_in_different_orders_are_refused_and_no_step_is_done(
    when: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """The blocks have equal sizes: each rank would get the weights of the other one, without an error."""
    asked = job(
        task="traps:Reordered", steps=1, args={"when": when}, train={"eval_every": 1, "clip_norm": None}
    )
    run = prepare(tmp_path / "run", asked)
    assert set(start(run, recipe(**fields)).codes.values()) <= {1, 128 + signal.SIGTERM}
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error"
    assert "rank 0 came to branches.0 where rank 1 came to branches.1" in failure["exception"]
    assert not run.metrics.exists() or not run.metrics.read_text()


@pytest.mark.slow  # until the collective times out
def test_ranks_that_call_the_model_a_different_number_of_times_are_told_so(tmp_path: Path) -> None:
    asked = job(task="traps:CalledTwice", steps=1, train={"collective_timeout": 15})
    run = prepare(tmp_path / "run", asked)
    start(run, recipe(micro=2, accumulation=2))
    records = read_records(run.attempt(0), "errors")
    verdict = judge(Evidence(ranks=2, exit_codes={0: 1}, errors=records))
    assert verdict.failure == "desync" and "equally often" in (verdict.exception or "")
    assert "rank 0 came to the gradients of the rest of the model where rank 1" in (verdict.exception or "")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"optimizer_step": "backward"}, marks=pytest.mark.slow),
        pytest.param({"sharding": "fsdp-keep", "activations": "checkpoint"}, marks=pytest.mark.slow),
        pytest.param({"sharding": "fsdp-layers", "activations": "checkpoint"}, marks=pytest.mark.slow),
        pytest.param({"micro": 2, "accumulation": 2, "grad_sync": "last"}, marks=pytest.mark.slow),
    ],
)
def test_a_loss_with_a_gradient_through_the_input_trains_under_fsdp_as_on_one_device(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    norms = {}
    for name, ranks, chosen in (("none", 1, recipe("none", micro=8)), ("fsdp", 2, recipe(**fields))):
        asked = job(task="traps:Differentiating", steps=2, train={"clip_norm": None})
        run = prepare(tmp_path / name, asked)
        ended = start(run, chosen, ranks=ranks)
        assert set(ended.codes.values()) == {0}, ended.output
        norms[name] = [json.loads(line)["grad_norm"] for line in run.metrics.read_text().splitlines()]
    assert len(norms["none"]) == 2 and norms["fsdp"] == pytest.approx(norms["none"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_run_with_a_parameter_that_never_had_a_gradient_resumes_bit_for_bit(
    sharding: str, tmp_path: Path
) -> None:
    curves = {}
    for name, stop_at in (("whole", 0), ("stopped", 2)):
        run = prepare(
            tmp_path / name, job(task="traps:Trap", steps=4, args={"unused": True, "stop_at": stop_at})
        )
        ranks = 1 if sharding == "none" else 2
        for attempt in range(2 if stop_at else 1):
            ended = start(run, recipe(sharding, micro=8 // ranks), ranks=ranks)
            stopped = stop_at and attempt == 0
            assert set(ended.codes.values()) == {EXIT_STOPPED if stopped else 0}, ended.output
        curves[name] = losses(run)
    assert curves["stopped"] == curves["whole"] and len(curves["whole"]) == 4


@pytest.mark.parametrize(
    ("sharding", "when"),
    [
        ("none", "after"),
        pytest.param("none", "backward", marks=pytest.mark.slow),
        pytest.param("ddp", "after", marks=pytest.mark.slow),
        pytest.param("fsdp", "after", marks=pytest.mark.slow),
    ],
)
def test_a_parameter_that_no_optimizer_knows_is_refused_when_it_gets_a_gradient(
    sharding: str, when: str, tmp_path: Path
) -> None:
    ranks = 1 if sharding == "none" else 2
    asked = job(
        task="traps:Unfreezing", steps=4, model={"batch_norm": True, "couples_samples": True},
        train={"clip_norm": None},
    )  # fmt: skip
    run = prepare(tmp_path / "run", asked)
    start(run, recipe(sharding, micro=8 // ranks, optimizer_step=when), ranks=ranks)
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error" and failure["step"] == 3
    assert "0.weight" in failure["exception"] and "set it to False in forward" in failure["exception"]


@pytest.mark.parametrize(
    ("lazy", "message"),
    [
        (False, "1.1.late.weight, 1.1.late.bias of the model was made or replaced during training"),
        pytest.param(True, "0.weight, 0.bias of the model has no shape yet", marks=pytest.mark.slow),
    ],
)
def test_a_parameter_that_model_does_not_make_is_refused(lazy: bool, message: str, tmp_path: Path) -> None:
    asked = job(task="traps:Growing", steps=2, args={"lazy": lazy}, model={"batch_norm": True})
    run = prepare(tmp_path / "run", asked)
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 1}
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error" and message in failure["exception"]


def changing(
    path: Path, sharding: str, nodes: int = 1, *, steps: int = 4, task: str = "Centering", **args: Any
) -> tuple[RunDir, dict[int, int]]:
    """A run of two ranks per node that changes a frozen parameter from samples, and its exit codes."""
    alike = {"batch_norm": True, "couples_samples": True}
    run = prepare(path, job(task=f"traps:{task}", steps=steps, args=args, model=alike))
    chosen = recipe(sharding, micro=4 // nodes)
    return run, start(run, chosen, ranks=2 * nodes, env={"LOCAL_WORLD_SIZE": "2"}).codes


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("center", {"sharding": "ddp", "over_ranks": False}),
        pytest.param("center", {"sharding": "zero1", "over_ranks": False}, marks=pytest.mark.slow),
        pytest.param("shift", {"sharding": "hybrid", "nodes": 2, "task": "Shifted"}, marks=pytest.mark.slow),
    ],
)
def test_a_parameter_that_each_rank_changes_from_its_own_samples_is_refused(
    name: str, how: dict[str, Any], tmp_path: Path
) -> None:
    run, codes = changing(tmp_path, **how)
    failure = any_error(run.attempt(0))
    assert 0 not in codes.values() and (failure["failure"], failure["step"]) == ("user-error", 2)
    assert failure["exception"].startswith(f"TaskError: {name} of the model differs between the ranks")


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ({}, "features"),
        pytest.param({"wider": True}, "the names or shapes of its parameters", marks=pytest.mark.slow),
    ],
)
def test_fsdp_refuses_a_model_that_is_not_the_same_on_each_rank(
    args: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """Random features of each rank's own would be trained with the other rank's, and saved without them."""
    task = job(task="traps:Unseeded", steps=1, args=args, model={"batch_norm": True})
    run = prepare(tmp_path / "run", task)
    assert 0 not in start(run, recipe("fsdp", micro=4)).codes.values()
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error" and f"on each rank: {what} differ" in failure["exception"]


def test_a_change_in_place_that_hides_the_gradient_from_fsdp_is_named(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(task="traps:InPlace", steps=1))
    assert start(run, recipe("fsdp", micro=8), ranks=1).codes == {0: 1}
    assert "write y = y / 2 for y /= 2" in error(run.attempt(0), 0)["exception"]


@pytest.mark.slow
def test_it_is_in_no_checkpoint_of_a_run_that_ends_before_its_second_step(tmp_path: Path) -> None:
    run, codes = changing(tmp_path, "ddp", steps=1, over_ranks=False)
    assert 0 not in codes.values() and any_error(run.attempt(0))["failure"] == "user-error"
    assert not [*run.checkpoints.glob("step-*")]


@pytest.mark.slow
def test_one_that_all_ranks_change_alike_is_trained_with(tmp_path: Path) -> None:
    run, codes = changing(tmp_path, "ddp", over_ranks=True)
    assert codes == {0: 0, 1: 0} and len(losses(run)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("why", ["adapter", "state_dict"])
def test_a_frozen_parameter_that_changes_is_refused_if_no_checkpoint_holds_it(
    why: str, tmp_path: Path
) -> None:
    fields = {"adapter": {"adapter": {"kind": "lora", "rank": 2}}, "state_dict": {"args": {"left_out": True}}}
    run = prepare(tmp_path / "run", job(task="traps:Shifted", steps=3, **fields[why]))
    assert start(run, recipe(micro=8), ranks=1).codes == {0: 1}
    assert "shift is frozen, but was changed" in error(run.attempt(0), 0)["exception"]
    assert not [*run.checkpoints.glob("step-*/complete.json")]


def test_a_step_that_is_left_out_leaves_batch_norms_statistics_as_they_were(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(task="traps:NotANumber", steps=4))
    ended = start(run, recipe("none", micro=4, accumulation=2), ranks=1)
    assert ended.codes == {0: 0}, ended.output
    [left_out] = [event for event in run.read_events() if isinstance(event, StepLeftOut)]
    assert left_out.step == 2
    export(run.checkpoints / "step-00000004", tmp_path / "weights")
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    statistics = [weights[f"1.1.running_{name}"] for name in ("mean", "var")]
    assert all(torch.isfinite(one).all() for one in statistics)
    assert int(weights["1.1.num_batches_tracked"]) == 6, "two of eight micro-batches do not count"


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "ranks", "micro"), [("none", 1, 1), ("none", 1, 8), ("fsdp", 2, 4)])
def test_a_loss_that_is_a_mean_is_refused_before_the_first_step(
    sharding: str, ranks: int, micro: int, tmp_path: Path
) -> None:
    run = trap(tmp_path / "run", reduction="mean")
    start(run, recipe(sharding, micro=micro, accumulation=8 // ranks // micro), ranks=ranks)
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error" and "reduction='sum'" in failure["exception"]
    assert not run.metrics.exists()


@pytest.mark.slow
def test_a_loss_in_16_bit_is_refused(tmp_path: Path) -> None:
    run = trap(tmp_path / "run", half=True)
    assert start(run, recipe("none", micro=8, precision="bf16"), ranks=1).codes == {0: 1}
    assert "a sum in torch.bfloat16" in any_error(run.attempt(0))["exception"]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_batch_without_a_target_takes_part_in_the_backward_pass(sharding: str, tmp_path: Path) -> None:
    run = trap(tmp_path / "attached", empty="attached")
    ended = start(run, recipe(sharding))
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert sorted(losses(run)) == [1, 2, 3]


def test_a_collate_that_returns_none_for_a_micro_batch_does_not_end_the_step(tmp_path: Path) -> None:
    found = {}
    for micro in (8, 1):
        train = {"eval_every": 4, "checkpoint_every": None}
        run = prepare(tmp_path / f"micro {micro}", job(task="traps:Dropping", steps=4, train=train))
        ended = start(run, recipe("none", micro, 8 // micro), ranks=1)
        assert ended.codes == {0: 0}, ended.output
        keys = ("loss", "weight", "grad_norm", "eval_loss")
        found[micro] = [[line.get(key, 0.0) for key in keys] for line in read_json_lines(run.metrics)]
    for whole, parts in zip(found[8], found[1], strict=True):
        assert whole == pytest.approx(parts, rel=1e-5)


@pytest.mark.slow
def test_a_loss_that_does_not_come_from_the_parameters_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run = trap(tmp_path / "run", empty="detached")
    start(run, recipe("fsdp"))
    failure = error(run.attempt(0), 1)
    assert failure["failure"] == "user-error"
    assert "for a batch without a target return model(x).sum() * 0, 0" in failure["exception"]


@pytest.mark.thorough
def test_recomputation_counts_no_micro_batch_twice_in_batch_norm(tmp_path: Path) -> None:
    weights = {}
    for activations, alone in (
        ("keep", False),
        ("checkpoint", False),
        ("selective", False),
        ("checkpoint", True),
    ):
        name = f"{activations}, alone" if alone else activations
        run = prepare(tmp_path / name, job(task="traps:Normed", steps=3, args={"alone": alone}))
        chosen = recipe("none", micro=4, accumulation=2, activations=activations)
        ended = start(run, chosen, ranks=1)
        assert ended.codes == {0: 0}, ended.output
        export(run.checkpoints / "step-00000003", tmp_path / f"{name}-weights")
        weights[name] = load_file(tmp_path / f"{name}-weights" / "model.safetensors")
    assert int(weights["keep"]["1.1.num_batches_tracked"]) == 6
    for found in weights.values():
        assert all(torch.equal(found[name], weights["keep"][name]) for name in weights["keep"])


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_leaves_its_step_out_on_every_rank(tmp_path: Path) -> None:
    run = trap(tmp_path / "run", bad=[2])
    ended = start(run, recipe("fsdp"))
    assert ended.codes == {0: 0, 1: 0}, ended.output
    [left_out] = [event for event in run.read_events() if isinstance(event, StepLeftOut)]
    assert left_out.step == 2 and "not finite" in left_out.reason
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["loss"] is None for line in lines] == [False, True, False]


def test_without_a_target_there_is_no_loss_and_no_best_checkpoint(tmp_path: Path) -> None:
    every = {"eval_every": 1, "checkpoint_every": 1, "keep_best": True}
    run = trap(tmp_path / "run", sign=0, train=every)
    start(run, recipe("none", micro=8), ranks=1)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [(line["loss"], line["eval_loss"]) for line in lines] == [(None, None)] * 3
    marker = json.loads((run.checkpoints / "step-00000002" / "complete.json").read_text())
    assert "eval_loss" not in marker
    failure = any_error(run.attempt(0))
    assert (failure["failure"], failure["phase"]) == ("user-error", "optimizer")
    assert "no step changed the model" in failure["exception"]


@pytest.mark.slow
def test_a_training_whose_steps_were_all_skipped_has_not_succeeded(tmp_path: Path) -> None:
    run = trap(tmp_path / "run", bad=[1, 2, 3])
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 1}
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "numerical" and "not finite: loss nan" in failure["exception"]
    assert not run.checkpoints.exists() or not [*run.checkpoints.glob("step-*")]


@pytest.mark.parametrize(
    "sharding", ["none", *(pytest.param(one, marks=pytest.mark.slow) for one in ("fsdp", "zero1"))]
)
def test_a_checkpoint_before_the_first_update_changes_nothing(sharding: str, tmp_path: Path) -> None:
    found, ranks = {}, 1 if sharding == "none" else 2
    for every in (None, 1):
        run = trap(tmp_path / f"{every}", bad=[1], train={"checkpoint_every": every, "lr": 1e-2})
        ended = start(run, recipe(sharding, micro=8 // ranks), ranks=ranks)
        assert not any(ended.codes.values()), ended.output
        found[every] = losses(run)
    assert found[1] == found[None]


@pytest.mark.slow
def test_a_diverged_training_ends_before_it_is_written_over_the_good_checkpoint(tmp_path: Path) -> None:
    asked = job(
        task="traps:Trap",
        steps=40,
        args={"bad": list(range(4, 41))},
        train={"checkpoint_every": 3, "keep_checkpoints": 9},
    )
    run = prepare(tmp_path / "run", asked)
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 1}
    failure = any_error(run.attempt(0))
    assert (failure["failure"], failure["step"]) == ("numerical", 13)
    assert "not finite in 10 steps in a row" in failure["exception"]
    assert "train_step" not in failure["traceback"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"frozen": True}, "no trainable parameter"),
        ({"sign": -1}, "they must be 0 or more"),
    ],
)
def test_what_cannot_be_trained_is_the_users_error(
    args: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = trap(tmp_path / "run", **args)
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 1}
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error" and message in failure["exception"]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_a_model_takes_and_returns_fp32_in_every_precision(
    sharding: str, precision: str, tmp_path: Path
) -> None:
    run = prepare(tmp_path / "run", job(task="traps:Normed", steps=2))
    ended = start(run, recipe(sharding, micro=8, precision=precision), ranks=1)
    assert ended.codes == {0: 0}, ended.output


def test_batch_norm_is_torchs_own_whatever_the_types_are() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5)
    ours, theirs = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    compute_in_fp32(ours)
    for norm in (ours, theirs):
        norm.train()
    assert torch.equal(ours(x), theirs(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    halves = nn.BatchNorm1d(3).to(torch.bfloat16)
    compute_in_fp32(halves)
    assert halves(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(halves.running_var, theirs.running_var, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_selective_recomputation_of_a_block_with_units_of_its_own(tmp_path: Path) -> None:
    """FSDP gathers the inner units once more while the block is computed again."""
    brain = job(
        task="launcher.tasks.brain:BrainAutoencoder",
        args={"shape": "tiny", "parts": 4},
        model={"batch_norm": True},
        steps=1,
    )
    ended = start(prepare(tmp_path / "run", brain), recipe("fsdp", micro=4, activations="selective"), ranks=2)
    assert ended.codes == {0: 0, 1: 0}, ended.output
