"""The random state of one rank, used by dropout and augmentation."""

from __future__ import annotations

import ctypes
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
    seed_host(seed)


def seed_host(seed: int) -> None:
    """Seed torch's generator of the CPU, Python and numpy, without a call to a GPU."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, as they are in memory."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    state |= {name: generator.state() for name, generator in GLOBAL_GENERATORS.items()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state from `random_state` as values that `torch.load(weights_only=True)` reads."""
    if numpy is None:
        return state
    name, keys, *rest = state["numpy"]
    return {**state, "numpy": (name, torch.tensor(_words(keys).astype("int64")), *rest)}


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state from `random_state` or `packed`."""
    torch.set_rng_state(state["torch"])
    for name, generator in GLOBAL_GENERATORS.items():
        if name in state:
            generator.set_state(state[name])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _words(keys: Any) -> Any:
    """Return numpy's key, which `NumpyGenerator` keeps as bytes and a checkpoint as a tensor of int64."""
    assert numpy is not None
    if isinstance(keys, bytes):
        return numpy.frombuffer(keys, dtype="uint32")
    return numpy.asarray(keys, dtype="uint32")


class PythonGenerator:
    """The generator of Python's `random`."""

    def state(self) -> Any:
        """Return a state that `==` compares."""
        return random.getstate()

    def set_state(self, state: Any) -> None:
        random.setstate(state)


class NumpyGenerator:
    """The generator of `numpy.random`, whose functions for reading the state take 35 us."""

    SIZE = 625 * 4
    "Bytes of the state of MT19937 in memory: 624 words and the position among them."

    def __init__(self) -> None:
        self._content: bytes | None = None
        self._last: Any = None

    def state(self) -> Any:
        assert numpy is not None
        content = self._read()
        # numpy keeps a number for the next call of randn outside of this memory.
        if content is None or content != self._content or self._last[3]:
            state = numpy.random.get_state()
            if isinstance(state, dict):  # the state of another generator than MT19937
                return state
            name, keys, *rest = state
            self._content, self._last = content, (name, keys.tobytes(), *rest)
        return self._last

    def set_state(self, state: Any) -> None:
        assert numpy is not None
        if not isinstance(state, dict):
            name, keys, *rest = state
            state = (name, _words(keys), *rest)
        numpy.random.set_state(state)
        self._content = None  # the state may differ in the number kept for randn alone

    def _read(self) -> bytes | None:
        assert numpy is not None
        generator = numpy.random.get_bit_generator()
        if type(generator) is not numpy.random.MT19937:
            return None
        return ctypes.string_at(generator.ctypes.state_address, self.SIZE)


GLOBAL_GENERATORS: dict[str, PythonGenerator | NumpyGenerator] = {"python": PythonGenerator()}
"The generators that a whole process shares, other than torch's."
if numpy is not None:
    GLOBAL_GENERATORS["numpy"] = NumpyGenerator()
