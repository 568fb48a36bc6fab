"""All that a run has on this rank, as tensors to compare bit for bit."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launcher.train.loop import Trainer
from launcher.train.rng import random_state
from saves import Bits, bits

OF_TORCH = frozenset(vars(nn.Module()))
"Attributes that every module has."
PLAIN = (bool, int, float, str, bytes, bytearray, numpy.ndarray, numpy.generic)


def observed(trainer: Trainer) -> Bits:
    """Parameters (frozen ones, too), optimizer states, buffers, randomness, attributes of the modules and of
    the task, the task's own state."""
    found = bits(trainer)
    model = trainer.model
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    values: dict[str, Any] = {
        f"random {name}": one for name, one in random_state(trainer.rank.device).items()
    }
    for name, module in whole.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in OF_TORCH}
        values |= {f"attribute {name}.{key}": value for key, value in own.items()}
    values |= {f"task.{key}": value for key, value in vars(trainer.task).items()}
    if hasattr(trainer.task, "state"):
        values["task.state()"] = trainer.task.state()
    for name, value in values.items():
        found |= {f"{name}{path}": one for path, one in _plain(value)}
    return found


def _plain(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, number, text and generator in nested containers, with the way to it."""
    if isinstance(value, torch.Tensor):
        if type(value) is torch.Tensor:  # a parameter is compared where it is one
            yield "", value.detach().clone()
    elif isinstance(
        value, (bool, int, float, str, bytes, bytearray, type(None), numpy.ndarray, numpy.generic)
    ):
        yield "", torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    elif isinstance(value, torch.Generator):
        yield "", value.get_state()
    elif isinstance(value, random.Random):
        yield from _plain(repr(value.getstate()))
    elif isinstance(value, numpy.random.Generator):
        yield from _plain(repr(value.bit_generator.state))
    elif isinstance(value, set):
        yield from _plain(repr(sorted(value)))
    elif is_dataclass(value):
        yield from _plain(vars(value))
    elif isinstance(value, nn.Module):  # in a list, which its parent does not look into
        yield from _plain(dict(value.state_dict()))
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from ((f"[{key!r}]{path}", plain) for path, plain in _plain(one))
    elif isinstance(value, (list, tuple, deque)):
        for at, one in enumerate(value):
            yield from ((f"[{at}]{path}", plain) for path, plain in _plain(one))
