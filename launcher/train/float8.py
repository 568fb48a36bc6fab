"""precision: float8: matrix products inside the blocks in float8, by torchao; the rest as in bf16-mixed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from launcher.train.activations import outermost
from launcher.train.rank import SetupError

LEAST_CAPABILITY = (8, 9)
"Of CUDA devices with float8 matrix products: Ada and Hopper."
MULTIPLE = 16
"torch._scaled_mm: both dimensions of a weight are multiples of it."


def to_float8(
    model: nn.Module, blocks: Iterable[nn.Module], device: torch.device, *, emulate: bool = False
) -> None:
    """Exchange, in place, the linear layers inside the blocks: not an output head, whose logits want bf16.

    Scales are per tensor and computed anew for each product: no state, and the parameters keep their names.
    FSDP gathers the weights in bf16. `emulate` computes in fp32 with values rounded to float8, anywhere.
    Raises SetupError.
    """
    if not emulate:
        _check_device(device)
    inside = {id(child) for block in outermost(blocks) for child in block.modules() if child is not block}
    float8 = _torchao()

    def exchanged(module: nn.Module, _: str) -> bool:
        return (
            type(module) is nn.Linear
            and id(module) in inside
            and module.in_features % MULTIPLE == 0
            and module.out_features % MULTIPLE == 0
        )

    if not any(exchanged(module, "") for module in model.modules()):
        raise SetupError(
            f"precision: float8 finds no linear layer with dimensions of multiples of {MULTIPLE} inside the "
            "blocks() of the task; precision: bf16-mixed runs"
        )
    # Padding: in the gradient of a weight the number of tokens is a dimension, and need not be a multiple.
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    float8.convert_to_float8_training(model, module_filter_fn=exchanged, config=config)


def _check_device(device: torch.device) -> None:
    """Raises SetupError."""
    least = ".".join(map(str, LEAST_CAPABILITY))
    if device.type != "cuda":
        raise SetupError(f"precision: float8 needs a GPU of compute capability {least}; bf16-mixed runs here")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise SetupError(
            f"precision: float8 needs a GPU of compute capability {least}; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; "
            "precision: bf16-mixed runs on it"
        )


def _torchao() -> Any:
    """Imported when a recipe needs it: it costs seconds."""
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise SetupError(
            f"precision: float8 needs torchao ({error}): install launcher's checkout with the extra `float8` "
            "(pip install '.[float8]' in it), or choose precision: bf16-mixed"
        ) from None
