"""A model without values: every tensor in it is of fake memory on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def make_fake(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Exchanges the tensors of a model that was built on the meta device, in place, also those that are
    plain attributes. Tied ones stay tied. Modules cannot move fake tensors by themselves: `to_empty()` and
    `to()` swap them, which tensors with weak references refuse."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def exchanged(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            if tensor.is_meta:
                with fake:
                    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            else:
                new = fake.from_tensor(tensor.data)
            parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(new, tensor.requires_grad) if parameter else new
        return made[tensor]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for name, value in list(tensors.items()):
                if isinstance(value, torch.Tensor):
                    tensors[name] = exchanged(value)  # type: ignore[assignment]
    return model


@contextmanager
def no_packed_mask() -> Iterator[None]:
    """transformers builds a whole mask for tensors whose values it cannot see, in case a sample is several
    packed ones; with values it sees that there are none, and needs no mask."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None):
        yield
