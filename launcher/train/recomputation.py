"""What a block's recomputation must begin with: what its forward pass began with.

torch.utils.checkpoint restores torch's own random numbers, and nothing else. A block may also draw from
Python's or numpy's generators, change its buffers, attributes and arguments, or be called in evaluation mode:
without this file, the recomputation would begin with what the forward pass left, compute another function,
and change the state a second time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import tree_map

from launcher.spec.base import format_bytes
from launcher.spec.listed import listed
from launcher.train.recovery.fingerprint import fingerprint
from launcher.train.recovery.state_finder import (
    INTERNAL,
    MOST_DATA,
    MOST_ITEMS,
    SMALL,
    State,
    attributes_of,
    classes_of,
    content,
    sort_of,
    state_of,
)
from launcher.train.rng import GLOBAL_NUMBERS
from launcher.train.task import TaskError

WATCHED = 2
"First passes of a block after which tensors are compared by content: versions miss writes through `.data`."
_ABSENT = object()
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class BlockState:
    """The state that a block's forward pass may read and change. It consists of

    - the buffers of its modules, whether they are in training mode, and which parameters are trained;
    - the attributes of those modules that are of the user's classes, and the arguments of the call: tensors,
      generators, arrays, and the entries of dictionaries, lists and objects of the user's classes;
    - the random numbers of Python and numpy.
    """

    def __init__(self, block: nn.Module, inner: Callable[[], Contexts] | None = None) -> None:
        """`inner`: makes contexts of one forward pass and its recomputation that are entered after these."""
        self._inner = inner
        self.name = type(block).__name__
        self.modules = [(f"{name}." if name else "", module) for name, module in block.named_modules()]
        self.passes = 0
        self.written: set[str] = set()
        "Names of tensors that a pass has written."

    def contexts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Contexts:
        """Return the contexts of one forward pass and of its recomputation, for torch.utils.checkpoint."""
        first, again = self._inner() if self._inner is not None else (nullcontext(), nullcontext())
        forward = ForwardPass(self, args, kwargs)
        return _Both(forward, first), _Both(Recomputation(forward), again)


class _Both:
    """Two contexts as one, which may be entered more than once."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


class Place:
    """A dictionary, list, set or deque, and what it holds now. The attributes of an object are a dictionary.

    `detached`: tensors with a graph are kept without it, because it would keep the memory of its pass.
    """

    def __init__(self, name: str, home: Any, *, detached: bool = False) -> None:
        self.name, self.home, self._held = name, home, _entries(home)
        if detached:
            for key, value in _items(self._held):
                if isinstance(value, (torch.Tensor, tuple)):
                    self._held[key] = _in_tuples(value, lambda t: t if t.is_leaf else t.detach())

    def changed(self) -> list[str]:
        """Return the names of what differs, without tensors with a graph, which belong to one pass."""
        held, now = dict(_items(self._held)), dict(_items(_entries(self.home)))
        keys = [key for key in {**held, **now} if held.get(key, _ABSENT) is not now.get(key, _ABSENT)]
        new = ((key, now.get(key)) for key in keys)
        return [f"{self.name}{key}" for key, one in new if not isinstance(one, torch.Tensor) or one.is_leaf]

    def restore(self, copies: Mapping[int, torch.Tensor]) -> Place | None:
        """Restore what it held, with `copies` (by id) in place of tensors. Return what it holds now; None if
        nothing differs."""
        held = self._held
        if copies:
            held = held.copy()
            for key, value in _items(held):
                if isinstance(value, (torch.Tensor, tuple)):
                    held[key] = _in_tuples(value, lambda t: copies.get(id(t), t))
        if _same(held, self.home):
            return None
        now = Place(self.name, self.home)
        self.home.clear()
        (self.home.update if isinstance(self.home, (MutableMapping, set)) else self.home.extend)(held)
        return now


class Switches:
    """Which modules are in training mode now, and which of their parameters are trained."""

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        self._modes = [(module, module.training) for _, module in modules]
        self._trained = [
            (module._parameters, name, p.requires_grad)  # FSDP replaces the parameter
            for _, module in modules
            for name, p in module._parameters.items()
            if p is not None
        ]

    def restore(self) -> Switches:
        """Return those that are now set otherwise."""
        now = Switches([])
        for module, training in self._modes:
            if module.training != training:
                now._modes.append((module, module.training))
                module.training = training
        for parameters, name, trained in self._trained:
            p = parameters.get(name)
            if p is not None and p.requires_grad != trained:
                now._trained.append((parameters, name, p.requires_grad))
                p.requires_grad_(trained)
        return now


