"""Activation policies, hybrid sharding and compiled blocks change memory or time, and no gradient."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.rundir.layout import RunDir
from launcher.spec.mesh import mesh_of
from launcher.spec.recipe import Recipe
from launcher.train.activations import selective
from launcher.train.activations.activations import (
    Offloader,
    apply_activations,
    around,
    evenly,
    recomputed,
)
from launcher.train.compiling.compiling import apply_compile, missing_compiler
from launcher.train.cpu_memory_budget import MIB, MemoryBudget, Unlimited
from launcher.train.float8 import to_float8
from launcher.train.mesh import meshes
from launcher.train.rank import Rank, SetupError
from launcher.train.task import TaskError, called, outermost
from tests.train.runs import error, job, losses, measure, prepare, recipe, start

CPU = torch.device("cpu")
LAYERS, HIDDEN = 6, 4 * 64 * 32 * 4  # of policies.py: bytes of one (micro-batch, length, dim) tensor
# bf16 keeps 8 bits: the parts of a sum are rounded elsewhere. Measured 5e-4.
BF16_ORDER = 5e-3
GPT = {"layers": 2, "dim": 16, "heads": 2, "context": 32}


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.thorough), 2], ids=["one rank", "two ranks"]
)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure("policies.py", tmp_path_factory.mktemp("policies"), request.param)


@pytest.mark.slow
def test_no_policy_changes_a_bit_of_the_gradient_with_dropout(measured: dict[str, Any]) -> None:
    for sharding, found in measured.items():
        assert set(found["equal"].values()) == {True}, (sharding, found["equal"])


@pytest.mark.slow
def test_names_of_parameters_are_the_same_under_every_policy(measured: dict[str, Any]) -> None:
    for sharding, found in measured.items():
        assert set(found["names"].values()) == {True}, (sharding, found["names"])


@pytest.mark.slow
def test_recomputation_lowers_the_peak_by_what_the_blocks_would_keep(measured: dict[str, Any]) -> None:
    """A block of this GPT keeps 20.6 hidden tensors (measured); its input stays. In the backward pass one
    block's activations exist at a time. The results of matrix products and attention are 10 of
    them, of which `every-second` leaves out two, the second and the fourth product."""
    for sharding, found in measured.items():
        peaks = found["peaks"]
        saved = {
            name: (peaks["keep"] - peaks[name]) / HIDDEN
            for name in ("selective", "every-second", "checkpoint")
        }
        assert saved["checkpoint"] == pytest.approx((LAYERS - 1) * 20.6, rel=0.02), (sharding, peaks)
        assert saved["selective"] == pytest.approx((LAYERS - 1) * 8.5, rel=0.05), (sharding, peaks)
        assert saved["every-second"] - saved["selective"] == pytest.approx(LAYERS * 2, rel=0.05)
        half = (peaks["keep"] - peaks["checkpoint, half"]) / HIDDEN
        assert half == pytest.approx(saved["checkpoint"] / 2, rel=0.02), (sharding, peaks)
        # Under FSDP the backward pass of a gathered block may need more than the logits.
        assert peaks["checkpoint, chunked"] <= peaks["checkpoint"] < 0.4 * peaks["keep"]
        assert sharding == "fsdp" or peaks["checkpoint, chunked"] < peaks["checkpoint"]


@pytest.mark.slow
def test_gradients_that_meet_last_are_the_same_and_take_the_bytes_that_are_said(
    measured: dict[str, Any],
) -> None:
    for sharding, found in measured.items():
        assert found["last"] < 3e-7, sharding
        if sharding != "none":
            last, each = found["price"]
            assert found["peaks"]["last"] - found["peaks"]["keep"] == last - each > 0, sharding


@pytest.mark.slow
def test_float8_rounds_the_products_inside_the_blocks_and_nothing_else(measured: dict[str, Any]) -> None:
    """e4m3 keeps four bits: 2^-5 at most in one rounding, measured 0.034 in the gradient."""
    if "fsdp" in measured:
        found = measured["fsdp"]
        assert 0.005 < found["float8"] < 0.1
        assert found["float8 equal when recomputed"] and found["float8 names"]
        assert len(found["float8 layers"]) == 4 * LAYERS
        assert all(name.startswith("blocks.") for name in found["float8 layers"])


def test_float8_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 20)), nn.Linear(16, 16))
    with pytest.raises(SetupError, match=r"needs a GPU of compute capability 8\.9"):
        to_float8(model, [model[0]], CPU)
    with pytest.raises(SetupError, match=r"needs linear layers .* multiples of 16, and there are none"):
        to_float8(model, [model[0], model[1]], CPU, emulate=True)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(SetupError, match=r"pip install '\.\[float8\]' in it"):
        to_float8(model, [model[0]], CPU, emulate=True)


@pytest.mark.parametrize(
    ("ratio", "chosen"), [(1.0, [0, 1, 2, 3, 4, 5]), (0.5, [0, 2, 4]), (0.34, [0, 3]), (0.01, [0])]
)
def test_the_recomputed_blocks_are_spread_and_the_last_is_kept_longest(
    ratio: float, chosen: list[int]
) -> None:
    blocks: list[Any] = list(range(6))
    assert evenly(blocks, ratio) == chosen


@pytest.mark.slow
def test_a_loss_in_chunks_has_the_gradient_of_the_whole_one(measured: dict[str, Any]) -> None:
    for sharding, found in measured.items():
        assert found["chunked"] < 3e-7, sharding
        assert found["chunked, the head a unit of its own"] < 3e-7, sharding
        assert 0 < found["chunked in bf16-mixed"] < BF16_ORDER, sharding


@pytest.mark.thorough
def test_a_run_goes_on_under_another_policy_and_back_bit_for_bit(tmp_path: Path) -> None:
    pydoc = job(
        task="launcher.tasks.gpt:PydocGPT",
        args={**GPT, "dropout": 0.2},
        train={"checkpoint_every": 2, "keep_checkpoints": 3},
    )
    run = prepare(tmp_path / "run", pydoc)
    assert start(run, recipe("fsdp")).codes == {0: 0, 1: 0}
    undisturbed = losses(run, attempt=0)

    _forget(run, 4, 6)
    ended = start(run, recipe("fsdp", activations="checkpoint"))
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert losses(run, attempt=1) == {step: undisturbed[step] for step in (3, 4, 5, 6)}

    _forget(run, 6)
    assert start(run, recipe("fsdp")).codes == {0: 0, 1: 0}
    assert losses(run, attempt=2) == {step: undisturbed[step] for step in (5, 6)}


@pytest.mark.thorough
def test_a_run_goes_on_from_one_node_to_hybrid_and_back(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(train={"checkpoint_every": 3, "keep_checkpoints": 3}))
    assert start(run, recipe("fsdp")).codes == {0: 0, 1: 0}
    undisturbed = losses(run, attempt=0)

    _forget(run, 6)
    ended = start(run, recipe("hybrid", micro=2), ranks=4, env={"LOCAL_WORLD_SIZE": "2"})
    assert set(ended.codes.values()) == {0}, ended.output
    assert losses(run, attempt=1) == pytest.approx({step: undisturbed[step] for step in (4, 5, 6)}, rel=1e-5)

    (run.checkpoints / "step-00000003").rename(tmp_path / "put away")
    changed = prepare(run.path, job(steps=8))
    assert start(changed, recipe("none", micro=8), ranks=1).codes == {0: 0}
    assert list(losses(run, attempt=2)) == [7, 8]


def made_meshes(folder: Path, asked: Recipe, world: int, per_node: int) -> list[Any]:
    """The ranks and dimension names of each mesh of rank 0."""
    run = RunDir(folder)
    rank = Rank(
        run=run,
        attempt=run.attempt(0),
        number=0,
        node=0,
        job=job(),
        recipe=asked,
        workdir=str(folder),
        local=0,
        world=world,
        per_node=per_node,
        device=CPU,
        stop_file=folder / "stop",
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        return [mesh and (mesh.mesh.tolist(), mesh.mesh_dim_names) for mesh in meshes(rank)]
    finally:
        dist.destroy_process_group()


def test_each_node_is_one_row_of_the_hybrid_mesh(tmp_path: Path) -> None:
    data, *others = made_meshes(tmp_path, recipe("hybrid"), world=6, per_node=2)
    assert data == ([[0, 1], [2, 3], [4, 5]], ("replicate", "shard")), "FSDP2 shards over the second"
    assert others == [None, None]


def test_a_tensor_group_has_neighbouring_ranks_and_the_stages_are_farthest_apart(tmp_path: Path) -> None:
    asked = recipe("hybrid").model_copy(update={"tensor": 2, "pipeline": 2})
    (data, _), (tensor, _), (pipeline, _) = made_meshes(tmp_path, asked, world=16, per_node=4)
    assert data == [[0, 2], [4, 6]], "two ranks of each of the stage's two nodes"
    assert tensor == [0, 1] and pipeline == [0, 8]
    places = [mesh_of(asked, 16).coordinates(number) for number in range(16)]
    assert len(set(places)) == 16 and places[0] == (0, 0, 0) and places[13] == (1, 2, 1)


@pytest.mark.slow
def test_hybrid_on_one_node_is_refused(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job())
    start(run, recipe("hybrid"))
    messages = [error(run.attempt(0), rank).get("exception", "") for rank in (0, 1)]
    assert any("2 ranks with 2 per node are not several full nodes" in message for message in messages)


@pytest.mark.skipif(missing_compiler(CPU) is not None, reason="no C++ compiler")
@pytest.mark.thorough
def test_compiled_blocks_share_one_graph_and_have_the_gradient_of_eager_ones(tmp_path: Path) -> None:
    for case, found in measure("compiled.py", tmp_path, ranks=2).items():
        assert found["graphs"] == 1, (case, "of 12 blocks")
        assert found["breaks"] == {}, case
        assert 0 < found["distance"] < 3e-6, case


class Alternating(nn.Linear):
    """Counts its calls in a buffer, and multiplies by what it was before and is afterwards."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.zeros(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.calls.split(1)
        y = x + super().forward(x) * (first % 2) * torch.cos(last)
        self.calls += 1
        return y + super().forward(y) * (1 + self.calls % 2)


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler(CPU) is not None, reason="no C++ compiler")
@pytest.mark.parametrize("fields", [{}, {"activations": "budget", "activation_budget": 0.1}])
def test_a_compiled_block_that_changes_a_buffer_has_the_gradient_of_an_eager_one(fields: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Alternating()
    eager, x = copy.deepcopy(block), torch.randn(2, 8)
    apply_compile([block], recipe("none", compile=True, **fields), CPU, Unlimited())
    for _ in range(2):
        for one in (block, eager):
            one(x).square().sum().backward()
        assert torch.equal(block.calls, eager.calls)
        torch.testing.assert_close(block.weight.grad, eager.weight.grad)


def test_without_a_compiler_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    blocks = [nn.Linear(2, 2)]
    with pytest.raises(SetupError, match=r"needs a C\+\+ compiler .* use compile: false"):
        apply_compile(blocks, recipe(compile=True), CPU, Unlimited())
    apply_compile(blocks, recipe(), CPU, Unlimited())


@pytest.mark.skipif(missing_compiler(CPU) is not None, reason="no C++ compiler")
def test_compile_is_refused_where_the_memory_budget_would_be_blind() -> None:
    with pytest.raises(SetupError, match="allocations of compiled code are not counted"):
        apply_compile([nn.Linear(2, 2)], recipe(compile=True), CPU, MemoryBudget(MIB))


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler(CPU) is not None, reason="no C++ compiler")
def test_a_job_whose_blocks_are_compiled_says_so_once(tmp_path: Path) -> None:
    asked = job(task="launcher.tasks.gpt:PydocGPT", args=GPT, steps=2)
    ended = start(prepare(tmp_path / "run", asked), recipe("ddp", compile=True))
    assert set(ended.codes.values()) == {0}, ended.output
    told = ended.output.splitlines()
    [line] = [line for line in told if "compiling the model's blocks" in line]
    assert told.index(line) < next(n for n, one in enumerate(told) if one.startswith("step 1/2")), told


