"""torch.compile, block by block: blocks that look alike share one graph, and FSDP gathers between them."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Iterable

import torch
from torch import nn

from launcher.spec.recipe import Recipe
from launcher.train.activations import outermost
from launcher.train.budget import Budget, MemoryBudget
from launcher.train.rank import SetupError


def apply_compile(blocks: Iterable[nn.Module], recipe: Recipe, device: torch.device, budget: Budget) -> None:
    """After apply_activations, so that recomputation is part of the graph. Raises SetupError."""
    if not recipe.compile:
        return
    if missing := missing_compiler(device):
        raise SetupError(f"compile: true needs {missing}; compile: false runs")
    if isinstance(budget, MemoryBudget):
        raise SetupError(
            "compile: true: the memory budget on the CPU cannot see what compiled code allocates; "
            "compile: false runs with it"
        )
    outer = outermost(blocks)
    if not outer:
        raise SetupError(
            "compile: true compiles block by block, but blocks() of the task gives none; compile: false runs"
        )
    for block in outer:
        block.forward = torch.compile(block.forward)


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile would miss in its first step, minutes from now."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton, which is not installed"
        if not _found(os.environ.get("CC"), "gcc", "clang"):  # Triton builds its launchers with it
            return "a C compiler ($CC, gcc or clang), which is not here"
        return None
    if not _found(os.environ.get("CXX", "g++")):
        return "a C++ compiler ($CXX or g++), which is not here"
    return None


def _found(*commands: str | None) -> bool:
    return any(shutil.which(shlex.split(command)[0]) for command in commands if command)
