"""Let a block's recomputation start from the same state as its forward pass.

torch.utils.checkpoint restores only torch's own random numbers. A block may also draw from Python's or
numpy's generators, change its buffers, attributes and arguments, or be called in evaluation mode. Without
this module, the recomputation would start from the state that the forward pass left: it would compute another
function and change the state a second time.
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

from launcher.spec.listed_names import listed
from launcher.spec.quantities import format_bytes
from launcher.train.activations.in_place import changeable
from launcher.train.activations.mutable_containers import Place, items_of
from launcher.train.activations.saved_tensors import memory_of
from launcher.train.rng import GLOBAL_GENERATORS
from launcher.train.task import TaskError
from launcher.train.task_metrics import not_again
from launcher.train.undo.fingerprint import bits, fingerprint
from launcher.train.undo.objects import (
    INTERNAL,
    MOST_DATA,
    MOST_ITEMS,
    SMALL,
    attributes_of,
    bound_to,
    classes_of,
    content,
    sort_of,
)
from launcher.train.undo.saved_state import State, state_of

WATCHED = 2
"""Number of first passes of a block after which tensors are compared by content, because version counters
miss writes through `.data`."""
NUMBERS = "the numbers of random or numpy.random"
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class BlockState:
    """The state that a block's forward pass may read and change. It consists of

    - the buffers and parameters of its modules, whether they are in training mode, and which parameters are
      trained;
    - the attributes of modules of the user's classes, and the arguments of the call: tensors,
      generators, arrays, other modules, and the entries of dictionaries, lists and objects;
    - the random numbers of Python and numpy, and the kernels that attention may use.
    """

    def __init__(self, block: nn.Module, inner: Callable[[], Contexts] | None = None) -> None:
        """`inner` makes contexts for a forward pass and its recomputation; they are entered after these."""
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
    """Which modules are in training mode, which parameters they have, and which of these are trained."""

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
        """Restore this state, with `tensors` in place of tensors with the same id. Return what was replaced.

        A parameter that replaced another one stays, because FSDP swaps its own. torch.func.functional_call
        swaps in plain tensors, which are replaced.
        """
        now = Modules()
        for module, training in self._modes:
            if module.training != training:
                now._modes.append((module, module.training))
                module.training = training
        for parameters, name, held, trained in self._parameters:
            p, earlier = parameters.get(name), tensors.get(id(held), held)
            if p is not earlier and not (isinstance(p, nn.Parameter) and isinstance(earlier, nn.Parameter)):
                now._parameters.append((parameters, name, p, trained))
                parameters[name] = earlier
            elif p is not None and p.requires_grad != trained:
                now._parameters.append((parameters, name, p, p.requires_grad))
                p.requires_grad_(trained)
        return now


class Watched(NamedTuple):
    """A tensor that a pass may read, and its version before the pass."""

    name: str
    tensor: torch.Tensor
    version: int
    is_argument: bool
    "The block was called with this tensor."
    trained: bool
    "It is a parameter that requires a gradient."

    @property
    def has_changed(self) -> bool:
        return _version(self.tensor) != self.version


class ForwardPass:
    """Keeps the initial value of all state that one forward pass changes.

    Raises TaskError if the pass changes in place a tensor that has no copy: a tensor of more than 1 MiB, a
    trained parameter, or an argument.
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
        self._arguments = [(f"argument {at}", value) for at, value in enumerate(args)]
        self._arguments += [(f"argument {key}", value) for key, value in kwargs.items()]
        # torch keeps and checks these itself. Under a checkpoint of the model it computes them again.
        self._kept_by_torch = {id(value) for value in args}
        self.kernels = _attention_kernels()
        self.places: list[Place] = []
        self.modules = Modules()
        self.with_graph: dict[int, torch.Tensor] = {}
        """By id: detached versions of the tensors in places that had a graph. A graph would keep the memory
        of its pass alive."""
        self.copies: dict[int, torch.Tensor] = {}
        "Id of a tensor in a place -> its content before the pass."
        self.unchanged: list[Watched] = []
        self.generators: list[State] = []
        "Generators and small arrays. After the pass, only those that it changed."

    @torch.no_grad()
    def __enter__(self) -> None:
        self._without_graph: dict[int, torch.Tensor] = {}
        self._tensors: dict[int, Watched] = {}
        seen: set[int] = set()
        arguments, self._arguments = self._arguments, []
        self._search(arguments, seen, is_argument=True)
        inside: list[tuple[str, Any]] = []
        for prefix, module in self.state.modules:
            seen.add(id(module))
            inside += self._add_module(prefix, module, seen, is_argument=False)
        self._search(inside, seen, is_argument=False)
        self._fingerprints: dict[int, torch.Tensor | None] = {}
        for number, one in self._tensors.items():
            if one.is_argument:
                continue
            if one.tensor.nbytes <= SMALL and not one.trained:
                self.copies[number] = one.tensor.detach().clone()
            elif self.state.passes < WATCHED and one.tensor.nbytes <= MOST_DATA:
                self._fingerprints[number] = _fingerprint(one.tensor)
        self.generators += [
            State(NUMBERS, one.state, one.set_state, eq) for one in GLOBAL_GENERATORS.values()
        ]
        self._inner.__enter__()

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a place keeps in place of `tensor`."""
        held = self._detached(tensor)
        if held is not tensor:
            self.with_graph[id(held)] = held
        return held

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor; if it has a graph, a detached one with the same memory."""
        if tensor.is_leaf:
            return tensor
        if (detached := self._without_graph.get(id(tensor))) is None:
            detached = self._without_graph[id(tensor)] = tensor.detach().requires_grad_()
        return detached

    def _watch(self, name: str, tensor: torch.Tensor, *, is_argument: bool, trained: bool = False) -> None:
        held = self._detached(tensor)
        if id(held) not in self._tensors and (is_argument or trained or content(held) is not None):
            self._tensors[id(held)] = Watched(name, held, _version(held), is_argument, trained)
            if is_argument and id(tensor) in self._kept_by_torch:
                self._kept_by_torch.add(id(held))

    def _add_module(
        self, prefix: str, module: nn.Module, seen: set[int], *, is_argument: bool
    ) -> list[tuple[str, Any]]:
        """Add a module without its submodules. Return its attributes and their names, which may hold more."""
        self.modules.add(module, self._hold)
        self.places.append(Place(prefix, module._buffers, self._hold))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                self._watch(f"{prefix}{key}", buffer, is_argument=is_argument)
        for key, p in module._parameters.items():
            if p is not None:
                self._watch(f"{prefix}{key}", p, is_argument=is_argument, trained=p.requires_grad)
        if not classes_of(module):
            return []
        self.places.append(Place(prefix, vars(module), self._hold))
        return [(f"{prefix}{key}", value) for key, value in vars(module).items() if key not in INTERNAL]

    def _search(self, waiting: list[tuple[str, Any]], seen: set[int], *, is_argument: bool) -> None:
        """Find places, tensors and generators in the named values of `waiting`."""
        objects = 0
        for name, value in waiting:  # grows during the loop
            sort = sort_of(value, passed_on=is_argument)
            if sort == "plain" or id(value) in seen:
                continue
            seen.add(id(value))
            if sort == "tensor":
                trained = isinstance(value, nn.Parameter) and value.requires_grad
                self._watch(name, value, is_argument=is_argument, trained=trained)
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
                            waiting += self._add_module(f"{prefix}.", module, seen, is_argument=is_argument)
                    continue
                contents = [value] if sort in ("dict", "items", "tuple") else []
                for container in [*attributes_of(value, passed_on=is_argument), *contents]:
                    if len(container) <= MOST_ITEMS:
                        waiting += [(f"{name}[{key!r}]", inside) for key, inside in items_of(container)]
                        if not isinstance(container, (tuple, frozenset)):
                            self.places.append(Place(f"{name} ", container, self._hold))

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._inner.__exit__(kind, *error)
        tensors, fingerprints = self._tensors, self._fingerprints
        del self._tensors, self._fingerprints, self._without_graph
        if kind is not None:
            return
        self.generators = [one for one in self.generators if one.changed()]
        state = self.state
        compares = state.passes < WATCHED
        state.passes += 1
        for number, one in tensors.items():
            copy = self.copies.get(number)
            if one.has_changed or (compares and _differs(one.tensor, copy, fingerprints.get(number))):
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
        """Raise TaskError if a tensor that the pass wrote shares memory with another one, because their
        copies would not."""
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
        names = [name for place in self.places for name in place.changed()]
        names += [*self.state.written, *(generator.name for generator in self.generators)]
        return list(dict.fromkeys(names))

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
        """Return, by id of the replaced tensor, the tensors that a recomputation finds in places: copies of
        the initial content, and tensors with a graph for those that had one, so that autograd saves the same
        tensors for the backward pass."""
        tensors = {number: copy.clone() for number, copy in self.copies.items()}
        with torch.enable_grad():
            for number, tensor in self.with_graph.items():
                tensors[number] = changeable(tensors.get(number, tensor).requires_grad_())
        return tensors

    def _place(self, name: str) -> str:
        return f"{name} of a block {self.state.name}"


