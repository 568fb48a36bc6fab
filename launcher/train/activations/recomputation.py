"""What a block's recomputation must begin with: what its forward pass began with.

torch.utils.checkpoint restores torch's own random numbers, and nothing else. A block may also draw from
Python's or numpy's generators, change its buffers, attributes and arguments, or be called in evaluation mode:
without this file, the recomputation would begin with what the forward pass left, compute another function,
and change the state a second time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import eq
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.attention import SDPBackend, sdpa_kernel

from launcher.spec.base import format_bytes
from launcher.spec.listed import listed
from launcher.train.activations.in_place import changeable
from launcher.train.activations.local_parts import memory_of
from launcher.train.activations.places import Place, items_of
from launcher.train.rng import GLOBAL_NUMBERS
from launcher.train.task import TaskError
from launcher.train.undo.fingerprint import bits, fingerprint
from launcher.train.undo.state_finder import (
    INTERNAL,
    MOST_DATA,
    MOST_ITEMS,
    SMALL,
    State,
    attributes_of,
    bound_to,
    classes_of,
    content,
    sort_of,
    state_of,
)

WATCHED = 2
"First passes of a block after which tensors are compared by content: versions miss writes through `.data`."
NUMBERS = "the numbers of random or numpy.random"
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class BlockState:
    """The state that a block's forward pass may read and change. It consists of

    - the buffers and parameters of its modules, whether they are in training mode, and what is trained;
    - the attributes of those modules that are of the user's classes, and the arguments of the call: tensors,
      generators, arrays, other modules, and the entries of dictionaries, lists and objects;
    - the random numbers of Python and numpy, and the kernels that attention may use.
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
        forward = ForwardPass(self, args, kwargs, first)
        return forward, Recomputation(forward, again)


