"""The task of these tests: sequences of unequal length with ignored tokens, and faults on demand."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from launcher.tasks.gpt import PydocGPT
from launcher.train import Task

VOCABULARY = 64
IGNORED = -100


class Ragged(Task):
    """`fault`: what happens on rank 1 of attempt 0 at its `call`-th training loss.

    A stop while saving happens on rank 0, which looks for it after its own part of the save. `pace`: seconds
    that a loss takes at least.
    """

    def __init__(
        self,
        dim: int = 16,
        samples: int = 40,
        dropout: float = 0.0,
        fault: str = "",
        call: int = 0,
        pace: float = 0.0,
    ) -> None:
        self.dim, self.samples, self.dropout, self.fault, self.call = dim, samples, dropout, fault, call
        self.pace = pace
        self.calls = 0

    def model(self) -> nn.Module:
        return Residual(self.dim, self.dropout)

    def data(self, split: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        return [_sample(generator) for _ in range(self.samples)]

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        inputs, targets = zip(*samples, strict=True)
        pad = nn.utils.rnn.pad_sequence
        return {
            "inputs": pad(list(inputs), batch_first=True),
            "targets": pad(list(targets), batch_first=True, padding_value=IGNORED),
        }

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        self.count(model)
        time.sleep(self.pace)
        logits = model(batch["inputs"]).float().flatten(0, 1)
        targets = batch["targets"].flatten()
        total = functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        return total, (targets != IGNORED).sum()

    def count(self, model: nn.Module) -> None:
        """Count a training loss, at which the fault may happen."""
        if model.training and torch.is_grad_enabled():  # a step, not a comparison before it
            self.calls += 1
            if (
                self.calls == self.call
                and os.environ["RANK"] == ("0" if self.fault == "stop while saving" else "1")
                and os.environ["LAUNCHER_ATTEMPT"] == "0"
            ):
                _inject(self.fault, model)


class HeadApart(PydocGPT):
    """FSDP gathers the head for each call, not with the rest."""

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        yield from super().blocks(model)
        yield model.head


class Residual(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return self.head(x)


def _sample(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    length = int(torch.randint(2, 30, (1,), generator=generator))
    tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
    targets = tokens[1:].clone()
    targets[torch.rand(length, generator=generator) < 0.3] = IGNORED
    targets[0] = tokens[1]
    return tokens[:-1], targets


def _inject(fault: str, model: nn.Module) -> None:
    match fault:
        case "raise":
            raise KeyError("no such label")
        case "exit":
            sys.exit("no such label")
        case "allocate":  # what does not fit into the budget of the test
            torch.zeros(8 * 2**20)
        case "stop":
            _ask_to_stop()
        case "stop while saving":  # the next save asks the model for its state
            model.register_state_dict_post_hook(_ask_to_stop)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "halt":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "full disk":  # a real failing write: no file may grow beyond 24 KiB
            resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 2**10, resource.RLIM_INFINITY))


def _ask_to_stop(*_: object) -> None:
    Path(os.environ["LAUNCHER_STOP_FILE"]).write_text("preempted")


class BrokenData(Ragged):
    """A data set with a sample that cannot be read."""

    def data(self, split: str) -> list[Any]:
        return Unreadable(super().data(split))


class Divided(Ragged):
    """Samples that each rank divides by itself: the held-out ones into two unequal parts."""

    def data(self, split: str) -> list[Any]:
        found = super().data(split)
        return (found[1:] if split == "train" else found)[int(os.environ["RANK"]) :: 2]


class Unreadable(list):  # type: ignore[type-arg]
    def __getitem__(self, index: Any) -> Any:
        raise KeyError("no such sample")