@pytest.mark.parametrize("activations", ["selective", "every-second", "checkpoint", "offload", "compress"])
def test_a_policy_without_blocks_is_refused(activations: str) -> None:
    with pytest.raises(
        SetupError, match=f"{activations} works block by block, but blocks.. of the task returns none"
    ):
        apply_activations([], recipe(activations=activations), CPU, Unlimited())


@pytest.mark.parametrize(
    "fields",
    [
        *({"activations": one} for one in ("checkpoint", "selective", "offload", "compress")),
        pytest.param({"activations": "checkpoint", "compile": True}, marks=pytest.mark.slow),
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_a_block_may_be_called_by_any_keyword(fields: dict[str, Any]) -> None:
    class Named(nn.Linear):
        def forward(self, input: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + sum(more.values())

    block, one, x = Named(4, 4), torch.ones(4, requires_grad=True), torch.ones(2, 4)
    names = ("forward", "function", "state", "contexts", "block", "budget", "pin", "debug", "context_fn")
    apply_activations([block], recipe("none", micro=1, **fields), CPU, Unlimited())
    apply_compile([block], recipe("none", micro=1, **fields), CPU, Unlimited())
    block(x, **dict.fromkeys(names, one)).sum().backward()
    assert one.grad is not None and one.grad.tolist() == [2 * len(names)] * 4


@pytest.mark.parametrize("activations", ["selective", "compress"])
def test_blocks_within_a_transform_are_refused(activations: str) -> None:
    block = nn.Linear(4, 4)
    apply_activations([block], recipe("none", activations=activations), CPU, Unlimited())
    with pytest.raises(TaskError, match=r"within torch\.func .* keep or offload"):
        torch.func.vmap(block)(torch.ones(2, 4))


def test_recomputed_blocks_of_torchscript_are_refused() -> None:
    chosen, block = recipe("none", activations="checkpoint"), torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(SetupError, match=r"TorchScript.* keep or offload"):
        apply_activations([block], chosen, CPU, Unlimited())


def test_a_sparse_tensor_stays_with_offload() -> None:
    class Graph(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(torch.eye(len(x)).to_sparse() * 2, super().forward(x)).square()

    gradients = []
    for offloads in (False, True):
        torch.manual_seed(0)
        block = Graph(4, 4)
        if offloads:
            block.forward = around(Offloader(Unlimited(), pin=False), block.forward, block)  # type: ignore[method-assign]
        block(torch.ones(2, 4)).sum().backward()
        gradients.append(block.weight.grad)
    assert torch.equal(*gradients)


def test_a_block_inside_a_block_is_left_to_the_outer_one() -> None:
    outer = nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1)]))
    container = nn.ModuleList([nn.Linear(1, 1)])
    blocks = [outer, outer, outer[0], outer[1][0], container, container[0]]
    assert outermost(blocks) == [outer, container[0]]


