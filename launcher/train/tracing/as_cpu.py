"""Replacement for a function that uses another kernel for fake tensors than for CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

aten = torch.ops.aten
LSTM = 2
"ideep::rnn_kind of an LSTM."


@contextmanager
def as_cpu() -> Iterator[None]:
    """Let an LSTM call oneDNN's kernel as on the CPU. For fake tensors torch composes it of operators."""
    composed = torch._VF.lstm
    with patch.object(torch._VF, "lstm", _lstm(composed), create=True):
        yield


def _lstm(composed: Callable[..., Any]) -> Callable[..., Any]:
    def lstm(input: torch.Tensor, *args: Any) -> Any:
        """ATen/native/RNN.cpp: packed sequences, projections, and types other than these two are composed."""
        packed = isinstance(args[0], torch.Tensor)
        if packed or not torch.backends.mkldnn.enabled or not input.numel():
            return composed(input, *args)
        (hidden, cells), *_ = args
        if hidden.shape[2] != cells.shape[2] or input.dtype not in (torch.float32, torch.bfloat16):
            return composed(input, *args)
        return _layers(input, *args)

    return lstm


def _layers(
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """ATen/native/mkldnn/RNN.cpp: one call per layer and direction."""
    x = input.transpose(0, 1) if batch_first else input
    x = x.contiguous()
    hidden, cells = (state.contiguous() for state in states)
    size, directions, per_layer = hidden.shape[2], 2 if bidirectional else 1, 4 if biases else 2
    last_hidden, last_cells = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            layer_weights = list(weights[number * per_layer : (number + 1) * per_layer])
            if not biases:
                layer_weights += [torch.zeros_like(weight) for weight in layer_weights]
            shape = (size, layers, biases, bidirectional, batch_first, train)
            y, h, c, _ = aten.mkldnn_rnn_layer(
                x, *layer_weights, hidden[number], cells[number], direction == 1, [], LSTM, *shape
            )
            outputs.append(y)
            last_hidden.append(h)
            last_cells.append(c)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if train and dropout > 0 and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    y = x.transpose(0, 1) if batch_first else x
    return y, torch.stack(last_hidden), torch.stack(last_cells)
