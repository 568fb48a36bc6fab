"""Fake kernels that replace torch's. Some of torch's are missing, some refuse arguments that the real kernel
accepts, and some allocate more or less memory than the real kernel.

They run in place of the operator, below autograd, on fake tensors or tensors of the meta device. This module
also registers formulas for operators whose FLOPs torch does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry, register_flop_formula

aten = torch.ops.aten
PERIOD = 64
"""Time steps after which the sizes of oneDNN's workspace repeat: it rounds each of its buffers up to pages of
4096 bytes, and most of their rows to 64 bytes."""


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses (samples) and log_alpha (samples, time, 2 x longest target + 1).

    The longest target is known for lengths given as numbers. In a tensor they have no values: then it is the
    width of the padded targets, or the mean of targets in one row, because the samples of a trace are equal.
    """
    time, samples = log_probs.shape[:2]
    if not isinstance(target_lengths, torch.Tensor):
        longest = max(target_lengths, default=0)
    elif targets.dim() > 1:
        longest = targets.shape[1]
    else:
        longest = -(-targets.shape[0] // max(1, samples))
    return log_probs.new_empty(samples), log_probs.new_empty(samples, time, 2 * longest + 1)


def _ctc_loss_backward(gradient: torch.Tensor, log_probs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _mkldnn_rnn_layer(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """Return oneDNN's results with a workspace of the real size; in torch's fake kernel it is empty."""
    output, hidden, cell, _ = aten.mkldnn_rnn_layer.default(*args)
    steps = args[0].shape[0]
    shapes = tuple(tuple(tensor.shape) for tensor in args[:7])
    options = tuple(tuple(option) if isinstance(option, list) else option for option in args[7:])
    bytes_for = functools.partial(_workspace, shapes, args[0].dtype, options, torch.is_grad_enabled())
    first = steps if steps <= 2 * PERIOD else PERIOD + steps % PERIOD
    size = bytes_for(first)
    if size is None:
        return output, hidden, cell, None
    if steps > first:
        size += (steps - first) // PERIOD * ((bytes_for(first + PERIOD) or 0) - size)
    return output, hidden, cell, torch.empty(size, dtype=torch.uint8)


@functools.cache
def _workspace(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, options: tuple[Any, ...], grad: bool, steps: int
) -> int | None:
    """Return the bytes of the workspace that this CPU's kernel keeps for `steps` time steps; None without.

    There is no formula: the layout depends on the instruction set.
    """
    with _disable_current_modes(), torch.set_grad_enabled(grad):
        tensors = [torch.zeros(shape, dtype=dtype) for shape in ((steps, *shapes[0][1:]), *shapes[1:])]
        workspace = aten.mkldnn_rnn_layer.default(*tensors, *options)[3]
    return None if workspace is None else workspace.nbytes


def _grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offsets: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the products of the experts of a mixture. torch's fake kernel refuses all types but bf16."""
    groups = (first if offsets is None or first.dim() > 2 else offsets).shape[:1]
    shape = (first.shape[-2], second.shape[-1])
    if first.dim() == second.dim():
        shape = (*groups, *shape)
    return first.new_empty(shape, dtype=out_dtype or first.dtype)


def _flops_of_groups(first: Sequence[int], second: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of `_grouped_mm`, from the shapes of its arguments: an argument of two dimensions is
    divided among the groups, so each of its rows or columns has a part in one product."""
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2 * groups * first[-2] * first[-1] * second[-1]


if aten._grouped_mm not in flop_registry:
    register_flop_formula(aten._grouped_mm)(_flops_of_groups)


def _for_all_heads(count: Callable[..., int]) -> Callable[..., int]:
    """Return a formula for attention whose keys and values may have fewer heads than its queries."""

    def counted(*shapes: Sequence[int]) -> int:
        """`shapes`: of the query, key and value, in the backward pass after that of the output's gradient."""
        heads = shapes[-3][1]
        return count(*((shape[0], heads, *shape[2:]) for shape in shapes))

    return counted


try:
    flop_counter.sdpa_flop_count((1, 2, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1))  # type: ignore[no-untyped-call]
except AssertionError:  # torch 2.11 refuses fewer heads
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        setattr(flop_counter, name, _for_all_heads(getattr(flop_counter, name)))


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the selected elements. torch's fake kernel refuses all masks; the values of one may be known.
    CUDA's kernel indexes with the mask, too."""
    tensor, mask = torch.broadcast_tensors(tensor, mask)  # type: ignore[no-untyped-call]
    selected: torch.Tensor = aten.index.Tensor(tensor, [mask])
    return selected


def _in_place_of_all(loss: Any) -> Callable[..., torch.Tensor]:
    """Return a fake kernel of a loss whose sum or mean stays in the memory of the losses of all elements: the
    real kernel shrinks that tensor to a scalar, which frees nothing (mse_loss in ATen/native/Loss.cpp)."""

    def kernel(output: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        reduced: torch.Tensor = loss(output, target, *args, **kwargs)
        if reduced.dim() > 0:
            return reduced
        shape = torch.broadcast_shapes(output.shape, target.shape)  # type: ignore[no-untyped-call]
        return reduced.new_empty(shape).as_strided((), ())

    return kernel


_SHRUNK = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
)
KERNELS: Mapping[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer,
    aten._grouped_mm.default: _grouped_mm,
    aten.masked_select.default: _masked_select,
    **{loss: _in_place_of_all(loss) for loss in _SHRUNK},
    # A wait for a collective returns its tensor. torch's fake kernel makes a new one.
    torch.ops._c10d_functional.wait_tensor.default: lambda tensor: tensor,
}


class FakeKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs KERNELS in place of their operators."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return KERNELS.get(func, func)(*args, **kwargs or {})
