"""Activations: the tensors that a block keeps between its forward and its backward pass.

A policy replaces `forward` of each block and adds no module, so parameter names and checkpoints are the same
under every policy. Policies are applied before sharding, so that FSDP gathers outside of the recomputed part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from launcher.spec.recipe import Recipe
from launcher.train.activations import selective
from launcher.train.activations.compression import Compressor, storage_of
from launcher.train.activations.copied_once import CopiedOnce
from launcher.train.activations.recomputation import BlockState, Contexts
from launcher.train.activations.saved_tensors import check_no_transform, local_part, saved_parts
from launcher.train.cpu_memory_budget import Budget
from launcher.train.rank import SetupError
from launcher.train.task import outermost

Forward = Callable[..., Any]
ON_HOST = "launcher::activations to the host"
"Name of the copies to the host in the profiler, with `activations: offload`."
EVERY = {"selective": 1, "every-second": 2}
"Policy -> n: it keeps one of every n matrix products."


def apply_activations(
    blocks: Iterable[nn.Module],
    recipe: Recipe,
    device: torch.device,
    budget: Budget,
    recomputable: Callable[[Forward], Forward] | None = None,
) -> None:
    """Make each block follow `recipe.activations`. Raises SetupError if the task has no blocks.

    `recomputable`: see `recomputed`.
    """
    if recipe.activations in ("keep", "budget"):  # torch.compile applies the budget
        return
    outer = outermost(blocks)
    if not outer:
        raise SetupError(
            f"activations: {recipe.activations} works block by block, but blocks() of the task returns none; "
            "use activations: keep"
        )
    compressed, offloaded = Compressor(), Offloader(budget, pin=device.type == "cuda")
    for block in evenly(outer, recipe.checkpoint_ratio):
        if recipe.activations == "offload":
            block.forward = around(offloaded, block.forward, block)
        elif recipe.activations == "compress":
            block.forward = around(compressed, block.forward, block)
        elif has_script(block):
            raise SetupError(
                f"activations: {recipe.activations} cannot compute TorchScript again, which a module of "
                "blocks() contains: use activations: keep or offload, or modules of Python"
            )
        else:
            block.forward = recomputed(block, recipe, recomputable)


def has_script(block: nn.Module) -> bool:
    """Return whether the block contains TorchScript, which RECOMPUTED cannot run again."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in block.modules())


def evenly(blocks: Sequence[nn.Module], ratio: float) -> list[nn.Module]:
    """Return about `ratio` of the blocks, at least one, spread evenly and beginning with the first."""
    chosen = max(1, round(ratio * len(blocks)))
    # Begin with the first block: the last block's activations are used at once, so dropping them saves least.
    return [block for i, block in enumerate(blocks) if i * chosen % len(blocks) < chosen]


def recomputed(
    block: nn.Module, recipe: Recipe, recomputable: Callable[[Forward], Forward] | None = None
) -> Forward:
    """Return a forward that keeps the block's inputs and recomputes the rest in the backward pass.

    `selective` and `every-second` also keep results that launcher.train.activations.selective names. The
    recomputation begins with the same random numbers, buffers, attributes and autocast state as the forward
    pass, and changes none of them: see `BlockState`. `recomputable` is applied to the block's forward before
    each pass, and the result is called once more to recompute.
    """
    contexts: Callable[[], Contexts] | None = None
    if (every := EVERY.get(recipe.activations)) is not None:
        contexts = functools.partial(
            selective.compiled_contexts if recipe.compile else selective.contexts, every
        )
    # Compiled code does not support these contexts: see `without_changes`.
    state = None if recipe.compile else BlockState(block, contexts)
    return around(_with_recomputation, block.forward, state, contexts, recomputable)


