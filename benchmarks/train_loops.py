"""The loops that benchmarks/train.py compares, each in a process of its own: `train_loops.py LOOP ARGUMENTS`.

Same model, same data, same optimizer arithmetic: AdamW (fused), clipping to 1.0, a cosine schedule, one line
of log now and then. Each writes the wall-clock time at which every optimizer step ended, and a line into the
file `steps` with every step, as our loop writes one of its metrics.
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

from launcher.train.task import load_task

LOG_EVERY = 10


class Work:
    """What every loop trains, from the arguments that benchmarks/train.py wrote."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.device = torch.device(arguments["device"])
        self.steps, self.batch, self.lr = arguments["steps"], arguments["batch"], arguments["lr"]
        self.accumulation = arguments["accumulation"]
        self.compile, self.out = arguments["compile"], Path(arguments["out"])
        recipe = arguments["recipe"]
        self.pure = recipe.get("precision") == "bf16"
        self.recomputes = recipe.get("activations") == "checkpoint"
        torch.manual_seed(0)
        self.task = load_task(arguments["task"], arguments["args"], ".")
        self.data = self.task.data("train")
        self.ends: list[float] = []
        self.lines = open(self.out.with_name("steps"), "w", buffering=1)  # noqa: SIM115  # open until the end

    def loader(self) -> DataLoader[Any]:
        micro = self.batch // self.accumulation
        return DataLoader(
            self.data, micro, shuffle=True, drop_last=True, pin_memory=self.device.type == "cuda"
        )

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps, eta_min=self.lr / 10)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, fused=True)

    def mean_loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        total, weight = self.task.loss(model, batch)
        return total / weight

    def ended(self) -> None:
        self.ends.append(time.time())
        self.lines.write("\n")

    def write(self) -> None:
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        self.out.write_text(json.dumps({"ends": self.ends, "peak": peak}))


def plain(work: Work) -> None:
    """What a good engineer writes for one device."""
    _train(work, work.task.model().to(work.device))


def fsdp2(work: Work) -> None:
    """The same with FSDP2: fp32 shards or, in pure bf16, bf16 ones; bf16 compute, each block compiled."""
    import torch.distributed as dist
    from torch.distributed._composable import checkpoint
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl" if work.device.type == "cuda" else "gloo")
    with torch.device("meta") if work.task.built_on_meta else torch.device("cpu"):
        model = work.task.model()
    if work.pure:
        model = model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16 if work.pure else torch.float32)
    for block in work.task.blocks(model):
        if work.recomputes:
            checkpoint(block)
        if work.compile:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if work.task.built_on_meta:
        model.to_empty(device=work.device)
        work.task.initialise(model, 0)
    _train(work, model)
    work.write()
    os._exit(0)


def _train(work: Work, model: nn.Module) -> None:
    optimizer = work.optimizer(model)
    schedule = work.schedule(optimizer)
    batches = _endless(work.loader())
    for step in range(1, work.steps + 1):
        for _ in range(work.accumulation):
            batch = next(batches).to(work.device, non_blocking=True)
            loss = work.mean_loss(model, batch) / work.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            print(f"step {step} loss {loss.item() * work.accumulation:.4f}", flush=True)
        if work.device.type == "cuda":
            torch.cuda.synchronize()  # so that the clock shows when the step has really ended
        work.ended()


def trainer(work: Work) -> None:
    """Hugging Face Trainer, which runs on accelerate."""
    import transformers

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = work.task.model()

        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": work.mean_loss(self.inner, tokens)}

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            work.ended()

    arguments = transformers.TrainingArguments(
        output_dir=str(work.out.parent / "trainer"),
        per_device_train_batch_size=work.batch // work.accumulation,
        gradient_accumulation_steps=work.accumulation,
        max_steps=work.steps,
        learning_rate=work.lr,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to=[],
        use_cpu=work.device.type == "cpu",
        bf16=work.device.type == "cuda",
        disable_tqdm=True,
        dataloader_pin_memory=work.device.type == "cuda",
    )
    transformers.Trainer(
        model=Wrapped(),
        args=arguments,
        train_dataset=work.data,
        data_collator=lambda samples: {"tokens": torch.stack(samples)},
        callbacks=[Clock()],
    ).train()


def lightning(work: Work) -> None:
    import lightning as pl

    class Wrapped(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = work.task.model()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = work.mean_loss(self.inner, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = work.optimizer(self.inner)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": work.schedule(optimizer), "interval": "step"},
            }

        # Fused AdamW clips by itself in Lightning's AMP plugin only: here by norm, as the others do.
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            torch.nn.utils.clip_grad_norm_(self.inner.parameters(), 1.0)

        def on_train_batch_end(self, *_: Any) -> None:
            work.ended()

    pl.Trainer(
        accelerator="cpu" if work.device.type == "cpu" else "gpu",
        devices=1,
        max_steps=work.steps,
        accumulate_grad_batches=work.accumulation,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=LOG_EVERY,
    ).fit(Wrapped(), work.loader())


def _endless(loader: DataLoader[Any]) -> Any:
    while True:
        yield from loader


LOOPS = {"plain": plain, "fsdp2": fsdp2, "trainer": trainer, "lightning": lightning}

if __name__ == "__main__":
    asked = Work(json.loads(Path(sys.argv[2]).read_text()))
    LOOPS[sys.argv[1]](asked)
    asked.write()