class ForwardPass:
    """Keeps, of the state that one forward pass began with, what the pass changes.

    Raises TaskError if the pass changes in place a tensor of which there is no copy: one of more than 1 MiB,
    or one that it was called with.
    """

    def __init__(self, state: BlockState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.state = state
        self._arguments = [(f"argument {at}", one) for at, one in enumerate(args)]
        self._arguments += [(f"argument {key}", one) for key, one in kwargs.items()]
        # torch itself watches and keeps these, or under a checkpoint of the model computes them again.
        self._watched_by_torch = {id(one) for one in args}
        self.places: list[Place] = []
        self.copies: dict[int, torch.Tensor] = {}
        "Id of a tensor -> its content before the pass."
        self.unchanged: list[tuple[str, torch.Tensor, int]] = []
        "Tensors that the pass left as they were, with their names and versions."
        self.generators: list[State] = []
        "And small arrays."
        self.numbers: list[Any] = []
        "States of GLOBAL_NUMBERS before the pass; None if the pass drew nothing."

    @torch.no_grad()
    def __enter__(self) -> None:
        self._tensors: dict[int, tuple[str, torch.Tensor, int]] = {}
        self._given: set[int] = set()
        self.switches = Switches(self.state.modules)
        seen: set[int] = set()
        arguments, self._arguments = self._arguments, []
        self._search(arguments, seen, given=True)
        inside: list[tuple[str, Any]] = []
        for prefix, module in self.state.modules:
            self.places.append(Place(prefix, module._buffers, detached=True))
            inside += [(f"{prefix}{key}", buffer) for key, buffer in module._buffers.items()]
            if classes_of(module):
                self.places.append(Place(prefix, vars(module), detached=True))
                own = ((key, value) for key, value in vars(module).items() if key not in INTERNAL)
                inside += [(f"{prefix}{key}", value) for key, value in own]
        self._search(inside, seen, given=False)
        self._prints: dict[int, torch.Tensor | None] = {}
        for number, (_, tensor, _) in self._tensors.items():
            if number in self._given:
                continue
            if tensor.nbytes <= SMALL:
                self.copies[number] = tensor.clone()
            elif self.state.passes < WATCHED and tensor.nbytes <= MOST_DATA:
                self._prints[number] = _print(tensor)
        self.numbers = [numbers.state() for numbers in GLOBAL_NUMBERS]

    def _search(self, waiting: list[tuple[str, Any]], seen: set[int], *, given: bool) -> None:
        """Find places, tensors and generators in values, each with its name. `given`: the block was called
        with them."""
        for name, value in waiting:  # grows meanwhile
            sort = sort_of(value)
            if sort == "plain" or id(value) in seen or len(seen) == MOST_ITEMS:
                continue
            seen.add(id(value))
            if sort == "tensor":
                if isinstance(value, nn.Parameter):
                    continue
                if given:
                    self._given.add(id(value))
                if given or content(value) is not None:
                    self._tensors[id(value)] = name, value, _version(value)
            elif (found := state_of(name, value)) is not None:
                self.generators.append(found)
            else:
                contents = [value] if sort in ("dict", "items", "tuple") else []
                for home in [*attributes_of(value), *contents]:
                    if len(home) <= MOST_ITEMS:
                        waiting += [(f"{name}[{key!r}]", inside) for key, inside in _items(home)]
                        if not isinstance(home, (tuple, frozenset)):
                            self.places.append(Place(f"{name} ", home, detached=not given))

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        tensors, prints, given = self._tensors, self._prints, self._given
        del self._tensors, self._prints, self._given
        if kind is not None:
            return
        self.generators = [one for one in self.generators if one.changed()]
        self.numbers = [
            None if numbers.state() == before else before
            for numbers, before in zip(GLOBAL_NUMBERS, self.numbers, strict=True)
        ]
        state = self.state
        watched = state.passes < WATCHED
        state.passes += 1
        for number, (name, tensor, version) in tensors.items():
            changed = _version(tensor) != version
            if number in given:
                if changed:
                    raise TaskError(
                        f"{self._place(name)} {CHANGED_IN_PASS}. Let it change a copy, or {INSTEAD}"
                    )
                if number not in self._watched_by_torch:
                    self.unchanged.append((name, tensor, version))
                continue
            copy = self.copies.get(number)
            if changed or (watched and _differs(tensor, copy, prints.get(number))):
                state.written.add(name)
            if name not in state.written:
                self.copies.pop(number, None)
                self.unchanged.append((name, tensor, version))
            elif copy is None:
                raise TaskError(
                    f"{self._place(name)} ({format_bytes(tensor.nbytes)}) {CHANGED_IN_PASS}: copies are kept "
                    f"of up to {format_bytes(SMALL)}. Instead, {INSTEAD}"
                )
        if self.copies:
            self._check_separate([tensors[number][:2] for number in self.copies], [*tensors.values()])

    def _check_separate(
        self, written: list[tuple[str, torch.Tensor]], tensors: list[tuple[str, torch.Tensor, int]]
    ) -> None:
        """Raise TaskError if a tensor that the pass wrote shares memory with another one: their copies would
        not."""
        for name, one in written:
            for other_name, other, _ in tensors:
                if other is not one and _shares_memory(one, other):
                    raise TaskError(
                        f"{self._place(name)} {CHANGED_IN_PASS}: {other_name} is in the same memory. Make it "
                        f"from {name} where it is used, or {INSTEAD}"
                    )

    def changes(self) -> list[str]:
        """Return the names of what the pass has changed."""
        found = [name for place in self.places for name in place.changed()]
        found += [name for name in self.state.written if name not in found]
        found += [generator.name for generator in self.generators]
        return found + ["the numbers of random or numpy.random"] * any(
            one is not None for one in self.numbers
        )

    def check_unchanged(self) -> None:
        """Raise TaskError if a tensor that the pass read, but did not write, was written since."""
        for name, tensor, version in self.unchanged:
            if _version(tensor) != version:
                raise TaskError(
                    f"{self._place(name)} was changed in place between the forward pass of its block and the "
                    "recomputation, which would begin with the changed values. Change it in the block's "
                    "forward pass or after the step, or use activations: keep or offload"
                )

    def _place(self, name: str) -> str:
        return f"{name} of a block {self.state.name}"


CHANGED_IN_PASS = (
    "is changed in place by the forward pass of its block, whose recomputation would begin with the changed "
    "values"
)
INSTEAD = "use activations: keep or offload, or leave the block out of blocks() of the task"


def without_changes(forward: Callable[..., Any], state: BlockState, *args: Any, **kwargs: Any) -> Any:
    """Call the compiled forward of a block that compiled code recomputes.

    torch.compile begins the recomputation with what the forward pass has left. Raises TaskError if one of the
    first passes changes state.
    """
    if state.passes >= WATCHED or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    watched = ForwardPass(state, args, kwargs)
    with watched:
        result = forward(*args, **kwargs)
    if changes := watched.changes():
        raise TaskError(
            f"{listed(changes)} of a block {state.name} changed in its forward pass, and with compile: true "
            "its recomputation would begin with what has changed: use compile: false, or activations: keep "
            "or budget"
        )
    return result


class Recomputation:
    """Lets a block begin with the state that its forward pass began with, and puts the present state back
    afterwards. torch may enter it more than once."""

    def __init__(self, forward: ForwardPass) -> None:
        self._forward = forward

    @torch.no_grad()
    def __enter__(self) -> None:
        forward = self._forward
        forward.check_unchanged()
        copies = {key: copy.clone() for key, copy in forward.copies.items()}
        # Before the places, among which are all attributes of modules of the user's classes.
        self._switches = forward.switches.restore()
        self._places = [now for place in forward.places if (now := place.restore(copies)) is not None]
        self._generators = [generator.again() for generator in forward.generators]
        for generator in forward.generators:
            generator.restore()
        self._numbers = [
            None if then is None else numbers.state()
            for numbers, then in zip(GLOBAL_NUMBERS, forward.numbers, strict=True)
        ]
        _set_numbers(forward.numbers)

    def __exit__(self, *_: object) -> None:
        for place in self._places:
            place.restore({})
        self._switches.restore()
        for generator in self._generators:
            generator.restore()
        _set_numbers(self._numbers)
        self._places, self._generators, self._numbers = [], [], []


def _entries(home: Any) -> Any:
    """Return a copy of a mapping as a dictionary, of anything else as a list."""
    return dict(home) if isinstance(home, (dict, Mapping)) else list(home)


def _items(entries: Any) -> list[tuple[Any, Any]]:
    return list(entries.items() if isinstance(entries, Mapping) else enumerate(entries))


def _same(entries: Any, home: Any) -> bool:
    """Return whether a container has these entries, in this order."""
    if len(entries) != len(home):
        return False
    if isinstance(entries, dict):
        return all(map(operator.eq, entries, home)) and all(
            map(operator.is_, entries.values(), home.values())
        )
    return all(map(operator.is_, entries, home))


def _in_tuples(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to a tensor, or to the tensors in a tuple, which cannot be a place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if not isinstance(value, tuple) or not any(isinstance(one, (torch.Tensor, tuple)) for one in value):
        return value
    return tree_map(
        lambda one: function(one) if isinstance(one, torch.Tensor) else one,
        value,
        is_leaf=lambda one: not isinstance(one, tuple),
    )


def _set_numbers(states: list[Any]) -> None:
    for numbers, state in zip(GLOBAL_NUMBERS, states, strict=False):
        if state is not None:
            numbers.set_state(state)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, theirs = content(one), content(other)
    if mine is None or theirs is None or mine.untyped_storage()._cdata != theirs.untyped_storage()._cdata:
        return False
    (first, last), (other_first, other_last) = _extent(mine), _extent(theirs)
    return first < other_last and other_first < last


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a plain tensor begins and ends in its storage, in bytes."""
    first = int(tensor.storage_offset())
    if not tensor.numel():
        return 0, 0
    last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _print(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a fingerprint of the content; None in a trace, whose tensors have none."""
    plain = content(tensor)
    return None if plain is None or is_fake(plain) else fingerprint(plain)


def _differs(tensor: torch.Tensor, copy: torch.Tensor | None, printed: torch.Tensor | None) -> bool:
    if copy is None:
        return printed is not None and not _equal(_print(tensor), printed)
    now, then = content(tensor), content(copy)
    return now is not None and not is_fake(now) and not _equal(now, then)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and torch.equal(one, other)