def test_of_a_block_without_a_forward_what_is_in_it_is_called() -> None:
    class Both(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self["up"](x) + self["down"](x)

    def layers(kind: type[nn.ModuleDict]) -> nn.ModuleDict:
        return kind({"up": nn.Linear(1, 1), "down": nn.Linear(1, 1)})

    nested, named, whole = nn.ModuleList([nn.Linear(1, 1)]), layers(nn.ModuleDict), layers(Both)
    assert called([nested, nested[0], named, whole]) == [nested[0], named["up"], named["down"], whole]
    assert outermost([nn.ModuleList([named]), whole["up"], whole]) == [named["up"], named["down"], whole]


def test_offload_copies_activations_and_leaves_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """tanh saves its result, the linear layer its input and its weight: two of the three move."""
    block = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    x = torch.randn(4, 8, requires_grad=True)
    block(x).sum().backward()
    expected = x.grad
    forward = block.forward
    block.forward = around(Offloader(Unlimited(), pin=False), block.forward, block)
    with MemoryBudget(MIB) as budget:
        budget.track([x, *block.parameters()])
        before = budget.live
        out = block(x.detach().requires_grad_())
        assert budget.live - before == 3 * out.nbytes, "the result itself, and two copies for autograd"
    block.forward = forward
    with MemoryBudget(MIB) as budget:
        block.forward = around(Offloader(budget, pin=False), block.forward, block)
        budget.track([x, *block.parameters()])
        before = budget.live
        out = block(x.detach().requires_grad_())
        assert budget.live - before == out.nbytes, "copies on the host are not counted"
    x.grad = None
    block(x).sum().backward()
    assert expected is not None and x.grad is not None and torch.equal(expected, x.grad)


def test_offload_copies_a_tensor_once_that_several_operators_and_blocks_save() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.other(x)

    torch.manual_seed(0)
    blocks = [Twice(), Twice()]
    plain = copy.deepcopy(blocks)
    apply_activations(blocks, recipe("none", activations="offload"), CPU, Unlimited())
    x = torch.randn(4, 8)
    with MemoryBudget(MIB) as budget:
        budget.track([x, *(p for block in blocks for p in block.parameters())])
        before, out = budget.live, x
        for block in blocks:
            out = block(out)
        on_host = budget.live - before - out.nbytes
    assert on_host == 2 * x.nbytes, "the inputs of both blocks, each read by two layers"
    out.sum().backward()
    plain[1](plain[0](x)).sum().backward()
    for block, same in zip(blocks, plain, strict=True):
        assert [p.grad.tolist() for p in block.parameters() if p.grad is not None] == [
            p.grad.tolist() for p in same.parameters() if p.grad is not None
        ]


def test_offload_copies_a_tensor_again_that_has_changed() -> None:
    class Squares(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(x)
            before = hidden.square()
            return before + hidden.add_(1).square()

    torch.manual_seed(0)
    block = Squares(8, 8)
    hidden = nn.functional.linear(x := torch.randn(4, 8), block.weight, block.bias)
    (hidden.square() + (hidden + 1).square()).sum().backward()
    expected, block.weight.grad = block.weight.grad, None
    apply_activations([block], recipe("none", activations="offload"), CPU, Unlimited())
    block(x).sum().backward()
    assert expected is not None and block.weight.grad is not None
    assert torch.equal(block.weight.grad, expected)


class Doubled(torch.autograd.Function):
    """The square, whose backward pass writes its result over the saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(gradient)  # type: ignore[no-any-return]


def test_offload_copies_a_tensor_back_again_that_a_backward_pass_has_changed() -> None:
    class Squares(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(x)
            return hidden.square() + Doubled.apply(hidden)  # type: ignore[no-any-return, no-untyped-call]

    block = Squares(8, 8)
    hidden = nn.functional.linear(x := torch.randn(4, 8), block.weight, block.bias)
    (hidden.square() * 2).sum().backward()
    expected, block.weight.grad = block.weight.grad, None
    apply_activations([block], recipe("none", activations="offload"), CPU, Unlimited())
    block(x).sum().backward()
    assert expected is not None and block.weight.grad is not None
    torch.testing.assert_close(block.weight.grad, expected)


def test_operators_on_two_streams_do_not_share_the_copy_that_comes_back() -> None:
    found: list[tuple[int, float]] = []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, stream: Any) -> torch.Tensor:
            ctx.stream = stream
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            with torch.cpu.stream(ctx.stream):
                (x,) = ctx.saved_tensors
            kept.append(x)
            found.append((x.data_ptr(), float(x.sum())))
            return gradient, None

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((Reads.apply(x, stream) for stream in streams), x)  # type: ignore[no-any-return, no-untyped-call]

    kept: list[torch.Tensor] = []
    one, other = torch.cpu.Stream(), torch.cpu.Stream()
    streams, block = [one, one, other], Block()
    apply_activations([block], recipe("none", activations="offload"), CPU, Unlimited())
    block(torch.ones(4, requires_grad=True)).sum().backward()
    (first, _), (second, _), (third, _) = found  # in the order of the backward pass
    assert first != second == third and {total for _, total in found} == {4.0}


def test_offload_keeps_no_copy_on_the_device_for_blocks_that_come_later() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
            return self.queries(x) * self.keys(feature)

    peaks = []
    for pairs in (2, 6):
        encoder = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(pairs)]
        decoder = [Decoder() for _ in range(pairs)]
        with MemoryBudget(None) as budget:
            budget.track([p for block in (*encoder, *decoder) for p in block.parameters()])
            apply_activations([*encoder, *decoder], recipe("none", activations="offload"), CPU, budget)
            x, features = torch.randn(256, 64), []
            for block in encoder:
                x = block(x)
                features.append(x)
            for block in decoder:
                x = block(x, features.pop())
            before, loss = budget.live, x.sum()
            del x, block
            budget.take_peak()
            loss.backward()
            gradients = sum(p.nbytes for block in (*encoder, *decoder) for p in block.parameters())
            # Each skipped connection also has a gradient.
            peaks.append(budget.take_peak() - before - gradients - pairs * 256 * 64 * 4)
    assert peaks[1] - peaks[0] < 256 * 64 * 4, "of the features of four more pairs"


def test_offload_forgets_copies_of_a_buffer_that_changes_in_each_step() -> None:
    class Average(nn.Module):
        average: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.average.mul_(0.9)
            return x * self.average

    block = Average()
    block.forward = around(offloader := Offloader(Unlimited(), pin=False), block.forward, block)  # type: ignore[method-assign]
    for _ in range(3):
        block(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert [len(copies) for copies in offloader._copied_once._copies.values()] == [0]


def test_a_nested_tensor_without_a_layout_of_its_own_is_offloaded() -> None:
    block = nn.Linear(4, 4)
    x = [torch.randn(2, 4), torch.randn(3, 4)]
    block(torch.cat(x)).square().sum().backward()
    expected, block.weight.grad = block.weight.grad, None
    apply_activations([block], recipe("none", activations="offload"), CPU, Unlimited())
    out = torch.nested.to_padded_tensor(block(torch.nested.nested_tensor(x)), 0.0)
    out.square().sum().backward()
    assert expected is not None and block.weight.grad is not None
    torch.testing.assert_close(block.weight.grad, expected)


def _forget(run: RunDir, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")


def test_selective_keeps_no_result_that_no_backward_pass_reads() -> None:
    """The output of a block's last product is only added to the residual stream."""
    live = {}
    for last in (nn.Identity(), nn.Tanh()):  # tanh saves its output, and so needs the product again
        torch.manual_seed(0)
        block = Residual(last)
        reference = copy.deepcopy(block)
        x = torch.randn(64, 32, requires_grad=True)
        block.forward = recomputed(block, recipe("none", micro=1, activations="selective"))
        with MemoryBudget(2**30) as budget:
            before = budget.live
            out = block(x)
            live[type(last)] = budget.live - before - out.untyped_storage().nbytes()
            out.sum().backward()
        reference(x.detach()).sum().backward()
        for mine, theirs in zip(block.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
    assert live[nn.Tanh] - live[nn.Identity] == 64 * 32 * 4


class Residual(nn.Module):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(32, 128, bias=False), nn.Linear(128, 32, bias=False), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize(
    "fields",
    [
        *({"activations": one} for one in ("checkpoint", "selective", "offload", "compress")),
        pytest.param({"activations": "checkpoint", "compile": True}, marks=pytest.mark.slow),
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_a_copied_block_computes_with_its_own_weights(fields: dict[str, Any]) -> None:
    """A task may copy a block for a teacher or an average after launcher has arranged the model."""
    block, device = nn.Linear(8, 8), torch.device("cpu")
    apply_activations([block], recipe("none", micro=1, **fields), device, Unlimited())
    apply_compile([block], recipe("none", micro=1, **fields), device, Unlimited())
    teacher = copy.deepcopy(block)
    with torch.no_grad():
        teacher.weight.mul_(2)
        teacher.bias.mul_(2)
    x = torch.randn(2, 8, requires_grad=True)
    [gradient], [other] = (torch.autograd.grad(one(x).sum(), x) for one in (teacher, block))
    assert torch.equal(teacher(x), 2 * block(x)) and torch.equal(gradient, 2 * other)


def test_an_operator_that_fails_in_a_block_fails_when_it_runs_again() -> None:
    class Trying(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(torch.cat([x, x], 1))
            except RuntimeError:
                return super().forward(x).square()

    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        block = Trying(4, 4)
        if recomputes:
            block.forward = recomputed(block, recipe("none", activations="selective"))  # type: ignore[method-assign]
        block(torch.ones(2, 4)).sum().backward()
        gradients.append(block.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("activations", ["selective", "checkpoint"])
def test_attention_with_dropout_draws_in_the_recomputation_what_it_drew_before(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention with dropout has no kernel on a CPU that `selective` would keep: another operator stands in
    for it."""

    @torch.library.custom_op(
        "launcher_test::attention", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded]
    )
    def attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
        return x * (torch.rand_like(x) > dropout_p)

    attention.register_autograd(lambda context, gradient: (gradient, None))
    operator = torch.ops.launcher_test.attention.default
    monkeypatch.setattr(selective, "KEPT", selective.KEPT | {operator})

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(operator(super().forward(x), 0.5), 0.5).square()

    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        block = Block(8, 8)
        if recomputes:
            block.forward = recomputed(block, recipe("none", activations=activations))  # type: ignore[method-assign]
        block(torch.ones(4, 8)).sum().backward()
        found.append(block.weight.grad)
    assert torch.equal(*found)


def test_a_weight_that_changes_before_the_backward_pass_is_refused_with_offload_as_without() -> None:
    block = nn.Linear(4, 4)
    apply_activations([block], recipe("none", activations="offload"), CPU, Unlimited())
    loss = block(torch.ones(2, 4, requires_grad=True)).sum()
    with torch.no_grad():
        block.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_block_that_computes_something_else_the_second_time_is_named() -> None:
    block = Residual(nn.Identity())
    calls: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            with torch.no_grad():
                nn.functional.conv1d(x[None], torch.randn(64, 64, 1))
        return block.up(x)

    block.forward = forward  # type: ignore[method-assign]
    again = recomputed(block, recipe("none", micro=1, activations="selective"))
    out = again(torch.randn(64, 32, requires_grad=True)).relu()
    with pytest.raises(TaskError, match=r"the recomputation of a block calls aten\.convolution"):
        out.sum().backward()
