"""A GPU that is too small. The test puts this file beside each script, which runs on the CPU.

`watch(model)` records the samples of each forward pass. It raises PyTorch's out-of-memory error in CUDA's
words when a micro-batch of step 4 has more than four samples. With `FAILING_RANK` only that rank raises it.
Before, it leaves a checkpoint that is incomplete, as a kill during a save does. With `FULL_DISK` that rank
cannot save after step 4.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

HOLDS = 4
"Largest micro-batch that fits."
FROM_STEP = 4
"First step that needs more memory."
WRITTEN_LAST = (".metadata", "trainer_state.json")
"Files that make a checkpoint of FSDP2 and of transformers complete."

_TOKENS = (torch.arange(int(os.environ["SAMPLES"]))[:, None] + torch.arange(8)) % 64
SAMPLES = [{"input_ids": row, "labels": row} for row in _TOKENS]
"At most 64 samples of 8 tokens. The first token of a sample is its number."

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which "
    "1.21 GiB is free. Including non-PyTorch memory, this process has 22.47 GiB memory in use. Of the "
    "allocated memory 21.80 GiB is allocated by PyTorch, and 202.52 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
    "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
"The text of PyTorch's CUDA allocator, which a CPU build of PyTorch does not have."

_torch_save = torch.save
_passes: list[list[int]] = []
_step = 0


class TinyModel(torch.nn.Module):
    """Predict the next token from this one. Returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(input_ids[:, :-1]))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def watch(model: torch.nn.Module) -> torch.nn.Module:
    """Record the samples of each forward pass. Each optimizer step writes them to a file of the run."""
    model.register_forward_pre_hook(_forward, with_kwargs=True)
    if os.environ.get("FULL_DISK") == os.environ["RANK"] and os.environ["LAUNCHER_ATTEMPT"] == "0":
        torch.save = _save
    register_optimizer_step_post_hook(_stepped)
    return model


def _forward(_module: torch.nn.Module, _args: Any, inputs: dict[str, torch.Tensor]) -> None:
    samples = inputs["input_ids"][:, 0].tolist()
    fails = os.environ.get("FAILING_RANK", os.environ["RANK"]) == os.environ["RANK"]
    if fails and len(samples) > HOLDS and _step + 1 == FROM_STEP:
        _leave_an_incomplete_checkpoint()
        raise torch.OutOfMemoryError(MESSAGE)
    _passes.append(samples)


def _save(*values: Any, **options: Any) -> None:
    """Save, with a disk that is full from FROM_STEP on."""
    if _step >= FROM_STEP:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _torch_save(*values, **options)


def _leave_an_incomplete_checkpoint() -> None:
    """Copy a folder that a framework writes under its final name, but not the file that it writes last."""
    for last in Path(os.environ["LAUNCHER_CHECKPOINT_DIR"]).glob("*2/*"):
        if last.name in WRITTEN_LAST:
            partial = last.parent.with_name(last.parent.name[:-1] + "3")
            shutil.copytree(
                last.parent, partial, ignore=shutil.ignore_patterns(last.name), dirs_exist_ok=True
            )


def _stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Write the samples of this step. AdamW counts the step, so the count needs the loaded state."""
    global _step
    if not _passes:  # FSDP's step that only allocates the optimizer's state
        return
    _step = int(next(iter(optimizer.state.values()))["step"])
    line = {"attempt": int(os.environ["LAUNCHER_ATTEMPT"]), "step": _step, "passes": _passes}
    with (Path(os.environ["LAUNCHER_RUN_DIR"]) / f"consumed-{os.environ['RANK']}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    _passes.clear()