CHANGED_IN_PASS = (
    "is changed in place by the forward pass of its block, whose recomputation would begin with the changed "
    "values"
)
INSTEAD = "use activations: keep or offload, or leave the block out of blocks() of the task"


def _way_out(one: Watched) -> str:
    if one.is_argument:
        return f"Let it change a copy, or {INSTEAD}"
    if one.trained:
        return f"It is a trained parameter: change it after the step, or {INSTEAD}"
    size = f"It has {format_bytes(one.tensor.nbytes)}, and copies are kept of up to {format_bytes(SMALL)}"
    return f"{size}: {INSTEAD}"


def without_changes(forward: Callable[..., Any], state: BlockState, /, *args: Any, **kwargs: Any) -> Any:
    """Call the compiled forward of a block that compiled code recomputes.

    With torch.compile, the recomputation starts from the state that the forward pass left. Raises TaskError
    if one of the first passes changes state.
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
    """Restores the state that a block's forward pass started from, and puts the current state back at exit.
    torch may enter it more than once."""

    def __init__(self, forward: ForwardPass, inner: AbstractContextManager[Any]) -> None:
        """`inner` is entered after this context."""
        self._forward, self._inner = forward, inner

    @torch.no_grad()
    def __enter__(self) -> None:
        forward = self._forward
        forward.check_unchanged()
        tensors = forward.tensors()
        # Modules come first: places include all attributes of modules of the user's classes.
        self._modules = forward.modules.restore(tensors)
        self._places = [now for place in forward.places if (now := place.restore(tensors)) is not None]
        self._generators = [generator.refreshed() for generator in forward.generators]
        for generator in forward.generators:
            generator.restore()
        same = forward.kernels == _attention_kernels()
        self._kernels = nullcontext() if same else sdpa_kernel(forward.kernels)
        self._kernels.__enter__()
        self._logging = not_again()
        self._logging.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._logging.__exit__(None, None, None)
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
    a, b = content(one), content(other)
    if a is None or b is None:
        return False
    (a_start, a_end), (b_start, b_end) = _extent(a), _extent(b)
    return a_start < b_end and b_start < a_end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a plain tensor begins and ends in its storage, in bytes."""
    first = int(tensor.storage_offset())
    if not tensor.numel():
        return 0, 0
    last = first + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (last + 1) * tensor.itemsize


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a fingerprint of the content; None in a trace, where tensors have no content."""
    plain = content(tensor)
    return None if plain is None or is_fake(plain) else fingerprint(plain)


def _differs(tensor: torch.Tensor, copy: torch.Tensor | None, earlier: torch.Tensor | None) -> bool:
    if copy is None:
        return earlier is not None and not _equal(_fingerprint(tensor), earlier)
    now, then = content(tensor), content(copy)
    return now is not None and not is_fake(now) and not _equal(now, then)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Compare bits: packed weights hold bytes that are NaN as numbers."""
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.equal(bits(one), bits(other))
