"""Random parameters that do not depend on the sharding; each rank draws little more than its part."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.train.local_shards import local, offset_of
from launcher.train.seeds import derive_seed

GROUP = 2**18
"Approximate number of elements that one generator draws, in whole rows."

Std = Callable[[str, torch.Tensor], float]
"(name, parameter) -> standard deviation; `fan_in` is an example."


@torch.no_grad()
def draw_normal(parameter: torch.Tensor, std: float, seed: int, name: str) -> None:
    """Fill `parameter` from a normal distribution of mean 0.

    Its rows are divided into groups. Each group has its own generator, seeded with `seed`, `name` and the
    group's number, so the values do not depend on where a shard begins. A rank that holds some columns of a
    matrix draws whole rows. Values on a GPU differ from those on the CPU.
    """
    shard, (first, *columns) = local(parameter), offset_of(parameter)[1] or (0,)
    if shard.numel() == 0:
        return
    rows = parameter.shape[0] if parameter.ndim else 1
    row = parameter.numel() // rows
    if parameter.ndim != 2:
        shard, columns = shard.view(-1, row), [0]
    held_columns = slice(columns[0], columns[0] + shard.shape[1])
    size = max(1, GROUP // row)
    generator = torch.Generator(shard.device)
    for group in range(first // size, math.ceil((first + len(shard)) / size)):
        generator.manual_seed(derive_seed("draw", seed, name, group))
        start = group * size
        stop = min(start + size, rows)
        drawn = torch.randn(
            (stop - start, row), generator=generator, device=shard.device, dtype=torch.float32
        )
        begin, end = max(start, first), min(stop, first + len(shard))
        shard[begin - first : end - first] = drawn[begin - start : end - start, held_columns] * std


def fan_in(_: str, parameter: torch.Tensor) -> float:
    """Return sqrt(2 / fan-in), for layers followed by a ReLU: He et al. 2015, arXiv 1502.01852."""
    return math.sqrt(2 * parameter.shape[0] / parameter.numel())


@torch.no_grad()
def initialise_parameters(model: nn.Module, seed: int, std: Std) -> None:
    """Set norms to the identity, draw other matrices with `std`, and set other vectors to zero.

    The model may have no buffers except BatchNorm's. The values do not depend on the sharding.
    """
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            module.reset_running_stats()
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if isinstance(module, _BatchNorm | nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            elif parameter.ndim > 1:
                draw_normal(parameter, std(name, parameter), seed, name)
            else:
                parameter.zero_()