def _with_recomputation(
    forward: Forward,
    state: BlockState | None,
    contexts: Callable[[], Contexts] | None,
    recomputable: Callable[[Forward], Forward] | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if state is not None:
        check_no_transform("recomputed")
        contexts = functools.partial(state.contexts, args, kwargs)
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    run = recomputable(forward) if recomputable is not None else forward
    # A keyword of the block may have the name of one of checkpoint's.
    return checkpoint(functools.partial(run, **kwargs), *args, use_reentrant=False, **options)


def around(function: Callable[..., Any], forward: Forward, *args: Any) -> Forward:
    """Return a forward that calls `function(forward, *args, ...)` with the arguments of the call.

    `function` takes `forward` and `args` by position only, so the keywords of the call may have any name.
    copy.deepcopy of a block also copies `args`. `function` must not refer to the block: the copy would
    compute with the original's weights.
    """
    return functools.update_wrapper(functools.partial(function, forward, *args), forward)


class Offloader:
    """Keeps the tensors that blocks save for the backward pass in host memory, pinned if `pin`.

    torch.autograd.graph.save_on_cpu would also move weights, and would copy a tensor once for each operator
    that saves it. Weights are not moved here: they stay on the GPU anyway, or FSDP gathers them again.
    Autocast's bf16 copies of weights are moved like activations.
    """

    def __init__(self, budget: Budget, *, pin: bool) -> None:
        self._budget, self._pin, self._copied_once = budget, pin, CopiedOnce()

    def __deepcopy__(self, _: object) -> Offloader:
        return self  # a copied block uses the same one

    def __call__(self, forward: Forward, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # Looked up during the forward pass, when FSDP has put the gathered parameters in place.
        weights = {storage_of(local_part(parameter)) for parameter in block.parameters()}
        saved: dict[_OnHost, _Saved] = {}

        def pack(tensor: torch.Tensor, part: torch.Tensor) -> _Saved | None:
            if part.layout not in (torch.strided, torch.jagged) or storage_of(part) in weights:
                return None
            if part.is_nested:
                return _Saved(self._moved(part))
            view = (part.shape, part.stride(), tensor._version, part._version)
            moved = self._copied_once(part, view, lambda: self._moved(part))
            if (entry := saved.get(moved)) is None:
                entry = saved[moved] = _Saved(moved)
            entry.pending += 1
            return entry

        with saved_parts(pack, _Saved.copied_back):
            return forward(*args, **kwargs)

    def _moved(self, part: torch.Tensor) -> _OnHost:
        with record_function(ON_HOST), self._budget.host_side():
            on_host = torch.empty_like(part, device="cpu", pin_memory=self._pin)
            on_host.copy_(part)
        return _OnHost(on_host, part.device, pin=self._pin)


class _OnHost:
    """A tensor in host memory."""

    __slots__ = ("__weakref__", "_pin", "_tensor", "device")

    def __init__(self, tensor: torch.Tensor, device: torch.device, *, pin: bool) -> None:
        self._tensor, self.device, self._pin = tensor, device, pin

    def copied_back(self) -> torch.Tensor:
        # copy=True also if a CPU stands in for the GPU: a memory budget counts the copy.
        return self._tensor.to(self.device, non_blocking=self._pin, copy=True)


class _Saved:
    """A tensor in host memory that several operators of one pass of a block saved. They share one copy on
    the GPU. Other blocks get their own: keeping this copy for them would take the memory that offload frees.
    """

    __slots__ = ("_moved", "_on_device", "_stream", "_version", "pending")

    def __init__(self, moved: _OnHost) -> None:
        self._moved = moved
        self._on_device: torch.Tensor | None = None
        self._version, self._stream = 0, None
        self.pending = 0
        "Number of operators that saved the tensor and have not read it in the backward pass."

    def copied_back(self) -> torch.Tensor:
        self.pending -= 1
        shared, self._on_device = self._on_device, None
        stream = _current_stream(self._moved.device)
        # An operator may have changed the shared copy. Another stream does not wait until it is complete.
        if shared is None or shared._version != self._version or stream != self._stream:
            shared = self._moved.copied_back()
            self._version, self._stream = shared._version, stream
        if self.pending > 0:
            self._on_device = shared
        return shared


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else torch.cpu.current_stream()
