"""How others train through an out-of-memory failure: `oom_peers.py WAY ARGUMENTS`, one process, one device.

All train the model of benchmarks/oom.py under its memory budget, with the same optimizer and data. Each
writes what it did: samples and loss of every optimizer step, and when it ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.task import load_task


class CudaLike(MemoryBudget):
    """The peers recognise CUDA's words, so they get them."""

    def _reserve(self, size: int) -> None:
        try:
            super()._reserve(size)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {error}") from None


class Work:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.batch, self.steps, self.lr = arguments["batch"], arguments["steps"], arguments["lr"]
        self.out = Path(arguments["out"])
        self.task = load_task(arguments["task"], arguments["args"], ".")
        self.data = self.task.data("train")
        self.done: list[dict[str, float]] = []

    def new_model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.task.model()

    def loader(self, size: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(self.data, size, shuffle=True, drop_last=True, generator=generator)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, fused=True)

    def mean_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        total, weight = self.task.loss(model, batch)
        return total / weight

    def train(self, size: int) -> None:
        """A plain loop at this batch size: what a script does whose author knows nothing of accumulation."""
        model = self.new_model()
        optimizer = self.optimizer(model)
        batches = iter(self.loader(size))
        for _ in range(self.steps):
            loss = self.mean_loss(model, next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.step(size, loss)

    def step(self, size: int, loss: torch.Tensor) -> None:
        self.done.append({"samples": size, "loss": loss.item(), "time": time.time()})

    def write(self) -> None:
        self.out.write_text(json.dumps(self.done))


def accelerate(work: Work) -> None:
    """find_executable_batch_size around the whole training, as its documentation shows."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=work.batch)
    def attempt(batch_size: int) -> None:
        work.train(batch_size)

    attempt()


def lightning(work: Work) -> None:
    """BatchSizeFinder, which tries sizes upwards before the training."""
    import lightning as pl
    from lightning.pytorch.tuner import Tuner

    class Wrapped(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.batch_size = work.new_model(), 1

        def train_dataloader(self) -> DataLoader[Any]:
            return work.loader(self.batch_size)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = work.mean_loss(self.inner, batch)
            if not self.trainer.sanity_checking and getattr(self, "counts", False):
                work.step(self.batch_size, loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.inner)

    module = Wrapped()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=work.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(work.out.parent),
    )
    sizes = work.batch.bit_length()
    Tuner(trainer).scale_batch_size(module, mode="power", init_val=1, max_trials=sizes, steps_per_trial=2)
    module.counts = True
    trainer.fit(module)


def script(work: Work) -> None:
    """One try at the given size: the shell loop of benchmarks/oom.py starts it again at half."""
    work.train(work.batch)


WAYS = {"accelerate": accelerate, "lightning": lightning, "script": script}

if __name__ == "__main__":
    asked = Work(json.loads(Path(sys.argv[2]).read_text()))
    if len(sys.argv) > 3:
        asked.batch = int(sys.argv[3])
    with CudaLike(int(os.environ["BUDGET_BYTES"])):
        WAYS[sys.argv[1]](asked)
    asked.write()
