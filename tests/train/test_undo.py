"""What a repeated step begins with: everything that changes in a step is put back, wherever it is kept."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import operator
import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations

from launcher.spec.adapter import Adapter
from launcher.train.cpu_memory_budget import MIB, MemoryBudget
from launcher.train.data.same_samples import number_of
from launcher.train.loop import _modules_of
from launcher.train.rng import random_state
from launcher.train.sharding.cleanup import clean
from launcher.train.sharding.kept_memory import KeptMemory
from launcher.train.task import Task
from launcher.train.undo import undo as undo_module
from launcher.train.undo.fingerprint import CHUNK, row_sums
from launcher.train.undo.objects import SMALL
from launcher.train.undo.saved_state import Detached, Entries
from launcher.train.undo.state_finder import FoundState, StateFinder
from launcher.train.undo.undo import Undo
from tests.train.changing import Changing


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_undo_restores_buffers_that_are_replaced_resized_or_changed_uncounted() -> None:
    torch.manual_seed(0)
    model = Changing(16)
    undo = Undo(model, torch.device("cpu"))
    classes = torch.arange(8)
    for _ in range(3):
        undo.take()
        before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        outputs = []
        for _ in range(3):
            outputs.append(model(classes))
            undo.restore()
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
        after = dict(model.named_buffers())
        assert after.keys() == before.keys()
        for name, (buffer, values) in before.items():
            assert after[name] is buffer and torch.equal(buffer, values), name
            assert torch.equal(undo.buffers()[name], values), name
        model(classes)


def test_undo_copies_no_constant_and_what_changes_once_for_each_type() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.ones(1000, 1000))
    undo = Undo(model, torch.device("cpu"))
    calls = []
    original = torch._foreach_copy_
    for _ in range(3):
        undo.take()
        model(torch.rand(3, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda into, of: calls.append(len(into)) or original(into, of))
        undo.take()
    assert sorted(calls) == [2, 4], "the counts, and the means and variances"
    assert undo.buffers()["mask"] is model.mask


@pytest.mark.parametrize("write", ["add", "data", "numpy", "resize"])
def test_a_large_buffer_is_followed_from_its_first_change_on_however_it_is_written(write: str) -> None:
    model = nn.Module()
    model.register_buffer("codes", torch.arange(600_000.0))
    undo = Undo(model, torch.device("cpu"))
    assert undo.secure() is None
    _write(model.codes, write)
    before_first_step = torch.arange(600_000.0)
    assert undo.restore() == (True, ()) and torch.equal(model.codes, before_first_step)

    undo.release()
    _write(model.codes, write)
    undo.take()
    after_step = model.codes.clone()
    _write(model.codes, write)
    assert undo.restore() == (False, ()) and torch.equal(model.codes, after_step)


def _write(tensor: torch.Tensor, how: str) -> None:
    if how == "add":
        tensor.add_(1)
    elif how == "data":
        tensor.data[7] = -tensor[7] - 1
    elif how == "numpy":
        tensor.numpy()[11] += 1
    else:
        tensor.data = torch.cat([tensor, tensor[:5]])


def test_what_changed_for_the_first_time_without_a_copy_is_told_and_left() -> None:
    model = nn.Module()
    model.teacher = nn.Parameter(torch.zeros(600_000), requires_grad=False)
    undo = Undo(model, torch.device("cpu"))
    assert undo.lost() == []
    model.teacher.data[3] = 1
    assert undo.lost() == ["teacher"] and undo.restore() == (False, ("teacher",))


class Keeper(Task):
    """A task and a model with state everywhere."""

    def __init__(self) -> None:
        self.drawn, self.shuffled, self.noise = (
            torch.Generator(),
            random.Random(1),
            numpy.random.default_rng(2),
        )
        self.calls, self.seen, self.recent = 0, {"a": [torch.zeros(2)]}, deque([1, 2], maxlen=3)
        self.helper, self.flags = Helper(), bytearray(3)
        self.slim, self.named = Slim(1, torch.zeros(2)), Named()
        self.named.count, self.later = 0, functools.partial(self.helper.add, [1])

    def model(self) -> nn.Module:
        return KeepingModel()

    def data(self, split: str) -> list[int]:
        return [1]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise NotImplementedError


@dataclasses.dataclass
class Slim:
    __slots__ = ("level", "table")
    level: int
    table: Any


class Named(dict):  # type: ignore[type-arg]
    pass


class Helper:
    total = 0

    def __init__(self) -> None:
        self.count, self.teacher, self.table = 0, nn.Linear(2, 2), numpy.zeros(3)

    def add(self, values: list[int]) -> None:
        self.count += len(values)

    def add_hook(self, *_: Any) -> None:
        self.count += 1


COUNTS = {"calls": 0}


class Counting(nn.Linear):
    uses = 0


class KeepingModel(nn.Module):
    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.parametrized = nn.utils.parametrizations.weight_norm(Counting(2, 2))
        self.layer, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.mean, self.steps, self.cache = torch.zeros(2), 0, {}


def _use(task: Keeper, model: KeepingModel) -> None:
    """Change everything, once in place and once by another object."""
    torch.rand(1, generator=task.drawn), task.shuffled.random(), task.noise.random()
    task.calls += 1
    task.seen["a"][0].data.add_(1)
    task.seen["b"] = 3
    task.recent.append(4)
    task.helper.count += 1
    task.flags[1] += 1
    task.slim.level += 1
    task.slim.table.add_(1)
    task.named.count += 1
    task.later.args[0].append(2)
    Helper.total += 1
    KeepingModel.passes += 1
    COUNTS["calls"] += 1
    model.parametrized.uses += 1
    model.eval()
    model.layer.weight.requires_grad_(False)
    task.helper.teacher.weight.data.mul_(0.5)
    task.helper.table += 1
    task.new = 5
    model.mean = model.mean + 1
    model.steps += 1
    model.cache["k"] = torch.ones(1)
    model.frozen.weight.data.mul_(0.5)


def _everything(task: Keeper, model: KeepingModel) -> Any:
    return (
        [task.drawn.get_state().tolist(), task.shuffled.getstate(), task.noise.bit_generator.state],
        [task.calls, str(task.seen), list(task.recent), sorted(vars(task))],
        [
            task.helper.count,
            bytes(task.flags),
            task.helper.teacher.weight.tolist(),
            task.helper.table.tolist(),
        ],
        [model.mean.tolist(), model.steps, sorted(model.cache), model.frozen.weight.tolist()],
    )


def test_undo_puts_back_what_a_task_and_its_model_keep_in_attributes() -> None:
    task = Keeper()
    model = task.model()
    undo = Undo(model, torch.device("cpu"), task)
    for _ in range(3):
        before, seen, mean = _everything(task, model), task.seen, model.mean
        _use(task, model)
        changed = undo.changed()
        assert {"task.seen.a[0]", "task.drawn", "mean", "cache.k"} <= {*changed}
        assert {"task.calls", "task.recent", "steps"} <= {*changed}, "a counter may drive a curriculum"
        assert any(name.endswith(".table") for name in changed)
        assert not [name for name in changed if name.startswith("frozen")], "checkpoints have it"
        assert undo.restore().lost == ()
        assert _everything(task, model) == before and task.seen is seen and model.mean is mean
        _use(task, model)
        undo.take()
        assert undo.changed() == []


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapted, self.kept = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.center = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.codes = nn.Parameter(torch.zeros(SMALL), requires_grad=False)


@pytest.mark.parametrize("name", ["center", "codes"])
def test_a_frozen_parameter_that_changes_under_an_adapter_is_named_before_a_checkpoint_leaves_it_out(
    name: str,
) -> None:
    task, model = Keeper(), Centred()
    plain = Undo(model, torch.device("cpu"), task)
    task.adapter = Adapter(kind="lora", rank=2)
    undo = Undo(model, torch.device("cpu"), task)
    for step in range(3):
        for one in (plain, undo):
            one.take()
        assert undo.rewritten() == ([name] if step > 1 else [])
        if step == 1:
            getattr(model, name).data[0] = 1.0  # which torch does not count
        model.adapted.weight.data += 1
    assert plain.rewritten() == [], "checkpoints hold it"


class Critic(Keeper):
    """A task that trains a second model itself, and a model whose parts it changes for a part of a pass."""

    _draws, meter = 0, Helper()

    def __init__(self) -> None:
        self.critic, self.turn = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), {"a": 1, "b": 2}
        _call_once(self.critic[1])
        self.optimizer = torch.optim.AdamW(self.critic.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.one = torch.ones(1)
        self.many = self.one.expand(3)
        self.mean = torch.zeros(2)
        self.filter = torch.fft.fft(torch.ones(2)).conj()
        with torch.inference_mode():
            self.bank = torch.ones(2)

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        model[0].register_forward_hook(Helper().add_hook)
        return model

    def backward(self) -> None:
        self.critic[0](torch.ones(2)).sum().backward()  # dropout could make it zeros

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()

    def write(self) -> None:
        with torch.inference_mode():
            self.bank.add_(1)


def _call_once(module: nn.Module) -> None:
    def hook(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        _call_once(module)

    handles = [
        module.register_forward_hook(hook, with_kwargs=True, always_call=True),
        module.register_forward_pre_hook(lambda *_: None, with_kwargs=True),
    ]


def _rotate(turn: dict[str, int]) -> None:
    first = next(iter(turn))
    turn[first] = turn.pop(first)


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


LEFT_BY_A_PASS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "order": (lambda task, model: _rotate(task.turn), lambda task, model: [*task.turn]),
    "private number of a class": (
        lambda task, model: _set(Critic, "_draws", Critic._draws + 1),
        lambda task, model: Critic._draws,
    ),
    "object of a class": (
        lambda task, model: Critic.meter.add([1]),
        lambda task, model: Critic.meter.count,
    ),
    "mode of a second model": (
        lambda task, model: task.critic.train(not task.critic.training),
        lambda task, model: [one.training for one in task.critic.modules()],
    ),
    "a second model that is frozen": (
        lambda task, model: task.critic.requires_grad_(not task.critic[0].weight.requires_grad),
        lambda task, model: [p.requires_grad for p in task.critic.parameters()],
    ),
    "gradient": (
        lambda task, model: task.backward(),
        lambda task, model: [p.grad if p.grad is None else p.grad.tolist() for p in task.critic.parameters()],
    ),
    "optimizer": (
        lambda task, model: (task.backward(), task.update()),
        lambda task, model: (
            [p.tolist() for p in task.critic.parameters()],
            str(task.optimizer.state_dict()),
            task.schedule.last_epoch,
        ),
    ),
    "expanded tensor": (lambda task, model: task.one.add_(1), lambda task, model: task.many.tolist()),
    "inference tensor": (lambda task, model: task.write(), lambda task, model: task.bank.tolist()),
    "conjugate": (lambda task, model: task.filter.mul_(2), lambda task, model: task.filter.tolist()),
    "written with a graph": (
        lambda task, model: task.mean.detach_().add_(task.critic[0].weight[0]),
        lambda task, model: task.mean.tolist(),
    ),
    "hook of a module": (
        lambda task, model: model[1].register_forward_hook(print),
        lambda task, model: [*model[1]._forward_hooks],
    ),
    "hook of a parameter": (
        lambda task, model: model[0].weight.register_hook(print),
        lambda task, model: [*(model[0].weight._backward_hooks or ())],
    ),
    "hook that removes itself": (
        lambda task, model: task.critic(torch.ones(2)),
        lambda task, model: [
            *task.critic[1]._forward_hooks,
            *task.critic[1]._forward_hooks_with_kwargs,
            *task.critic[1]._forward_hooks_always_called,
            *task.critic[1]._forward_pre_hooks_with_kwargs,
        ],
    ),
    "what a hook counts": (
        lambda task, model: model[0](torch.ones(2)),
        lambda task, model: [hook.__self__.count for hook in model[0]._forward_hooks.values()],
    ),
    "number of a torch module": (
        lambda task, model: _set(model[1], "p", model[1].p / 2),
        lambda task, model: model[1].p,
    ),
    "forward of a torch module": (
        lambda task, model: _set(model[1], "forward", lambda x: x),
        lambda task, model: vars(model[1]).get("forward"),
    ),
    "module": (
        lambda task, model: _set(model, "0", nn.Linear(2, 2)),
        lambda task, model: [*map(id, model)],
    ),
}


@pytest.mark.parametrize("case", LEFT_BY_A_PASS)
def test_undo_puts_back_what_code_changes_for_a_part_of_a_pass(case: str) -> None:
    change, read = LEFT_BY_A_PASS[case]
    task = Critic()
    model = task.model()
    undo = Undo(model, torch.device("cpu"), task)
    undo.secure()
    for _ in range(3):
        before = read(task, model)
        change(task, model)
        assert read(task, model) != before
        undo.changed()
        assert undo.restore().lost == () and read(task, model) == before
        change(task, model)
        undo.take()


def test_undo_puts_back_a_parameter_in_whose_place_a_pass_had_put_a_tensor() -> None:
    """As DropConnect does, in the model and in a second one."""
    task = Critic()
    model = task.model()
    undo = Undo(model, torch.device("cpu"), task)
    for layer in (model[0], task.critic[0]) * 2:
        weight, order = layer.weight, [*layer._parameters]
        del layer.weight
        layer.weight = weight * 0.5
        undo.restore()
        assert layer.weight is weight and [*layer._parameters] == order and "weight" not in vars(layer)
        undo.take()


def test_undo_takes_back_a_parametrization_that_a_pass_has_registered() -> None:
    task = Critic()
    model = task.model()
    undo = Undo(model, torch.device("cpu"), task)
    for layer in (model[0], task.critic[0]) * 2:
        weight, names = layer.weight, [*layer.state_dict()]
        for _ in range(2):  # the step is repeated
            parametrizations.weight_norm(layer)
            layer(torch.ones(2))
            undo.restore()
            assert type(layer) is nn.Linear and layer.weight is weight and [*layer.state_dict()] == names
        undo.take()


def test_undo_restores_the_hooks_of_the_parameters_that_fsdp_gathers(world_of_one: None) -> None:
    """A pass that failed may have gathered them for the first time, or after a step that kept a hook."""
    calls: list[str] = []

    class Hooked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name, p in (("weight", self.weight), ("bias", self.bias)):
                p.register_hook(lambda _, name=name: calls.append(name))
            self.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
            return super().forward(x)

    model = nn.Sequential(Hooked(2, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    undo = Undo(model, torch.device("cpu"))
    for kept in (1, 2, 3):
        for _ in range(2):
            model(torch.ones(1, 2))
            clean(model)
            undo.restore()
        model(torch.ones(1, 2)).sum().backward()
        undo.take()
        assert sorted(calls) == kept * ["accumulated"] + kept * ["bias"] + kept * ["weight"]
        calls.clear()


def test_undo_keeps_what_earlier_steps_added_to_a_torch_module_and_restores_its_numbers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    undo = Undo(model, torch.device("cpu"))
    model[0].calls, model.calls, model[1].seen = 1, 1, torch.ones(2)
    undo.take()
    model[0].calls, model.calls = 2, 2
    undo.restore()
    assert (model[0].calls, model.calls, model[1].seen.tolist()) == (1, 1, [1, 1])


def test_a_model_of_many_modules_leaves_the_search_room_for_the_task() -> None:
    task, model = Keeper(), nn.ModuleList(nn.Sequential(*map(nn.Dropout, [0.1] * 200)) for _ in range(60))
    undo = Undo(model, torch.device("cpu"), task)
    task.calls += 1
    undo.restore()
    assert task.calls == 0


def test_a_skipped_step_keeps_the_modes_of_a_second_model_as_it_keeps_the_counter_that_set_them() -> None:
    task = Critic()
    model = task.model()
    undo = Undo(model, torch.device("cpu"), task)
    task.turn["a"] += 1
    hook = task.critic[0].bias.register_hook(print)
    task.critic.eval().requires_grad_(False)
    model.eval()
    task.critic[0].weight.grad = torch.full((2, 2), math.nan)
    undo.restore(skipped=True)
    assert task.turn["a"] == 2 and model.training
    assert not task.critic[1].training and not task.critic[0].weight.requires_grad
    assert [*task.critic[0].bias._backward_hooks] == [hook.id]
    assert task.critic[0].weight.grad is None, "it may be NaN"


class Renamed(Helper):
    pass


def _grow(task: Keeper, model: KeepingModel) -> None:
    task.seen.update(dict.fromkeys(range(2000), 0))


CHANGES = {
    "attribute": lambda task, model: setattr(task, "calls", 1000),
    "new attribute": lambda task, model: setattr(model, "extra", [1]),
    "attribute removed": lambda task, model: delattr(task, "calls"),
    "key of the same value": lambda task, model: task.seen.update(c=task.seen.pop("a")),
    "element": lambda task, model: task.seen["a"].append(torch.zeros(3)),
    "deque": lambda task, model: task.recent.append(task.recent[0]),
    "slot": lambda task, model: setattr(task.slim, "table", torch.ones(2)),
    "attribute of a dictionary": lambda task, model: setattr(task.named, "count", [2]),
    "class": lambda task, model: setattr(Helper, "total", 1000),
    "class of an object": lambda task, model: setattr(task.helper, "__class__", Renamed),
    "global": lambda task, model: COUNTS.update(calls=1000),
    "part of a torch module": lambda task, model: task.helper.teacher.register_buffer("b", torch.ones(2)),
    "module of a task's module": lambda task, model: task.helper.teacher.add_module(
        "more", nn.BatchNorm1d(2)
    ),
    "buffer": lambda task, model: model.layer.register_buffer("mask", torch.ones(2)),
    "switches": lambda task, model: (model.eval(), model.layer.weight.requires_grad_(False)),
    "array": lambda task, model: task.helper.table.__iadd__(1),
    "generators": lambda task, model: (task.shuffled.random(), torch.rand(1, generator=task.drawn)),
    "a graph, in place": lambda task, model: model.mean.add_(model.layer.weight[0]),
    "a graph": lambda task, model: setattr(model, "mean", model.mean + model.layer.weight[0]),
    "too large": _grow,
}
SET_BY_THE_LOOP = {
    "first step": lambda task: setattr(task, "current_step", 1),
    "step": lambda task: setattr(task, "current_step", 1000),
    "loss chunks": lambda task: setattr(task, "loss_chunks", 1000),
}


def _found(found: FoundState) -> Any:
    kept = [getattr(place, "kept", getattr(place, "_kept", None)) for place in found.places]
    entries = [{key: _identity(one) for key, one in of.items()} for of in kept if isinstance(of, dict)]
    others = [
        [_identity(one) for one in of] if isinstance(of, list) else str(of)
        for of in kept
        if not isinstance(of, dict)
    ]
    tensors = [(name, id(tensor)) for name, tensor in found.tensors.values()]
    states = [str(state._kept) for state in (*found.arrays, *found.generators)]
    names = [place.name for place in (*found.places, *found.arrays)]
    switches = [
        (one.name, [*map(id, one.owners)], [*map(_identity, one.values)]) for one in found.switches.values()
    ]
    return names, entries, others, tensors, states, switches, found.of_model


def _identity(value: Any) -> Any:
    return "detached" if isinstance(value, Detached) else value if isinstance(value, int) else id(value)


@pytest.mark.parametrize("change", CHANGES)
def test_a_search_that_is_not_repeated_finds_what_a_new_one_finds(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Helper, "total", 0)
    monkeypatch.setitem(COUNTS, "calls", 0)
    task = Keeper()
    model = task.model()
    others = [("task", task), ("globals", globals())]
    finder = StateFinder(model, others)
    before = finder()
    assert finder().search is before.search, "nothing has changed, so nothing was searched"
    was = _found(before)
    CHANGES[change](task, model)
    assert _found(finder()) == _found(StateFinder(model, others)()) != was
    if change == "too large":
        for number in range(2000):
            del task.seen[number]
        assert _found(finder()) == _found(StateFinder(model, others)()) == was


def test_what_the_loop_sets_in_each_step_does_not_repeat_the_search() -> None:
    task = Keeper()
    model = task.model()
    finder = StateFinder(model, [("task", task)])
    before = finder()
    for name, change in SET_BY_THE_LOOP.items():
        change(task)
        assert finder().search is before.search, name
    task.calls = 1000
    assert finder().search is not before.search


def test_undo_uses_the_state_that_a_task_offers() -> None:
    class Offering(Keeper):
        def __init__(self) -> None:
            super().__init__()
            self.curriculum = ctypes.c_int(3)  # nothing could see it change
            self.words = Counter("ab")

        def state(self) -> Any:
            return {"value": self.curriculum.value, "mean": self.seen["a"][0], "words": self.words}

        def load_state(self, state: Any) -> None:
            self.curriculum.value = state["value"]
            self.seen["a"][0] = state["mean"]

    task = Offering()
    undo = Undo(task.model(), torch.device("cpu"), task)
    task.curriculum.value, task.seen["a"][0] = 7, torch.ones(2)
    task.words.update("b")
    assert undo.changed() == []
    assert undo.task_state["words"] == Counter("ab"), "a restart begins with it"
    undo.restore()
    assert task.curriculum.value == 3 and torch.equal(task.seen["a"][0], torch.zeros(2))
    task.seen["a"][0].add_(1)  # what was given is its own now
    assert torch.equal(undo.task_state["mean"], torch.zeros(2))


class Level(nn.Module):
    """A module with an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.passes = torch.zeros(2), 0

    def get_extra_state(self) -> Any:
        return {"mean": self.mean, "passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        self.mean, self.passes = state["mean"], state["passes"]


def test_extra_states_are_those_of_the_last_take_and_count_as_saved() -> None:
    task = Keeper()
    model = nn.Sequential(Level(), nn.Linear(2, 2))
    undo = Undo(model, torch.device("cpu"), task)
    level: Any = model[0]
    level.mean.add_(1)
    level.passes, task.seen["a"][0] = 1, torch.ones(2)
    assert undo.changed() == ["task.seen.a"]
    assert undo.extra["0"]["passes"] == 0 and torch.equal(undo.extra["0"]["mean"], torch.zeros(2))


class Ramp:
    """A user's object that counts under a name that the loop gives to an attribute of the task."""

    current_step = 0


def test_only_the_task_s_own_step_is_the_loop_s() -> None:
    task = Keeper()
    task.ramp = Ramp()  # type: ignore[attr-defined]
    task.ramp.current_step = 1  # type: ignore[attr-defined]
    undo = Undo(task.model(), torch.device("cpu"), task)
    task.ramp.current_step, task.current_step = 2, 7  # type: ignore[attr-defined]
    undo.restore()
    assert (task.ramp.current_step, task.current_step) == (1, 7)  # type: ignore[attr-defined]


def test_the_sums_of_rows_tell_any_change() -> None:
    """Those of a GPU, here on the CPU, of each size and type."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 3, 4, 4095, 4096, 4097, 20_001):
        for dtype in (torch.uint8, torch.bfloat16, torch.float64):
            data = torch.randint(0, 100, (size + 1,), generator=generator).to(dtype)[1:]
            before = row_sums(data.contiguous())
            assert torch.equal(row_sums(data.clone()), before)
            for place in torch.randint(0, size, (20,), generator=generator).tolist():
                other = data.clone()
                other[place] = -other[place] - 1
                assert not torch.equal(row_sums(other), before), (size, dtype, place)
    rows = torch.arange(4096.0).view(4, 1024)
    assert not torch.equal(row_sums(rows[[1, 0, 2, 3]].flatten()), row_sums(rows.flatten()))
    assert not torch.equal(row_sums(rows.flip(1).flatten()), row_sums(rows.flatten()))


def test_a_data_set_is_neither_read_nor_copied_and_a_bank_of_the_task_is_put_back() -> None:
    class Banked(Keeper):
        def __init__(self) -> None:
            super().__init__()
            self.bank = torch.zeros(600_000)

    task = Banked()
    data = torch.utils.data.TensorDataset(torch.zeros(20_000_000))
    undo = Undo(task.model(), torch.device("cpu"), task, data)
    with pytest.MonkeyPatch.context() as patch:
        read = []
        patch.setattr(undo_module, "fingerprint", lambda tensor: read.append(tensor.numel()) or tensor[:0])
        assert undo.secure() is None
        undo.take()
    assert not [size for size in read if size > 4], "only the model's"
    assert all(slot.values is None for slot in undo._slots.values() if slot.tensor.numel() > 10_000_000)
    task.bank[3] = 1
    assert undo.restore().lost == () and not task.bank.any()


def test_what_an_attribute_holds_with_a_graph_is_put_back_without_it_which_nothing_keeps_alive() -> None:
    class Logging(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            self.pair, self.outputs = (self.last, 1), [self.last * 2]
            return self.last

    model = Logging(4, 4)
    undo = Undo(model, torch.device("cpu"))
    model(torch.ones(2, 4))
    undo.take()
    values, kept = model.last.detach().clone(), [weakref.ref(model.last), weakref.ref(model.outputs[0])]
    model(torch.zeros(2, 4))
    assert [one() for one in kept] == [None, None]
    undo.restore()
    assert (
        torch.equal(model.last, values) and model.last.is_leaf and torch.equal(model.outputs[0], 2 * values)
    )


@pytest.mark.parametrize("outputs", [[], {}, deque(maxlen=1)], ids=["list", "dictionary", "deque"])
def test_a_container_of_activations_is_filled_again_because_the_hook_that_fills_it_holds_it(
    outputs: Any,
) -> None:
    def collect(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        outputs.update(one=output) if isinstance(outputs, dict) else outputs.append(output)

    model = nn.Linear(4, 4)
    model.register_forward_hook(collect)
    task = Keeper()
    task.seen["outputs"], task.pair = outputs, (1, outputs)
    undo = Undo(model, torch.device("cpu"), task)
    expected = model(torch.ones(2, 4)).detach()
    task.largest = model(torch.ones(2, 4)).max(1)
    undo.take()
    for _ in range(2):
        model(torch.zeros(2, 4))
        task.largest = None
        undo.restore()
        restored = [*outputs.values()] if isinstance(outputs, dict) else [*outputs]
        assert task.seen["outputs"] is outputs and task.pair[1] is outputs
        assert all(torch.equal(one, expected) and one.is_leaf for one in restored)
        assert torch.equal(task.largest.values, expected.max(1).values)


def test_new_globals_are_removed_but_for_those_in_which_torch_compile_keeps_its_code() -> None:
    kept = {"__builtins__": {}, "rate": 0.5}
    of_module = dict(kept)
    entries = Entries("module.", of_module)
    compiled = {"__compiled_fn_1_4b1d": print, "_140230_c0": torch, "___stack_7_c1": len}
    of_module |= {"steps": 1, "rate": 0.1, **compiled}
    entries.restore()
    assert of_module == {**kept, **compiled}


def test_an_output_of_transformers_in_an_attribute_is_put_back_as_a_detached_copy() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Answering(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.answer = outputs.CausalLMOutput(logits=super().forward(x))
            return self.answer.logits

    model = Answering(4, 4)
    undo = Undo(model, torch.device("cpu"))
    expected = model(torch.ones(2, 4)).detach()
    undo.take()
    model(torch.zeros(2, 4))
    undo.restore()
    assert torch.equal(model.answer.logits, expected) and model.answer["logits"].is_leaf


def test_a_trained_parameter_that_a_pass_writes_and_writes_back_is_copied_at_each_step() -> None:
    """What the pass leaves does not show it, so the probe tells it."""
    model = nn.ParameterDict({"swapped": torch.ones(4), "other": torch.ones(3)})
    undo = Undo(model, torch.device("cpu"))
    undo.follow(lambda p: p is model["swapped"])
    for step in range(1, 5):
        undo.take()
        model["swapped"].data.fill_(7)
        assert undo.restore().lost == () and model["swapped"].tolist() == [step] * 4
        undo.find_written()
        with torch.no_grad():
            model["swapped"] += 1
    assert [slot.name for slot in undo._slots.values() if slot.values is not None] == ["swapped"]


def test_trained_parameters_that_a_pass_writes_are_put_back() -> None:
    """In the first step by the copy on the host, later by a copy made at each step."""
    model = nn.ParameterDict({"small": torch.ones(4), "large": torch.ones(600_000), "other": torch.ones(3)})
    undo = Undo(model, torch.device("cpu"))
    assert undo.secure() is None

    def passes() -> None:
        for name in ("small", "large"):
            model[name].data.mul_(0.5)

    def update() -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1)

    for step in range(4):
        before = {name: p.detach().clone() for name, p in model.items()}
        passes()
        assert undo.restore().lost == ()
        assert all(torch.equal(p, before[name]) for name, p in model.items()), step
        passes()
        undo.find_written()
        update()
        undo.take()
        undo.release()
    assert [slot.name for slot in undo._slots.values() if slot.is_copied] == ["large", "small"]


def test_a_trained_parameter_that_is_written_later_is_told() -> None:
    model = nn.ParameterDict({"weight": torch.ones(4)})
    undo = Undo(model, torch.device("cpu"))
    for _ in range(3):
        undo.find_written()
        undo.take()
    assert undo.lost() == []
    with torch.no_grad():
        model["weight"].mul_(0.5)
    assert undo.lost() == ["weight"] and undo.restore().lost == ("weight",)


def test_of_a_step_that_is_left_out_the_numbers_of_the_task_alone_are_kept() -> None:
    task = Keeper()
    model = task.model()
    undo = Undo(model, torch.device("cpu"), task)
    calls, drawn, of_model = task.calls, task.drawn.get_state(), _everything(task, model)[-1]
    _use(task, model)
    undo.restore(skipped=True)
    assert _everything(task, model)[-1] == of_model
    assert task.helper.table.tolist() == [0, 0, 0] and task.seen["a"][0].tolist() == [0, 0]
    assert task.calls == calls + 1 and not torch.equal(task.drawn.get_state(), drawn)


@pytest.mark.parametrize("whose", ["task", "model"])
def test_a_step_that_is_left_out_leaves_nothing_in_a_tuple_a_list_or_a_dictionary(whose: str) -> None:
    task, pair = Keeper(), (torch.zeros(2), torch.zeros(2))
    model = task.model()
    owner: Any = task if whose == "task" else model
    owner.carried, owner.bank, owner.named_pair = pair, deque(pair, maxlen=2), {"pair": pair}
    undo = Undo(model, torch.device("cpu"), task)
    bad = (torch.full((2,), math.nan), torch.full((2,), math.nan))
    owner.carried, owner.named_pair["pair"] = bad, bad
    owner.bank.extend(bad)
    undo.restore(skipped=True)
    assert owner.carried is pair and owner.named_pair == {"pair": pair}
    assert len(owner.bank) == 2 and all(map(operator.is_, owner.bank, pair))


def test_undo_tells_of_a_state_in_a_tuple_such_as_an_lstms() -> None:
    class Carrying(nn.Module):
        carried: tuple[torch.Tensor, ...] | None

        def __init__(self) -> None:
            super().__init__()
            self.carried = None

    model = Carrying()
    undo = Undo(model, torch.device("cpu"))
    undo.take()
    model.carried = (torch.ones(2), torch.ones(2))
    assert undo.changed() == ["carried"]


class Sorted(dict):  # type: ignore[type-arg]
    def keys(self) -> Any:
        return sorted(super().keys())

    def values(self) -> Any:
        return [self[key] for key in self.keys()]


class Generated(Sorted):
    def values(self) -> Any:
        return (self[key] for key in self.keys())


@pytest.mark.parametrize("kind", [Sorted, Generated])
def test_undo_finds_what_is_new_in_a_dictionary_whose_values_are_a_copy(kind: type[dict[str, Any]]) -> None:
    model = KeepingModel()
    model.helper = kind(a=torch.zeros(2))  # type: ignore[assignment]
    undo = Undo(model, torch.device("cpu"))
    model.helper["b"] = torch.ones(2)  # type: ignore[index]
    undo.take()
    model.helper["b"].add_(1)  # type: ignore[index]
    undo.restore()
    assert model.helper["b"].tolist() == [1, 1]  # type: ignore[index]


def test_undo_puts_back_the_buffers_of_a_torchscript_module() -> None:
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)))
    undo = Undo(model, torch.device("cpu"))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.rand(3, 3))
    undo.restore()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert _modules_of(model).hold_the_same()


def test_numpys_number_kept_for_randn_is_put_back_after_it_was_used() -> None:
    numpy.random.seed(0)
    numpy.random.randn()
    undo = Undo(nn.Linear(1, 1), torch.device("cpu"))
    expected = numpy.random.randn()
    random_state(torch.device("cpu"))
    undo.restore()
    undo.take()
    numpy.random.randn()
    undo.restore()
    assert numpy.random.randn() == expected


def test_a_parameter_in_a_new_dictionary_of_a_module_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    known = _modules_of(model)
    assert known.hold_the_same()
    model[0]._parameters = {**model[0]._parameters, "new": nn.Parameter(torch.ones(1))}
    assert not known.hold_the_same()


def test_a_fingerprint_on_a_gpu_takes_32_mib_however_large_the_tensor_is():
    data = torch.zeros(3 * CHUNK, dtype=torch.int32)
    with MemoryBudget(None) as budget:
        row_sums(data)
    assert budget.peak - data.nbytes == pytest.approx(8 * CHUNK, rel=0.01)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_that_a_task_keeps_or_is_given_have_neither_shape_nor_strides(
    layout: torch.layout,
) -> None:
    kept = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    task = Keeper()
    task.seen["batch"] = [kept]
    model = nn.Linear(2, 2)
    KeptMemory(model, task).check(model)
    undo = Undo(model, torch.device("cpu"), task)
    undo.take()
    undo.restore()
    assert task.seen["batch"][0] is kept and number_of([kept]) == 0.0
    with MemoryBudget(MIB) as budget:
        budget.track([kept])
        assert budget.live >= 5 * 4


def test_a_lazy_module_of_the_task_stays_what_its_first_pass_made_of_it() -> None:
    task = Keeper()
    task.seen["second"] = second = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    undo = Undo(nn.Linear(2, 2), torch.device("cpu"), task)
    second(torch.ones(2, 4))
    undo.restore()
    second(torch.ones(2, 4))
    undo.take()
    before = second[1].running_mean.clone()
    second(torch.ones(2, 4))
    undo.restore()
    assert torch.equal(second[1].running_mean, before)
