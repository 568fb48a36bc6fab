"""Conversion of a model to fake tensors on the CPU, without memory or values."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param

from launcher.train.undo.objects import INTERNAL

DEPTH = 4
"Maximum depth of nested containers that are searched for tensors."


def make_fake(model: nn.Module, fake: FakeTensorMode) -> None:
    """Replace the tensors of a model built on the meta device in place, including those in attributes, and in
    lists, tuples and dictionaries there.

    Tied tensors stay tied. `to_empty()` and `to()` do not work for fake tensors: they swap tensors, which
    fails for those with weak references.
    """
    fakes: dict[torch.Tensor, torch.Tensor] = {}

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in fakes:
            if tensor.is_meta:
                with fake:
                    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            else:
                new = fake.from_tensor(tensor.data)
            parameter = isinstance(tensor, nn.Parameter)
            fakes[tensor] = nn.Parameter(new, tensor.requires_grad) if parameter else new
        return fakes[tensor]

    def converted(value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            return fake_of(value)
        if depth < DEPTH and type(value) is tuple:
            return tuple(converted(item, depth + 1) for item in value)
        if depth < DEPTH and isinstance(value, (list, dict)):
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if isinstance(item, (torch.Tensor, tuple, list, dict)):
                    value[key] = converted(item, depth + 1)
        return value

    for module in model.modules():
        own = {key: value for key, value in vars(module).items() if key not in INTERNAL}
        for tensors in (module._parameters, module._buffers, own):
            converted(tensors)
        vars(module).update(own)


@contextmanager
def no_packed_mask() -> Iterator[None]:
    """Prevent transformers from building a full attention mask. It builds one for tensors without values, in
    case a sample consists of several packed ones; with values it sees that none is packed."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with patch.object(masks, "find_packed_sequence_indices", _none_packed):
        yield


def _none_packed(*_: Any, **__: Any) -> None:
    return None


class _Chunks(Sequence[torch.Tensor]):
    """The chunks of a tensor as `torch.chunk` makes them, then empty ones, each made when it is read."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        size = self._tensor.shape[self._dim]
        each = -(-size // self._count)
        start = index * each
        if start >= size > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(each, size - start))


@contextmanager
def only_chunks_that_are_read() -> Iterator[None]:
    """Let FSDP make only two chunks of each parameter: the first one, and that of the rank. It would make one
    for each rank, which takes minutes for thousands of parameters and hundreds of ranks."""
    with patch.object(_fsdp_param, "_chunk_with_empty", _Chunks, create=True):  # a private name
        yield
