"""torch.compile, block by block: equal blocks share one graph, and FSDP gathers between blocks."""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from launcher.spec.recipe import Recipe
from launcher.train.activations import outermost
from launcher.train.budget import Budget, MemoryBudget
from launcher.train.rank import SetupError

Forward = Callable[..., Any]


def apply_compile(
    blocks: Iterable[nn.Module],
    recipe: Recipe,
    device: torch.device,
    budget: Budget,
    compiled: Callable[[Forward], Forward] | None = None,
) -> None:
    """Compile each block. Call it after apply_activations, so that the graph includes recomputation.

    `compiled`: replaces torch.compile in a trace, which runs no code.

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
    for block in outer:
        block.forward = _within_budget((compiled or torch.compile)(block.forward), recipe)


def _within_budget(forward: Forward, recipe: Recipe) -> Forward:
    """Return a forward that is compiled, in its first call, with the budget for activations of the recipe."""
    if recipe.activations != "budget":
        return forward

    @functools.wraps(forward)
    def within_budget(*args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=recipe.activation_budget):
            return forward(*args, **kwargs)

    return within_budget


def missing_compiler(device: torch.device) -> str | None:
    """Return the compiler that torch.compile needs and that is missing, or None.

    Without this check the job would fail in its first step, minutes later.
    """
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton, which is not installed"
        if not _found(os.environ.get("CC"), "gcc", "clang"):  # Triton compiles its launchers with it
            return "a C compiler ($CC, gcc or clang), which is not installed"
        return None
    if not _found(os.environ.get("CXX", "g++")):
        return "a C++ compiler ($CXX or g++), which is not installed"
    return None


def _found(*commands: str | None) -> bool:
    return any(shutil.which(shlex.split(command)[0]) for command in commands if command)
