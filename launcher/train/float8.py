"""`precision: float8`: torchao computes matrix products inside the blocks; the rest is as in bf16-mixed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from launcher.train.rank import SetupError
from launcher.train.task import outermost

LEAST_CAPABILITY = (8, 9)
"Lowest compute capability with float8 matrix products: Ada and Hopper."
MULTIPLE = 16
"torch._scaled_mm needs weights whose dimensions are multiples of this."


def to_float8(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    device: torch.device,
    tensor: int = 1,
    *,
    emulate: bool = False,
) -> None:
    """Replace, in place, the linear layers inside the blocks. An output head stays, as its logits need bf16.

    Scales are per tensor and computed for each product, so there is no state; parameters keep their names.
    FSDP gathers the weights in bf16. `tensor` ranks may cut a layer afterwards: torchao scales a tensor that
    is cut by the largest value on any rank. `emulate` computes in fp32 with values rounded to float8, on any
    device. Raises SetupError.
    """
    if not emulate:
        _check_device(device)
    inside = {id(child) for block in outermost(blocks) for child in block.modules() if child is not block}
    float8, multiple = _torchao(), MULTIPLE * tensor

    def is_converted(module: nn.Module, _: str) -> bool:
        return (
            type(module) is nn.Linear
            and id(module) in inside
            and module.in_features % multiple == 0
            and module.out_features % multiple == 0
        )

    if not any(is_converted(module, "") for module in model.modules()):
        raise SetupError(
            f"precision: float8 needs linear layers inside the task's blocks() with dimensions that are "
            f"multiples of {multiple}, and there are none; use precision: bf16-mixed"
        )
    # Padding: the number of tokens is a dimension in a weight's gradient and need not be a multiple.
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    float8.convert_to_float8_training(model, module_filter_fn=is_converted, config=config)


def _check_device(device: torch.device) -> None:
    """Raise SetupError unless `device` computes float8 matrix products."""
    least = ".".join(map(str, LEAST_CAPABILITY))
    if device.type != "cuda":
        raise SetupError(f"precision: float8 needs a GPU of compute capability {least}; use bf16-mixed here")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise SetupError(
            f"precision: float8 needs a GPU of compute capability {least}; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; "
            "use precision: bf16-mixed"
        )


def _torchao() -> Any:
    """Import and return torchao.float8, which takes seconds. Raises SetupError if it is not installed."""
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise SetupError(
            f"precision: float8 needs torchao ({error}): install launcher's checkout with the extra `float8` "
            "(pip install '.[float8]' in it), or use precision: bf16-mixed"
        ) from None
