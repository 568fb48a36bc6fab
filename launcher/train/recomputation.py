"""What a block's recomputation must begin with: the state that its forward pass began with.

torch.utils.checkpoint restores torch's own random numbers, and nothing else. A block may also draw from
Python's or numpy's generators, or change its buffers and attributes: without this file, the recomputation
would begin with what the forward pass left, compute another function, and change the state a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from launcher.spec.base import format_bytes
from launcher.train.recovery.fingerprint import fingerprint
from launcher.train.recovery.state_finder import (
    INTERNAL,
    MOST_DATA,
    SMALL,
    State,
    classes_of,
    content,
    generator_state,
    sort_of,
)
from launcher.train.rng import GLOBAL_NUMBERS
from launcher.train.task import TaskError

WATCHED = 2
"First passes of a block after which tensors are compared by content: versions miss writes through `.data`."
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_ABSENT = object()


class BlockState:
    """The buffers and attributes of a block's modules, and the random numbers of Python and numpy.

    The attributes are those of modules of the user's classes: tensors, numbers and generators. Containers,
    and what else an attribute refers to, are not searched.
    """

    def __init__(self, block: nn.Module, inner: Callable[[], Contexts] | None = None) -> None:
        """`inner`: makes contexts of one forward pass and its recomputation that are entered after these."""
        self._inner = inner
        self._name = type(block).__name__
        self._homes: list[tuple[str, dict[str, Any]]] = []
        for name, module in block.named_modules():
            prefix = f"{name}." if name else ""
            self._homes.append((prefix, module._buffers))
            if classes_of(module):
                self._homes.append((prefix, vars(module)))
        self._passes = 0
        self._written: set[str] = set()
        "Names of tensors that a pass has written."

    def contexts(self) -> Contexts:
        """Return the contexts of one forward pass and of its recomputation, for torch.utils.checkpoint."""
        first, again = self._inner() if self._inner is not None else (nullcontext(), nullcontext())
        forward = ForwardPass(self)
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


class ForwardPass:
    """Keeps, of the state that one forward pass began with, what the pass changes.

    Raises TaskError if the pass changes a tensor of more than 1 MiB in place, of which there is no copy.
    """

    def __init__(self, state: BlockState) -> None:
        self.state = state
        self.entries: list[dict[str, Any]] = []
        "The attributes before the pass, like BlockState._homes."
        self.copies: dict[int, torch.Tensor] = {}
        "Id of a tensor -> its content before the pass."
        self.unchanged: list[tuple[str, torch.Tensor, int]] = []
        "Tensors that the pass left as they were, with their names and versions."
        self.generators: list[State] = []
        self.numbers: list[Any] = []
        "States of GLOBAL_NUMBERS before the pass; None if the pass drew nothing."

    @torch.no_grad()
    def __enter__(self) -> None:
        self._tensors: dict[int, tuple[str, torch.Tensor, int]] = {}
        for prefix, home in self.state._homes:
            entries = dict(home)
            for key in home.keys() - INTERNAL:
                value = home[key]
                sort = sort_of(value)
                if sort == "tensor":
                    if not value.is_leaf:  # its graph would keep the memory of its pass
                        entries[key] = value.detach()
                    elif content(value) is not None:
                        self._tensors[id(value)] = f"{prefix}{key}", value, _version(value)
                elif sort == "generator":
                    self.generators.append(generator_state(key, value))
            self.entries.append(entries)
        self._prints: dict[int, torch.Tensor | None] = {}
        for number, (_, tensor, _) in self._tensors.items():
            if tensor.nbytes <= SMALL:
                self.copies[number] = tensor.clone()
            elif self.state._passes < WATCHED and tensor.nbytes <= MOST_DATA:
                self._prints[number] = _print(tensor)
        self.numbers = [numbers.state() for numbers in GLOBAL_NUMBERS]

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        tensors, prints = self._tensors, self._prints
        del self._tensors, self._prints
        if kind is not None:
            return
        self.generators = [one for one in self.generators if one.changed()]
        self.numbers = [
            None if numbers.state() == before else before
            for numbers, before in zip(GLOBAL_NUMBERS, self.numbers, strict=True)
        ]
        watched = self.state._passes < WATCHED
        self.state._passes += 1
        for number, (name, tensor, version) in tensors.items():
            copy = self.copies.get(number)
            if _version(tensor) != version or (watched and _differs(tensor, copy, prints.get(number))):
                self.state._written.add(name)
            if name not in self.state._written:
                self.copies.pop(number, None)
                self.unchanged.append((name, tensor, version))
            elif copy is None:
                raise TaskError(
                    f"{self._place(name)} ({format_bytes(tensor.nbytes)}) is changed in place by the forward "
                    "pass of its block, whose recomputation would begin with the changed values: copies are "
                    f"kept of up to {format_bytes(SMALL)}. Use activations: keep or offload, or leave the "
                    "block out of blocks() of the task"
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
        return f"{name} of a block {self.state._name}"


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
        self._later: list[tuple[dict[str, Any], str, Any]] = []
        for (_, home), entries in zip(forward.state._homes, forward.entries, strict=True):
            for key in [key for key in {**entries, **home} if key not in INTERNAL]:  # in their order
                now, then = home.get(key, _ABSENT), entries.get(key, _ABSENT)
                then = copies.get(id(then), then)
                if now is not then:
                    self._later.append((home, key, now))
                    _put(home, key, then)
        self._generators = [generator.again() for generator in forward.generators]
        for generator in forward.generators:
            generator.restore()
        self._numbers = [
            None if then is None else numbers.state()
            for numbers, then in zip(GLOBAL_NUMBERS, forward.numbers, strict=True)
        ]
        _set_numbers(forward.numbers)

    def __exit__(self, *_: object) -> None:
        for home, key, value in self._later:
            _put(home, key, value)
        for generator in self._generators:
            generator.restore()
        _set_numbers(self._numbers)
        self._later, self._generators, self._numbers = [], [], []


def _put(home: dict[str, Any], key: str, value: Any) -> None:
    if value is _ABSENT:
        del home[key]
    else:
        home[key] = value


def _set_numbers(states: list[Any]) -> None:
    for numbers, state in zip(GLOBAL_NUMBERS, states, strict=False):
        if state is not None:
            numbers.set_state(state)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


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
