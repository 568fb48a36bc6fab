"""torch.compile, block by block: equal blocks share one graph, and FSDP gathers between blocks."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from launcher.spec.recipe import RECOMPUTED, Recipe
from launcher.train.activations.activations import around
from launcher.train.activations.recomputation import BlockState, without_changes
from launcher.train.compiling.graph_pass import graph_options
from launcher.train.cpu_memory_budget import Budget, MemoryBudget
from launcher.train.rank import SetupError
from launcher.train.task import outermost
from launcher.train.tensor.tensor_parallel_rng import OwnNumbers
from launcher.train.tensor.unequal_parts import without_gaps

Forward = Callable[..., Any]
GRAPHS = 64
"Graphs of a block that ranks share, for different shapes and in training and evaluation."


def apply_compile(
    blocks: Iterable[nn.Module],
    recipe: Recipe,
    device: torch.device,
    budget: Budget,
    compiled: Callable[[Forward], Forward] | None = None,
    numbers: OwnNumbers | None = None,
) -> None:
    """Compile each block. Call it after apply_activations, so that the graph includes recomputation.

    `compiled` replaces torch.compile in a trace, which runs no code. `numbers` is set with tensor
    parallelism.

    Raises SetupError.
    """
    if not recipe.compile:
        return
    if compiled is None and (missing := missing_compiler(device)):
        raise SetupError(f"compile: true needs {missing}; install it or use compile: false")
    if isinstance(budget, MemoryBudget):
        raise SetupError(
            "compile: true: allocations of compiled code are not counted; use compile: false with a drill or "
            "a memory budget on the CPU"
        )
    outer = outermost(blocks)
    if not outer:
        raise SetupError(
            "compile: true compiles block by block, but blocks() of the task returns none; use compile: false"
        )
    recomputes = compiled is None and recipe.activations in RECOMPUTED
    if compiled is None:
        compiled = _compiled_alone if numbers is None else _compiled_in(numbers)
    for block in outer:
        block.forward = _Compiled(block.forward, compiled, recipe)
        if recomputes:
            block.forward = around(without_changes, block.forward, BlockState(block))
        if numbers is not None:
            block.register_forward_pre_hook(numbers.new_seed)


class _Compiled:
    """The compiled forward of a block. A copy of the block gets its own compiled forward."""

    def __init__(self, forward: Forward, compiled: Callable[[Forward], Forward], recipe: Recipe) -> None:
        self._parts = forward, compiled, recipe
        self._run = compiled(forward)
        self._budget = recipe.activation_budget if recipe.activations == "budget" else None
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._budget is None:
            return self._run(*args, **kwargs)
        with functorch_config.patch(activation_memory_budget=self._budget):  # the first call compiles
            return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Compiled:
        forward, compiled, recipe = self._parts
        return _Compiled(copy.deepcopy(forward, memo), compiled, recipe)


def _compiled_alone(forward: Forward) -> Forward:
    return torch.compile(forward, options=graph_options())


def _compiled_in(numbers: OwnNumbers) -> Callable[[Forward], Forward]:
    """Return torch.compile for blocks that the ranks of a tensor-parallel group share. Raises SetupError.

    If ranks have unequal parts of a sequence, torch's cache distinguishes their graphs only by a tag.
    Compiled code also contains the name of the process group.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # imports for a second

    if numbers.adapter_drops:
        raise SetupError(
            "compile: true with tensor above 1: in compiled code, ranks cannot draw own random numbers for "
            "the dropout of an adapter; set adapter.dropout to 0, or use compile: false"
        )
    tag, mesh = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", ""), numbers.mesh
    place = f"rank {mesh.get_local_rank()} of group {mesh.get_group().group_name}"
    torch.compiler.config.cache_key_tag = f"{tag} {place}"
    _use_group_settings()

    def compiled(forward: Forward) -> Forward:
        # torch 2.13 fails to capture the backward pass of a DTensor's view with symbolic sizes.
        captured = torch.compile(forward, fullgraph=True, dynamic=False, options=graph_options())

        @functools.wraps(forward)
        def whole(*args: Any, **kwargs: Any) -> Any:
            # An unequal part of a sequence may have gaps in memory. torch ignores them when it reuses a graph
            # or takes one from its cache.
            args, kwargs = tree_map_only(DTensor, without_gaps, (args, kwargs))
            try:
                return captured(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                raise SetupError(
                    "compile: true with tensor above 1: a block is not captured as one graph "
                    f"({_reason(error)}); use compile: false"
                ) from error

        return whole

    return compiled


def _reason(error: Exception) -> str:
    """Return why torch did not capture a block, with the message of an exception that the block raised."""
    first, *rest = str(error).splitlines()
    raised = [line for line in rest if "raised exception" in line]
    return " ".join([first, *(raised or rest)[:1]])


@functools.cache
def _use_group_settings() -> ExitStack:
    """Change torch's settings for every later graph of this process. Return the entered contexts, which the
    function's cache keeps open."""
    from torch._dynamo import config as dynamo_config

    from launcher.train.compiling.compiled_dtensors import compiled_dtensors

    stack = ExitStack()
    stack.enter_context(compiled_dtensors())
    # Above this limit torch runs a block uncompiled, or with fullgraph=True raises an error.
    stack.enter_context(dynamo_config.patch(recompile_limit=GRAPHS))
    return stack


def missing_compiler(device: torch.device) -> str | None:
    """Return the compiler that torch.compile needs and that is missing, or None.

    Without this check the job would fail in its first step, minutes later.
    """
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton, which is not installed"
        if not _is_installed(os.environ.get("CC"), "gcc", "clang"):  # Triton compiles its launchers with it
            return "a C compiler ($CC, gcc or clang), which is not installed"
        return None
    if not _is_installed(os.environ.get("CXX", "g++")):
        return "a C++ compiler ($CXX or g++), which is not installed"
    return None


def _is_installed(*commands: str | None) -> bool:
    return any(shutil.which(shlex.split(command)[0]) for command in commands if command)