class Modules:
    """Which modules are in training mode now, and which parameters they have and train."""

    def __init__(self) -> None:
        self._modes: list[tuple[nn.Module, bool]] = []
        self._parameters: list[tuple[dict[str, Any], str, Any, bool]] = []

    def add(self, module: nn.Module, hold: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._modes.append((module, module.training))
        self._parameters += [
            (module._parameters, name, hold(p), p.requires_grad)
            for name, p in module._parameters.items()
            if p is not None
        ]

    def restore(self, tensors: Mapping[int, torch.Tensor]) -> Modules:
        """Restore them, with `tensors` (by id) in place of tensors. Return what is now otherwise.

        A parameter in the place of another one stays: FSDP shards it. What torch.func.functional_call puts
        there is none.
        """
        now = Modules()
        for module, training in self._modes:
            if module.training != training:
                now._modes.append((module, module.training))
                module.training = training
        for home, name, held, trained in self._parameters:
            p, then = home.get(name), tensors.get(id(held), held)
            if p is not then and not (isinstance(p, nn.Parameter) and isinstance(then, nn.Parameter)):
                now._parameters.append((home, name, p, trained))
                home[name] = then
            elif p is not None and p.requires_grad != trained:
                now._parameters.append((home, name, p, p.requires_grad))
                p.requires_grad_(trained)
        return now


class Watched(NamedTuple):
    """A tensor that a pass may read, as it was before."""

    name: str
    tensor: torch.Tensor
    version: int
    given: bool
    "The block was called with it."
    trained: bool
    "It is a parameter that has a gradient."

    @property
    def has_changed(self) -> bool:
        return _version(self.tensor) != self.version


class ForwardPass:
    """Keeps, of the state that one forward pass began with, what the pass changes.

    Raises TaskError if the pass changes in place a tensor of which there is no copy: one of more than 1 MiB,
    a trained parameter, or one that it was called with.
    """

    def __init__(
        self,
        state: BlockState,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inner: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`inner` is entered after this context."""
        self.state, self._inner = state, inner or nullcontext()
        self._arguments = [(f"argument {at}", one) for at, one in enumerate(args)]
        self._arguments += [(f"argument {key}", one) for key, one in kwargs.items()]
        # torch itself watches and keeps these, or under a checkpoint of the model computes them again.
        self._kept_by_torch = {id(one) for one in args}
        self.kernels = _attention_kernels()
        self.places: list[Place] = []
        self.modules = Modules()
        self.with_graph: dict[int, torch.Tensor] = {}
        "Tensors in places that had a graph, which would keep the memory of its pass, without it; by id."
        self.copies: dict[int, torch.Tensor] = {}
        "Id of a tensor in a place -> its content before the pass."
        self.unchanged: list[Watched] = []
        self.generators: list[State] = []
        "And small arrays. After the pass, those that it has changed."

    @torch.no_grad()
    def __enter__(self) -> None:
        self._without_graph: dict[int, torch.Tensor] = {}
        self._tensors: dict[int, Watched] = {}
        seen: set[int] = set()
        arguments, self._arguments = self._arguments, []
        self._search(arguments, seen, given=True)
        inside: list[tuple[str, Any]] = []
        for prefix, module in self.state.modules:
            seen.add(id(module))
            inside += self._enter(prefix, module, seen, given=False)
        self._search(inside, seen, given=False)
        self._prints: dict[int, torch.Tensor | None] = {}
        for number, one in self._tensors.items():
            if one.given:
                continue
            if one.tensor.nbytes <= SMALL and not one.trained:
                self.copies[number] = one.tensor.detach().clone()
            elif self.state.passes < WATCHED and one.tensor.nbytes <= MOST_DATA:
                self._prints[number] = _print(one.tensor)
        self.generators += [State(NUMBERS, one.state, one.set_state, eq) for one in GLOBAL_NUMBERS.values()]
        self._inner.__enter__()

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a place keeps of a tensor."""
        found = self._alone(tensor)
        if found is not tensor:
            self.with_graph[id(found)] = found
        return found

    def _alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or if it has a graph the same memory without it."""
        if tensor.is_leaf:
            return tensor
        if (found := self._without_graph.get(id(tensor))) is None:
            found = self._without_graph[id(tensor)] = tensor.detach().requires_grad_()
        return found

    def _watch(self, name: str, tensor: torch.Tensor, *, given: bool, trained: bool = False) -> None:
        held = self._alone(tensor)
        if id(held) not in self._tensors and (given or trained or content(held) is not None):
            self._tensors[id(held)] = Watched(name, held, _version(held), given, trained)
            if given and id(tensor) in self._kept_by_torch:
                self._kept_by_torch.add(id(held))

    def _enter(self, prefix: str, module: nn.Module, seen: set[int], *, given: bool) -> list[tuple[str, Any]]:
        """Take a module without its submodules into account. Return what is in its attributes, with names."""
        self.modules.add(module, self._hold)
        self.places.append(Place(prefix, module._buffers, self._hold))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                self._watch(f"{prefix}{key}", buffer, given=given)
        for key, p in module._parameters.items():
            if p is not None:
                self._watch(f"{prefix}{key}", p, given=given, trained=p.requires_grad)
        if not classes_of(module):
            return []
        self.places.append(Place(prefix, vars(module), self._hold))
        return [(f"{prefix}{key}", value) for key, value in vars(module).items() if key not in INTERNAL]

    def _search(self, waiting: list[tuple[str, Any]], seen: set[int], *, given: bool) -> None:
        """Find places, tensors and generators in values, each with its name."""
        objects = 0
        for name, value in waiting:  # grows meanwhile
            sort = sort_of(value, passed_on=given)
            if sort == "plain" or id(value) in seen:
                continue
            seen.add(id(value))
            if sort == "tensor":
                trained = isinstance(value, nn.Parameter) and value.requires_grad
                self._watch(name, value, given=given, trained=trained)
            elif sort == "method":
                waiting += [(name, inside) for inside in bound_to(value)]
            elif (found := state_of(name, value)) is not None:
                self.generators.append(found)
            elif objects < MOST_ITEMS:
                objects += 1
                if sort == "module":
                    for prefix, module in value.named_modules(prefix=name):
                        if module is value or id(module) not in seen:
                            seen.add(id(module))
                            waiting += self._enter(f"{prefix}.", module, seen, given=given)
                    continue
                contents = [value] if sort in ("dict", "items", "tuple") else []
                for home in [*attributes_of(value, passed_on=given), *contents]:
                    if len(home) <= MOST_ITEMS:
                        waiting += [(f"{name}[{key!r}]", inside) for key, inside in items_of(home)]
                        if not isinstance(home, (tuple, frozenset)):
                            self.places.append(Place(f"{name} ", home, self._hold))

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._inner.__exit__(kind, *error)
        tensors, prints = self._tensors, self._prints
        del self._tensors, self._prints, self._without_graph
        if kind is not None:
            return
        self.generators = [one for one in self.generators if one.changed()]
        state = self.state
        compares = state.passes < WATCHED
        state.passes += 1
        for number, one in tensors.items():
            copy = self.copies.get(number)
            if one.has_changed or (compares and _differs(one.tensor, copy, prints.get(number))):
                if copy is None:
                    raise TaskError(f"{self._place(one.name)} {CHANGED_IN_PASS}. {_way_out(one)}")
                state.written.add(one.name)
            if one.name not in state.written:
                self.copies.pop(number, None)
                if number not in self._kept_by_torch:
                    self.unchanged.append(one)
        if self.copies:
            self._check_separate([*tensors.values()])

    def _check_separate(self, tensors: list[Watched]) -> None:
        """Raise TaskError if a tensor that the pass wrote shares memory with another one: their copies would
        not."""
        by_memory: dict[int, list[Watched]] = {}
        for one in tensors:
            by_memory.setdefault(memory_of(one.tensor), []).append(one)
        for neighbours in by_memory.values():
            for one, other in itertools.permutations(neighbours, 2):
                if id(one.tensor) in self.copies and _overlap(one.tensor, other.tensor):
                    raise TaskError(
                        f"{self._place(one.name)} {CHANGED_IN_PASS}: {other.name} is in the same memory. "
                        f"Make it from {one.name} where it is used, or {INSTEAD}"
                    )

    def changes(self) -> list[str]:
        """Return the names of what the pass has changed."""
        found = [name for place in self.places for name in place.changed()]
        found += [*self.state.written, *(generator.name for generator in self.generators)]
        return list(dict.fromkeys(found))

    def check_unchanged(self) -> None:
        """Raise TaskError if a tensor that the pass read, but did not write, was written since."""
        for one in self.unchanged:
            if one.has_changed:
                way_out = "Change it in the block's forward pass or after the step"
                if one.trained:
                    way_out = "Change it after the step, set optimizer_step: after if it is backward"
                raise TaskError(
                    f"{self._place(one.name)} was changed in place between the forward pass of its block and "
                    f"the recomputation, which would begin with the changed values. {way_out}, or use "
                    "activations: keep or offload"
                )

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return what a recomputation finds in places instead of the tensors with these ids: copies, and for
        tensors that had a graph such with one, since the same must be saved for the backward pass."""
        found = {number: copy.clone() for number, copy in self.copies.items()}
        with torch.enable_grad():
            for number, tensor in self.with_graph.items():
                found[number] = changeable(found.get(number, tensor).requires_grad_())
        return found

    def _place(self, name: str) -> str:
        return f"{name} of a block {self.state.name}"


CHANGED_IN_PASS = (
    "is changed in place by the forward pass of its block, whose recomputation would begin with the changed "
    "values"
)
INSTEAD = "use activations: keep or offload, or leave the block out of blocks() of the task"


def _way_out(one: Watched) -> str:
    if one.given:
        return f"Let it change a copy, or {INSTEAD}"
    if one.trained:
        return f"It is a trained parameter: change it after the step, or {INSTEAD}"
    size = f"It has {format_bytes(one.tensor.nbytes)}, and copies are kept of up to {format_bytes(SMALL)}"
    return f"{size}: {INSTEAD}"


def without_changes(forward: Callable[..., Any], state: BlockState, /, *args: Any, **kwargs: Any) -> Any:
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

    def __init__(self, forward: ForwardPass, inner: AbstractContextManager[Any]) -> None:
        """`inner` is entered after this context."""
        self._forward, self._inner = forward, inner

    @torch.no_grad()
    def __enter__(self) -> None:
        forward = self._forward
        forward.check_unchanged()
        tensors = forward.tensors()
        # Before the places, among which are all attributes of modules of the user's classes.
        self._modules = forward.modules.restore(tensors)
        self._places = [now for place in forward.places if (now := place.restore(tensors)) is not None]
        self._generators = [generator.again() for generator in forward.generators]
        for generator in forward.generators:
            generator.restore()
        same = forward.kernels == _attention_kernels()
        self._kernels = nullcontext() if same else sdpa_kernel(forward.kernels)
        self._kernels.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._kernels.__exit__(*error)
        for place in self._places:
            place.restore({})
        self._modules.restore({})
        for generator in self._generators:
            generator.restore()
        self._places, self._generators = [], []


def _attention_kernels() -> list[SDPBackend]:
    """Return the kernels that scaled_dot_product_attention may use now."""
    return [kernel for kernel, allowed in _ALLOWED.items() if allowed()]


_ALLOWED: dict[SDPBackend, Callable[[], bool]] = {
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors in the same storage share an element."""
    mine, theirs = content(one), content(other)
    if mine is None or theirs is None:
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
    """Compare bits: packed weights hold bytes that are NaN as numbers."""
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.equal(bits(one), bits(other))
