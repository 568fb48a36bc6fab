"""A task that fails where its arguments say. A test copies it into the folder of its job."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from launcher.spec.variables import ONLY_SAVE
from launcher.train import Task
from launcher.train.checkpoints import writer
from launcher.train.handover import handover
from launcher.train.recovery import deadline

CLASSES, DIM = 24, 16
ATTEMPT, RANK = int(os.environ.get("LAUNCHER_ATTEMPT", "-1")), int(os.environ.get("RANK", "-1"))

RUN = Path(os.environ.get("LAUNCHER_RUN_DIR", "."))


class Faulty(Task):
    """`faults`: `[attempt, rank, place, step]` of each; rank or attempt -1: all."""

    def __init__(self, faults: list[Any]) -> None:
        mine = [fault for fault in faults if fault[0] in (ATTEMPT, -1) and fault[1] in (RANK, -1)]
        self.updated = True
        self.faults = {place: step for _, _, place, step in mine if ATTEMPT >= 0}

    def model(self) -> nn.Module:
        if "no model" in self.faults:
            raise ValueError("no model today")
        self.network = Network()
        if ATTEMPT >= 0:
            register_optimizer_step_pre_hook(self._before_update)
            register_optimizer_step_post_hook(self._after_update)
            self.network.register_state_dict_post_hook(lambda *_: self._perhaps("checkpoint", done=1))
            if "twice" in self.faults:
                deadline.SECONDS = 1.0
            if "save held" in self.faults and os.environ.get(ONLY_SAVE):
                writer.Writer.write_data = held  # type: ignore[method-assign,assignment]
            if "killed in the handover" in self.faults:
                handover.write_packed = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        return self.network

    def blocks(self, model: Any) -> Any:
        return [model.layer]

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        size = 640 if split == "train" else 16
        return torch.utils.data.TensorDataset(torch.randint(0, CLASSES, (size,), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        (classes,) = batch
        self.updated = False
        if model.training:
            self._perhaps("forward")
            self._perhaps("error", ValueError("no such label"))
            if self._due("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._due("cancelled") and not (cancel := RUN / "cancel").exists():
                cancel.write_text("now")
                time.sleep(2)
            if self._due("unwritable") and RANK == 0:
                (RUN / "checkpoints").rmdir()
                (RUN / "checkpoints").write_text("a file where a folder should be")
            if self._due("cancelled in time") or self._due("preempted in time"):
                self._stopped("preempted" if "preempted in time" in self.faults else "cancelled")
        else:
            self._perhaps("evaluation", done=1)
        if model.training and self._due("twice"):
            model(classes)  # more is sent than in the steps before
        logits = model(classes)
        if logits.requires_grad:
            logits.register_hook(lambda _: self._perhaps("backward"))
        return functional.cross_entropy(logits, classes, reduction="sum"), len(classes)

    def _stopped(self, reason: str) -> None:
        """Returns when the supervisor has been asked to stop, and has asked the ranks."""
        if RANK == 0 and reason == "cancelled":
            (RUN / "cancel").write_text("now")
        elif RANK == 0:
            os.kill(int(json.loads((RUN / "supervisor.lock").read_text())["pid"]), signal.SIGTERM)
        while not Path(os.environ["LAUNCHER_STOP_FILE"]).exists():
            time.sleep(0.02)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._due("optimizer"):  # half of an update
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1.0)
        self._perhaps("optimizer")
        if self._due("node lost"):
            lock = RUN / "supervisor.01.lock"
            os.kill(int(json.loads(lock.read_text())["pid"]), signal.SIGKILL)
            time.sleep(60)

    def _after_update(self, *_: Any) -> None:
        if not self.updated:  # an optimizer on the host has another one inside
            self.network.steps += 1
        self.updated = True

    def _due(self, place: str, done: int = 0) -> bool:
        return self.faults.get(place) == int(self.network.steps) + 1 - done

    def _perhaps(self, place: str, error: Exception | None = None, done: int = 0) -> None:
        if self._due(place, done):
            raise error or torch.OutOfMemoryError(f"out of memory, as asked for: {place}")


def held(self: writer.Writer, *_: Any) -> Any:
    """In the place of Writer.write_data: the checkpoint stays half-written until the ranks are ended."""
    (Path(self.path) / "half").write_text("of a checkpoint")
    (RUN / "saving").touch()
    while True:
        time.sleep(1)


class Network(nn.Module):
    """Ranks differ in dropout; BatchNorm and the count of updates are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, DIM)
        self.layer, self.norm, self.dropout = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Dropout(0.2)
        self.head = nn.Linear(DIM, CLASSES)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, classes: torch.Tensor) -> torch.Tensor:
        x = self.embedding(classes)
        return self.head(x + self.dropout(self.norm(self.layer(x))))
