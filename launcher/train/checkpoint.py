"""Checkpoints: complete directories `checkpoints/step-00000100`, written beside and renamed.

The tensors are torch.distributed.checkpoint's, so another world size or sharding can read them.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from launcher.runs.files import read_json, replace_json
from launcher.train.optimizers.blocks import other_shards
from launcher.train.rank import Rank
from launcher.train.rng import rng_state, seed_all, set_rng_state
from launcher.train.scaler import LossScaler
from launcher.train.seeds import derive_seed

MARKER = "complete.json"
FULL_BYTES = 2**20
"With less than this free a failed write is blamed on the full disk."
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(Exception):
    """A checkpoint could not be written or read. Older ones are as they were."""


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """`{step: directory}` in order of step, of those whose marker says that everything is there."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is not None and (read_json(path / MARKER) or {}).get("step") == int(match[1]):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


class Checkpoints:
    """Saves and restores one model, its optimizer and its loss scale."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler, rank: Rank
    ) -> None:
        self.model, self.optimizer, self.scaler, self.rank = model, optimizer, scaler, rank
        self.folder = rank.run.checkpoints

    def save(self, step: int) -> Path:
        """On every rank. When it returns on any, the checkpoint is complete. Raises CheckpointError."""
        final = self.folder / f"step-{step:08d}"
        beside = self.folder / f".{final.name}.partial"
        try:
            if self.rank.first:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
            dist.barrier()
            _save_rng(beside / _rng_name(self.rank.number), self.rank.device)
            save(self._state(), checkpoint_id=beside)
            if self.rank.first:
                self._publish(step, beside, final)
            dist.barrier()
        except (OSError, CheckpointException) as error:
            cause = _disk_full(self.folder) or _first_cause(error)
            if self.rank.first:
                shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(f"{final.name} could not be written: {cause}") from error
        return final

    def restore(self) -> int:
        """Load the newest complete checkpoint. Returns its step, or 0. Raises CheckpointError."""
        step = self._newest()
        if step == 0:
            return 0
        path = self.folder / f"step-{step:08d}"
        state = self._state()
        if problem := other_shards(state["optimizer"]["state"], path, "optimizer.state"):
            raise CheckpointError(f"{path.name} cannot be resumed from: {problem}")
        try:
            load(state, checkpoint_id=path)
        except CheckpointException as error:
            raise CheckpointError(f"{path.name} could not be read: {_first_cause(error)}") from error
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scaler.restore((read_json(path / MARKER) or {}).get("scaler"))
        self._restore_rng(path, step)
        return step

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _publish(self, step: int, beside: Path, final: Path) -> None:
        """The marker is written last; a directory without it does not count, whatever its name."""
        content = {
            "step": step,
            "world": self.rank.world,
            "torch": str(torch.__version__),
            "scaler": self.scaler.state(),
        }
        replace_json(beside / MARKER, content)
        shutil.rmtree(final, ignore_errors=True)  # an incomplete one of that name
        beside.rename(final)
        _sync_directory(self.folder)
        complete = list(complete_checkpoints(self.folder).values())
        for old in complete[: -self.rank.job.train.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)

    def _newest(self) -> int:
        """Chosen by rank 0 for all: on a network file system ranks may see different directories."""
        choice = [0]
        if self.rank.first:
            choice = [max(complete_checkpoints(self.folder), default=0)]
            for torn in self.folder.glob(".step-*.partial"):
                shutil.rmtree(torn, ignore_errors=True)
        dist.broadcast_object_list(choice, src=0)
        return choice[0]

    def _restore_rng(self, path: Path, step: int) -> None:
        """Another number of ranks has no old state to go on from: a new stream, the same in every try."""
        rank = self.rank
        if (read_json(path / MARKER) or {}).get("world") == rank.world:
            state = torch.load(path / _rng_name(rank.number), weights_only=True, map_location="cpu")
            set_rng_state(state, rank.device)
        else:
            rank.say("the number of ranks changed: dropout draws from a new stream")
            seed_all(derive_seed("resumed", rank.job.train.seed, step, rank.number))


def _rng_name(rank: int) -> str:
    return f"rng-{rank:03d}.pt"


def _save_rng(path: Path, device: torch.device) -> None:
    with open(path, "wb") as file:
        torch.save(rng_state(device), file)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_full(folder: Path) -> str | None:
    """torch reports a full disk as an `inline_container` assertion, which tells a user nothing."""
    free = shutil.disk_usage(folder).free
    return f"No space left on device ({folder} has {free} bytes free)" if free < FULL_BYTES else None


def _first_cause(error: BaseException) -> str:
    """DCP wraps what failed on each rank: name the first."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
