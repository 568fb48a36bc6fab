"""A recomputed block computes what its forward pass computed, whatever the block draws and changes."""

from __future__ import annotations

import copy
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from optparse import Values
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from launcher.train.activations.activations import recomputed
from launcher.train.activations.recomputation import ForwardPass
from launcher.train.compiling.compiling import apply_compile
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.rng import NumpyGenerator
from launcher.train.task import TaskError
from launcher.train.undo.objects import SMALL
from tests.train.runs import recipe

WIDTH = 8


class Notes:
    scale = 1.0

    def larger(self) -> float:
        self.scale *= 1.5
        return self.scale


def longer(levels: list[float]) -> int:
    levels.append(1.0)
    return len(levels)


class Block(nn.Module):
    """`factor` is a function of the block and its input, which may draw and change anything."""

    def __init__(self, factor: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.factor = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), factor
        self.calls, self.level = 0, torch.ones(WIDTH)
        self.kept = {"levels": [torch.ones(WIDTH)], "recent": deque([1.0], 2), "notes": Notes()}
        self.methods = {"bound": Notes().larger, "partial": partial(longer, [])}
        self.torch_numbers = torch.Generator().manual_seed(1)
        self.python_numbers = random.Random(2)
        self.numpy_numbers = numpy.random.default_rng(3)
        self.center = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("large", torch.ones(SMALL // 4 + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) * self.factor(self, x)))


def mean_in_place(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.mean.lerp_(x.detach().mean(0), 0.5)
    return block.mean + 0  # saved itself, it could not change before the backward pass


def mean_through_data(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.mean.data.lerp_(x.detach().mean(0), 0.5)
    return block.mean + 0  # saved itself, it could not change before the backward pass


def mean_replaced(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.mean = block.mean.lerp(x.detach().mean(0), 0.5)
    return block.mean + 0  # saved itself, it could not change before the backward pass


def mean_made_late(block: Any, x: torch.Tensor) -> torch.Tensor:
    if "late" not in block._buffers:
        block.register_buffer("late", x.detach().mean(0))
    return block.late.add_(0.1) + 0


def late_change(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    if block.calls > 4:
        block.mean.add_(1)
    return block.mean + block.calls


def level_in_place(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.level.mul_(1.5)
    return block.level + 0


def level_with_graph(block: Any, x: torch.Tensor) -> torch.Tensor:
    before, block.level = block.level, x.mean(0)
    return before.detach() + block.level


def level_in_a_list(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.kept["levels"][0].mul_(1.5)
    block.kept["levels"].append(x.detach().mean(0))
    return block.kept["levels"][0] + sum(block.kept["levels"])


def scale_in_an_object(block: Any, x: torch.Tensor) -> float:
    block.kept["notes"].scale *= 1.5
    block.kept["recent"].append(block.kept["notes"].scale)
    return sum(block.kept["recent"])


def frozen_parameter_in_place(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.center.lerp_(x.detach().mean(0), 0.5)
    return block.center + 0


def frozen_parameter_through_data(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.center.data = block.center.data.lerp(x.detach().mean(0), 0.5)
    return block.center + 0


def statistics_of_an_unregistered_norm(block: Any, x: torch.Tensor) -> Any:
    [norm] = block.kept.setdefault("norms", [nn.BatchNorm1d(WIDTH, affine=False)])
    norm(x.detach())
    return norm.running_mean + 0


STATEFUL: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "python": lambda block, x: random.random(),
    "python's normal": lambda block, x: random.gauss(0, 1),
    "numpy": lambda block, x: numpy.random.rand(),
    "numpy's normal": lambda block, x: numpy.random.randn(),
    "torch": lambda block, x: torch.rand(WIDTH),
    "own of torch": lambda block, x: torch.rand(WIDTH, generator=block.torch_numbers),
    "own of python": lambda block, x: block.python_numbers.random(),
    "own of numpy": lambda block, x: block.numpy_numbers.normal(),
    "mean in place": mean_in_place,
    "mean through data": mean_through_data,
    "mean replaced": mean_replaced,
    "mean made late": mean_made_late,
    "frozen parameter in place": frozen_parameter_in_place,
    "frozen parameter through data": frozen_parameter_through_data,
    "statistics of an unregistered norm": statistics_of_an_unregistered_norm,
    "late change": late_change,
    "level in place": level_in_place,
    "level with graph": level_with_graph,
    "level in a list": level_in_a_list,
    "scale in an object": scale_in_an_object,
    "scale of a bound method": lambda block, x: block.methods["bound"](),
    "list of a partial": lambda block, x: block.methods["partial"](),
}


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def trained(model: nn.Sequential, activations: str) -> list[Any]:
    """Losses, gradients and what is left after three steps with two micro-batches in flight."""
    seed()
    if activations != "keep":
        for block in model:
            block.forward = recomputed(block, recipe("none", micro=1, activations=activations))  # type: ignore[method-assign]
    found: list[Any] = []
    for _ in range(3):
        outputs = [model(torch.randn(4, WIDTH)).square().sum() for _ in range(2)]
        for output in outputs:
            output.backward()
        found += [output.item() for output in outputs]
    found += [p.grad.tolist() for p in model.parameters() if p.grad is not None]
    found += [(name, buffer.tolist()) for name, buffer in model.named_buffers()]
    for block in model:
        found += [block.calls, block.level.tolist(), block.python_numbers.random()]  # type: ignore[operator, union-attr]
        found += [[one.tolist() for one in block.kept["levels"]], [*block.kept["recent"]]]  # type: ignore[index, operator]
        found += [block.numpy_numbers.normal(), block.torch_numbers.get_state().tolist()]  # type: ignore[operator, union-attr]
    return [*found, random.gauss(0, 1), numpy.random.randn(), numpy.random.rand(), torch.rand(()).item()]


@pytest.mark.parametrize("activations", ["checkpoint", pytest.param("selective", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", STATEFUL)
def test_recomputation_begins_with_what_the_forward_pass_began_with(kind: str, activations: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(STATEFUL[kind]) for _ in range(3)))
    assert trained(copy.deepcopy(model), activations) == trained(model, "keep")


class Passing(nn.Module):
    """Changes what it is called with: a list, a dictionary and an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any], skips: list[torch.Tensor], *, notes: Notes) -> dict[str, Any]:
        x = state["x"] * skips.pop() if len(skips) > 2 else state["x"]
        state["x"] = x + torch.tanh(self.linear(x) * notes.scale)
        notes.scale *= 1.5
        skips.append(state["x"])
        return state


def passed_on(model: nn.Sequential, notes: Any) -> list[Any]:
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    state, skips = {"x": x}, list[torch.Tensor]()
    for block in model:
        state = block(state, skips, notes=notes)
    (state["x"].square().sum() + sum(skips).sum()).backward()  # type: ignore[union-attr]
    return [len(skips), notes.scale, *(p.grad.tolist() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("activations", ["checkpoint", "selective"])
@pytest.mark.parametrize(
    "notes", [Notes, partial(SimpleNamespace, scale=1.0), partial(Values, {"scale": 1.0})]
)
def test_recomputation_begins_with_what_the_block_was_called_with(activations: str, notes: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Passing() for _ in range(4)))
    reference = copy.deepcopy(model)
    for block in model:
        block.forward = recomputed(block, recipe("none", micro=1, activations=activations))  # type: ignore[method-assign]
    assert passed_on(model, notes()) == passed_on(reference, notes())


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    scale: tuple[torch.Tensor, float]


def of_a_frozen_dataclass(block: Any, x: torch.Tensor) -> torch.Tensor:
    return block(Frozen(x * 2, (x.mean(), 2.0))).x  # type: ignore[no-any-return]


def of_an_output_of_transformers(block: Any, x: torch.Tensor) -> torch.Tensor:
    from transformers.modeling_outputs import BaseModelOutput  # takes a second

    return block(BaseModelOutput(last_hidden_state=x * 2)).last_hidden_state  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """Takes and returns an object with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Frozen):
            return replace(given, x=torch.tanh(self.linear(given.x)) * given.scale[0])
        given.last_hidden_state = torch.tanh(self.linear(given.last_hidden_state))
        return given


@pytest.mark.parametrize("call", [of_a_frozen_dataclass, of_an_output_of_transformers])
def test_recomputation_takes_objects_that_do_not_let_themselves_be_changed(call: Any) -> None:
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        block, x = Wrapped(), torch.randn(4, WIDTH, requires_grad=True)
        if recomputes:
            block.forward = recomputed(block, recipe("none", micro=1, activations="checkpoint"))  # type: ignore[method-assign]
        call(block, x).square().sum().backward()
        found.append([one.grad.tolist() for one in (x, *block.parameters())])  # type: ignore[union-attr]
    assert found[0] == found[1]


def condition_in_an_attribute(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.level = block.up(x)
    result = block(x)
    block.level = torch.ones(WIDTH)
    return result  # type: ignore[no-any-return]


def sum_of_calls(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.level = torch.zeros_like(x)
    return block(block(block(x)))  # type: ignore[no-any-return]


def add_to_level(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.level += block.down(x)
    return block.level + 0


def other_weights(block: Any, x: torch.Tensor) -> torch.Tensor:
    weights = dict(block.named_parameters())
    faster = {name: weight * 0.5 + block(x).mean() for name, weight in weights.items()}
    return torch.func.functional_call(block, faster, (x,))  # type: ignore[no-any-return]


def one_kernel(block: Any, x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return block(x)  # type: ignore[no-any-return]


def attention(block: Any, x: torch.Tensor) -> torch.Tensor:
    x = block.up(x).view(1, 2, -1, WIDTH // 2)
    return functional.scaled_dot_product_attention(x, x, x).view(-1, WIDTH)


def many_norms(block: Any, x: torch.Tensor) -> torch.Tensor:
    return block.many[:-1](x) + block.many[-1](x)  # type: ignore[no-any-return]


Call = Callable[[Any, torch.Tensor], torch.Tensor]
CALLS: dict[str, tuple[Call, Call]] = {
    "condition in an attribute": (lambda block, x: block.level, condition_in_an_attribute),
    "sum of calls in an attribute": (add_to_level, sum_of_calls),
    "weights of functional_call": (lambda block, x: x + 1, other_weights),
    "kernels of attention": (attention, one_kernel),
    "over 1,000 buffers": (many_norms, lambda block, x: block(x) + block(2 * x)),
}


@pytest.mark.parametrize("activations", ["checkpoint", "selective"])
@pytest.mark.parametrize("kind", CALLS)
def test_recomputation_begins_with_what_the_model_had_set_for_the_forward_pass(
    kind: str, activations: str
) -> None:
    factor, call = CALLS[kind]
    found = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        block = Block(factor)
        if factor is many_norms:
            block.many = nn.Sequential(*(nn.BatchNorm1d(WIDTH, affine=False) for _ in range(334)))
        if recomputes:
            block.forward = recomputed(block, recipe("none", micro=1, activations=activations))  # type: ignore[method-assign]
        loss = call(block, torch.randn(4, WIDTH)).square().sum()
        loss.backward()
        found.append([loss.item(), [p.grad.tolist() for p in block.parameters() if p.grad is not None]])
        found[-1] += [buffer.tolist() for buffer in block.buffers()]
    assert found[0] == found[1]


@pytest.mark.parametrize("activations", ["checkpoint", "selective"])
def test_recomputation_runs_in_the_mode_and_with_the_frozen_parameters_of_the_forward_pass(
    activations: str,
) -> None:
    """As a generator's loss does, for which the discriminator is frozen and in evaluation mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)))
    found = []
    for recomputes in (False, True):
        one = copy.deepcopy(model)
        if recomputes:
            one[1].forward = recomputed(one[1], recipe("none", micro=1, activations=activations))  # type: ignore[method-assign]
        one[1].eval().requires_grad_(False)
        loss = one(torch.ones(2, 8)).square().sum()
        one[1].train().requires_grad_(True)
        loss.backward()
        assert one[1].training and all(m.training and p.requires_grad for m in one[1] for p in m.parameters())
        found.append([None if p.grad is None else p.grad.tolist() for p in one.parameters()])
    assert found[0] == found[1]


@pytest.mark.parametrize("call", [lambda block, x: block(x), lambda block, x: block(input=x)])
def test_an_argument_that_the_forward_pass_changes_in_place_is_refused(call: Any) -> None:
    block = nn.LeakyReLU(inplace=True)
    block.forward = recomputed(block, recipe("none", micro=1, activations="checkpoint"))  # type: ignore[method-assign]
    with pytest.raises(
        TaskError, match=r"^argument (0|input) of a block LeakyReLU is changed in place .* copy"
    ):
        call(block, torch.randn(4, WIDTH, requires_grad=True) + 0)


def test_another_modules_weight_that_changes_between_the_two_passes_is_refused() -> None:
    """As when `optimizer_step: backward` has updated it."""
    block = Block(lambda block, x: block.kept["other"].weight.detach().mean())
    other = block.kept["other"] = nn.Linear(2, 2)
    block.forward = recomputed(block, recipe("none", micro=1, activations="checkpoint"))  # type: ignore[method-assign]
    loss = block(torch.ones(2, WIDTH)).sum()
    other.weight.data.add_(1)
    torch.autograd.graph.increment_version(other.weight)
    with pytest.raises(TaskError, match=r"^kept\['other'\]\.weight of a .* between .* optimizer_step: after"):
        loss.backward()


def test_an_argument_that_changes_between_the_two_passes_is_refused() -> None:
    block = Passing()
    block.forward = recomputed(block, recipe("none", micro=1, activations="checkpoint"))  # type: ignore[method-assign]
    x = torch.ones(2, WIDTH)
    y = block({"x": x}, [], notes=Notes())["x"]
    x.add_(1)
    with pytest.raises(
        TaskError, match=r"^argument 0\['x'\] of a block Passing was changed in place between"
    ):
        y.sum().backward()


@pytest.mark.parametrize("through", [lambda one: one, lambda one: one.data], ids=["in place", "data"])
def test_a_trained_parameter_that_the_forward_pass_changes_is_refused(through: Any) -> None:
    block = Block(lambda block, x: through(block.up.weight.detach()).mul_(0.5).mean())
    again = recomputed(block, recipe("none", micro=1, activations="checkpoint"))
    with pytest.raises(
        TaskError, match=r"^up\.weight of a block Block is changed .* trained .* after the step"
    ):
        again(torch.randn(4, WIDTH))


def test_what_the_model_computes_again_itself_is_not_kept_for_a_block() -> None:
    block, inputs = Block(lambda block, x: 1.0), list[weakref.ref[Any]]()
    block.forward = recomputed(block, recipe("none", micro=1, activations="checkpoint"))  # type: ignore[method-assign]

    def around(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        inputs.append(weakref.ref(x.untyped_storage()))
        return block(x)  # type: ignore[no-any-return]

    loss = checkpoint(around, torch.ones(4, WIDTH, requires_grad=True), use_reentrant=False).sum()
    assert inputs[0]() is None
    loss.backward()


def test_two_names_for_the_same_memory_are_refused_if_it_is_changed() -> None:
    def factor(block: Any, x: torch.Tensor) -> torch.Tensor:
        block.mean.add_(1)
        return block.half.sum()

    block = Block(factor)
    block.half = block.mean[:4]
    block.rest = block.large[4:]  # not changed
    again = recomputed(block, recipe("none", micro=1, activations="checkpoint"))
    with pytest.raises(TaskError, match=r"^mean of a block Block is changed .*: half is in the same memory"):
        again(torch.randn(4, WIDTH))


def test_a_graph_that_is_used_twice_is_recomputed_twice_from_the_same_state() -> None:
    torch.manual_seed(0)
    block = Block(mean_in_place)
    x = torch.randn(4, WIDTH)
    block.forward = recomputed(block, recipe("none", micro=1, activations="checkpoint"))  # type: ignore[method-assign]
    loss, trained = block(x).square().sum(), [p for p in block.parameters() if p.requires_grad]
    first, again = (torch.autograd.grad(loss, trained, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("through", [lambda one: one, lambda one: one.data], ids=["in place", "data"])
def test_a_large_buffer_that_the_forward_pass_changes_is_refused(through: Any) -> None:
    def factor(block: Any, x: torch.Tensor) -> torch.Tensor:
        through(block.large).add_(1)
        return block.large[:WIDTH]

    block = Block(factor)
    again = recomputed(block, recipe("none", micro=1, activations="checkpoint"))
    with pytest.raises(
        TaskError, match=r"^large of a block Block is changed in place .* has 1 MiB.* use activ"
    ):
        again(torch.randn(4, WIDTH))


def test_a_buffer_that_changes_between_the_two_passes_is_refused() -> None:
    block = Block(lambda block, x: block.mean)
    again = recomputed(block, recipe("none", micro=1, activations="selective"))
    loss = again(torch.randn(4, WIDTH)).sum()
    block.mean.add_(1)  # type: ignore[operator]
    with pytest.raises(TaskError, match=r"^mean of a block Block was changed in place between"):
        loss.backward()


@pytest.mark.parametrize("activations", ["selective", "every-second"])
def test_a_result_that_is_changed_in_place_is_computed_again(activations: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            for _ in range(2)
        )
    )
    reference, x = copy.deepcopy(model), torch.randn(4, 8)
    for block in model:
        block.forward = recomputed(block, recipe("none", micro=1, activations=activations))  # type: ignore[method-assign]
    for one in (model, reference):
        (one[1](one[0](x).mul_(2)).mul_(3)).square().sum().backward()  # results of blocks are changed as well
    assert all(
        torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True)
    )


@pytest.mark.parametrize("activations", ["selective", "every-second"])
def test_a_result_that_a_layer_of_torch_changes_in_place_is_computed_again(activations: str) -> None:
    """nn.GRU divides its matrix products into parts with versions of their own."""
    torch.manual_seed(0)
    model = nn.GRU(8, 8)
    reference, x = copy.deepcopy(model), torch.randn(3, 4, 8)
    model.forward = recomputed(model, recipe("none", micro=1, activations=activations))  # type: ignore[method-assign]
    for one in (model, reference):
        one(x)[0].square().sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mean in place", "level in a list", "python"])
def test_state_that_a_compiled_block_changes_is_refused_with_recomputation(kind: str) -> None:
    def compiled(forward: Any, **_: Any) -> Any:
        return forward  # what torch.compile makes of it does not matter: the first pass is refused

    chosen = recipe("none", micro=1, activations="checkpoint", compile=True)
    block = Block(STATEFUL[kind])
    with patch.object(torch, "compile", compiled):
        apply_compile([block], chosen, torch.device("cpu"), Unlimited())
    with pytest.raises(TaskError, match=r"of a block Block changed in its forward pass.* or budget$"):
        block(torch.randn(4, WIDTH))
    plain = Block(lambda block, x: block.mean.sum())
    with patch.object(torch, "compile", compiled):
        apply_compile([plain], chosen, torch.device("cpu"), Unlimited())
    plain(torch.randn(4, WIDTH)).sum().backward()


@pytest.mark.parametrize("compiles", [False, True])
def test_state_without_a_change_is_not_kept_although_it_is_not_a_number(compiles: bool) -> None:
    """The bytes of a weight in 4 bits may be NaN as numbers."""
    block = Block(lambda block, x: block.mean.isnan().any())
    block.mean.fill_(torch.nan)  # type: ignore[operator]
    chosen = recipe("none", micro=1, activations="checkpoint", compile=compiles)
    enter = ForwardPass.__enter__
    with (
        patch.object(torch, "compile", lambda forward, **_: forward),
        patch.object(ForwardPass, "__enter__", autospec=True, side_effect=enter) as entered,
    ):
        if compiles:
            apply_compile([block], chosen, torch.device("cpu"), Unlimited())
        else:
            block.forward = recomputed(block, chosen)  # type: ignore[method-assign]
        loss = block(torch.randn(4, WIDTH)).sum()
    assert [call.args[0].copies for call in entered.call_args_list] == [{}]
    loss.backward()


def test_numpys_state_is_read_anew_whenever_it_may_have_changed() -> None:
    numbers = NumpyGenerator()
    numpy.random.seed(0)
    before = numbers.state()
    assert numbers.state() == before
    for draw in (numpy.random.randn, numpy.random.randn, numpy.random.rand, lambda: numpy.random.seed(1)):
        now = numbers.state()
        draw()
        assert numbers.state() != now
    numbers.set_state(before)
    assert numbers.state() == before
