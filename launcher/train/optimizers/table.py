"""Which library runs which optimizer under which sharding, and why. The one place that says so.

Measured with torch 2.13.0, bitsandbytes 0.50.2 and torchao 0.18.0 on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from launcher.spec.recipe import SHARDED, Offload, Optimizer, Recipe, Sharding
from launcher.train.optimizers.adam_mini import AdamMini
from launcher.train.optimizers.adamw_bf16 import AdamWBf16
from launcher.train.optimizers.lion import Lion
from launcher.train.optimizers.local_shards import EightBit
from launcher.train.rank import SetupError

Groups = list[dict[str, Any]]


class Make(Protocol):
    def __call__(self, groups: Groups, wide: Collection[torch.Tensor], *, lr: float) -> torch.optim.Optimizer:
        """`wide`: parameters whose states stay in 32 bit (see `embeddings`)."""


WHOLE: frozenset[Sharding] = frozenset({"none", "ddp"})
ANY: frozenset[Sharding] = WHOLE | SHARDED
ANYWHERE: frozenset[Offload] = frozenset({"none", "cpu", "cpu-optimizer", "nvme-optimizer"})


@dataclass(frozen=True)
class Row:
    optimizer: Optimizer
    sharding: frozenset[Sharding]
    library: Literal["torch", "bitsandbytes", "launcher"]
    "Whose arithmetic it is."
    needs: str
    reason: str
    make: Make
    offload: frozenset[Offload] = ANYWHERE
    "On the host torch's fused AdamW and bitsandbytes have kernels of their own; launcher's are plain torch."


def _adamw(groups: Groups, wide: Collection[torch.Tensor], *, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, fused=True)


def _adamw_8bit(groups: Groups, wide: Collection[torch.Tensor], *, lr: float) -> torch.optim.Optimizer:
    return EightBit(groups, "adam", lr=lr, betas=(0.9, 0.999), wide=wide)


def _paged_adamw_8bit(groups: Groups, wide: Collection[torch.Tensor], *, lr: float) -> torch.optim.Optimizer:
    return EightBit(groups, "adam", lr=lr, betas=(0.9, 0.999), wide=wide, paged=True)


def _lion_8bit(groups: Groups, wide: Collection[torch.Tensor], *, lr: float) -> torch.optim.Optimizer:
    return EightBit(groups, "lion", lr=lr, betas=(0.9, 0.99), wide=wide)


def embeddings(model: nn.Module) -> list[nn.Parameter]:
    """Their states stay in 32 bit, as bitsandbytes advises: a rare token's gradient is an outlier."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    found = [module.weight for module in model.modules() if isinstance(module, tables)]
    return [weight for weight in found if isinstance(weight, nn.Parameter)]


_WHOLE_8BIT = "bitsandbytes' kernels on whole tensors; state saved as codes and scales, no nested dictionary"
_LOCAL_8BIT = (
    "bitsandbytes' kernels on local shards: its optimizers fail on DTensor (bitsandbytes#1633). Not torchao: "
    "its AdamW8bit decides 8-bit by the local size (ao#4912), fails with bf16 shards (ao#4216) and compiles "
    "for 30 s on the CPU"
)

TABLE = (
    Row("adamw", ANY, "torch", "torch>=2.11", "one fused kernel, no temporaries; knows DTensor", _adamw),
    Row(
        "adamw-bf16",
        ANY,
        "launcher",
        "torch>=2.11",
        "torch's states follow the parameter's type, and bf16 ones rounded to the nearest never shrink",
        lambda groups, wide, *, lr: AdamWBf16(groups, lr=lr),
    ),
    Row("adamw-8bit", WHOLE, "bitsandbytes", "bitsandbytes>=0.50", _WHOLE_8BIT, _adamw_8bit),
    Row("adamw-8bit", SHARDED, "bitsandbytes", "bitsandbytes>=0.50", _LOCAL_8BIT, _adamw_8bit),
    Row(
        "paged-adamw-8bit",
        ANY,
        "bitsandbytes",
        "bitsandbytes>=0.50, CUDA",
        "as adamw-8bit, large tensors' codes in CUDA managed memory; saved alike, so one reads the other",
        _paged_adamw_8bit,
        offload=frozenset({"none"}),
    ),
    Row(
        "lion",
        ANY,
        "launcher",
        "torch>=2.11",
        "torch has none; bitsandbytes' has fp32 states only and fails on DTensor",
        lambda groups, wide, *, lr: Lion(groups, lr=lr),
    ),
    Row("lion-8bit", WHOLE, "bitsandbytes", "bitsandbytes>=0.50", _WHOLE_8BIT, _lion_8bit),
    Row("lion-8bit", SHARDED, "bitsandbytes", "bitsandbytes>=0.50", _LOCAL_8BIT, _lion_8bit),
    Row(
        "adam-mini",
        ANY,
        "launcher",
        "torch>=2.11",
        "one second moment per row; the authors' package wants to be told a transformer's shapes",
        lambda groups, wide, *, lr: AdamMini(groups, lr=lr),
    ),
)


def row_of(recipe: Recipe) -> Row:
    """The one row for the recipe's optimizer and sharding. Raises SetupError where offload has none."""
    [row] = [row for row in TABLE if row.optimizer == recipe.optimizer and recipe.sharding in row.sharding]
    if recipe.offload not in row.offload:
        raise SetupError(
            f"optimizer: {recipe.optimizer} does not run with offload: {recipe.offload}; "
            "optimizer: adamw-8bit does"
        )
    return row
