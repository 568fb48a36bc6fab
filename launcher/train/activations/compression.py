"""Activation compression: store in 8 bits what a block keeps for its backward pass.

GROUP values share one scale, the largest of their absolute values / LARGEST. Values are rounded to the
nearest code, without random numbers, so the same step gives the same bits. A group with a value that is not
finite decodes to values that are not finite, and the training loop skips such a step.

The forward pass is exact. The backward pass reads rounded activations, so the gradient is approximate. Int8
with a scale per group is four times closer than float8_e4m3: 0.65 % of normally distributed values against
2.7 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from launcher.train.activations.copied_once import CopiedOnce
from launcher.train.activations.saved_tensors import check_no_transform, local_part, saved_parts

GROUP = 128
"Values that share a scale."
LARGEST = 126
"Largest code. With 127, bf16 rounds some scales so that the largest value would need 128."
SMALL = 16
"""A tensor stays exact if the block's largest input has at least SMALL times as many elements. These are the
statistics of attention and norms, one per head or row. The limit is relative to the input, so that the same
tensors are compressed with every micro-batch."""


class Codes:
    """The values of a region of memory, in 8 bits."""

    __slots__ = ("__weakref__", "codes", "dtype", "numel", "scales")

    def __init__(self, tensor: torch.Tensor, layout: Layout) -> None:
        # Small scales need the exponent range of fp32. bf16 has it; fp16 does not.
        exact = torch.float32 if tensor.dtype == torch.float16 else tensor.dtype
        self.numel, self.dtype = layout.numel, tensor.dtype
        rows = -(-self.numel // GROUP)
        values = torch.empty(rows * GROUP, dtype=exact, device=tensor.device)
        values.as_strided(layout.shape, layout.strides).copy_(
            tensor.as_strided(layout.shape, tensor.stride())
        )
        values[self.numel :].zero_()
        groups = values.view(rows, GROUP)
        largest = torch.linalg.vector_norm(groups, float("inf"), dim=1, keepdim=True)
        # Groups of zeros get the smallest scale instead of 0 / 0.
        self.scales = largest.div_(LARGEST).clamp_min_(torch.finfo(exact).tiny)
        self.codes = groups.div_(self.scales).round_().to(torch.int8)

    def values(self) -> torch.Tensor:
        """Return the values as a vector in the order of memory."""
        values = self.codes.to(self.scales.dtype).mul_(self.scales).view(-1)
        return values[: self.numel].to(self.dtype)


class Layout(NamedTuple):
    """Layout of a copy of a tensor that has the same order in memory, without gaps."""

    shape: tuple[int, ...]
    "Expanded dimensions have size 1."
    strides: tuple[int, ...]
    "0 for expanded dimensions."
    numel: int


class Packed(NamedTuple):
    """A compressed tensor, as autograd keeps it."""

    codes: Codes
    shape: torch.Size
    strides: tuple[int, ...]


class Compressor:
    """Compresses the activations of all blocks of a model, each tensor once."""

    def __init__(self) -> None:
        self._copied_once = CopiedOnce()

    def __deepcopy__(self, _: object) -> Compressor:
        return self  # a copied block uses the same one

    def __call__(self, forward: Callable[..., Any], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Call a block's forward, and keep its activations in 8 bits for the backward pass."""
        check_no_transform("compressed")
        is_exact = _Exact(block, tree_leaves((args, kwargs)))

        def pack(tensor: torch.Tensor, part: torch.Tensor) -> Packed | None:
            return None if is_exact(tensor, part) else self._pack(part, (tensor._version, part._version))

        with saved_parts(pack, _unpack):
            return forward(*args, **kwargs)

    def _pack(self, tensor: torch.Tensor, versions: tuple[int, int]) -> Packed:
        layout = layout_of(tensor)
        dense = all(
            size == 1 or packed == stride
            for size, packed, stride in zip(layout.shape, layout.strides, tensor.stride(), strict=True)
        )
        view = layout.numel if dense else (layout.shape, tensor.stride())
        codes = self._copied_once(tensor, (view, versions), lambda: Codes(tensor, layout))
        return Packed(codes, tensor.shape, layout.strides)


class _Exact:
    """Decides which saved tensors of a forward pass of `block` are not compressed. `leaves`: its inputs.

    Parameters, buffers, and inputs without a gradient (masks, tables of positions) are in memory anyway.
    Autocast's copies of weights stay exact because they are weights.
    """

    def __init__(self, block: nn.Module, leaves: list[Any]) -> None:
        # Looked up during the forward pass, when FSDP has put the gathered parameters in place.
        parameters = list(block.parameters())
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        in_memory = [*parameters, *block.buffers(), *(leaf for leaf in inputs if not leaf.requires_grad)]
        self._storages = {storage_of(part) for part in map(local_part, in_memory) if _is_plain(part)}
        self._frozen = {(p.shape, p.dtype) for p in parameters if not p.requires_grad}
        self._small = max((local_part(leaf).numel() for leaf in inputs), default=0) / SMALL

    def __call__(self, tensor: torch.Tensor, part: torch.Tensor) -> bool:
        if not (_is_plain(part) and part.is_floating_point() and part.itemsize > 1):
            return True
        if part.numel() <= self._small:
            return True
        return storage_of(part) in self._storages or self._is_weight(tensor)

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter):
            return True
        if whole.grad_fn is not None and whole.grad_fn.name() == "ToCopyBackward0":
            source: Any = whole.grad_fn.next_functions[0][0]
            if source is not None and source.name() == "_ToTorchTensorBackward":  # a DTensor's local part
                source = source.next_functions[0][0]
            return isinstance(getattr(source, "variable", None), nn.Parameter)
        # The copy of a frozen weight has no grad_fn, so it is recognised by its shape.
        converted = {shape for shape, dtype in self._frozen if dtype != tensor.dtype}
        return whole.grad_fn is None and whole.shape in converted


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a copy without gaps."""
    expanded = [stride == 0 for stride in tensor.stride()]
    shape = tuple(1 if repeated else size for size, repeated in zip(tensor.shape, expanded, strict=True))
    strides, numel = [0] * tensor.dim(), 1
    for axis in sorted(range(tensor.dim()), key=lambda axis: (tensor.stride(axis), shape[axis])):
        if not expanded[axis]:
            strides[axis] = numel
            numel *= shape[axis]
    return Layout(shape, tuple(strides), numel)


def _unpack(saved: Packed) -> torch.Tensor:
    return saved.codes.values().as_strided(saved.shape, saved.strides)
