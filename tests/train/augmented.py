"""Ragged data that changes with every look, drawn from all three random generators, and faults in workers."""

from __future__ import annotations

import ctypes
import os
import random
import signal
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info

from tests.train.ragged import VOCABULARY, Ragged


class Augmented(Ragged):
    """`fault`: what the worker that fetches the `call`-th sample does."""

    def data(self, split: str) -> Any:
        return Noisy(super().data(split), self.fault if split == "train" else "", self.call)

    def loss(self, model: Any, batch: Any) -> Any:
        self.call = 0
        return super().loss(model, batch)


class Noisy:
    def __init__(self, samples: list[Any], fault: str, call: int) -> None:
        self.samples, self.fault, self.call = samples, fault, call
        self.calls = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        if self.calls == self.call and get_worker_info() is not None:
            if self.fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "crash":
                ctypes.string_at(0)
        if self.fault == "raise" and self.calls == self.call:
            raise KeyError("no such file")
        inputs, targets = self.samples[index]
        noisy = inputs.clone()
        noisy[torch.randint(len(noisy), ())] = random.randrange(VOCABULARY)
        noisy[numpy.random.randint(len(noisy))] = 0
        return noisy, targets
