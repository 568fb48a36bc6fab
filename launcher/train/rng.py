"""The random state of one rank, used by dropout and augmentation."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import torch

numpy: ModuleType | None
try:
    import numpy
except ImportError:  # torch runs without it
    numpy = None


def seed_all(seed: int) -> None:
    """Seed torch (every device), Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, as they are in memory."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return `random_state` as values that `torch.load(weights_only=True)` reads."""
    return packed(random_state(device))


def packed(state: dict[str, Any]) -> dict[str, Any]:
    if numpy is None:
        return state
    name, keys, *rest = state["numpy"]
    return {**state, "numpy": (name, torch.tensor(numpy.asarray(keys, dtype="int64")), *rest)}


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state from `random_state` or `rng_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.asarray(keys, dtype="uint32"), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
