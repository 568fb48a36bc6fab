"""The state of a rank for the next attempt, in its node's shared memory: giving it and taking it up.

Giving needs no other rank and no collective: they may be stuck. What is written are the rank's own plain
tensors, in the order of the model's parameters; the same recipe of layout cuts and orders them alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from launcher.runs.shared import handover_folder, make_handover_folder, remove_handover
from launcher.spec.recipe import SHARDED
from launcher.train.checkpoints.checkpoints import Checkpoints
from launcher.train.optimizers.state import local
from launcher.train.rank import Rank
from launcher.train.recovery.packed import Packed, packed_bytes, read_packed, write_packed
from launcher.train.recovery.progress import Progress
from launcher.train.rng import packed

Layout = dict[str, Any]


@dataclass(frozen=True)
class Resumed:
    """Where an attempt begins, the same on every rank."""

    step: int
    source: Literal["shared-memory", "checkpoint"] | None
    "None: at the beginning."
    unrecorded: dict[str, Any] | None = None
    "Of `step`, whose evaluation and metrics are still to be done (see Progress)."
    skipped: str | None = None
    "Why there is a handover that was not taken."


class Handover:
    """Create it when model and optimizer are whole and before they train: FSDP shows another model later."""

    def __init__(self, checkpoints: Checkpoints, progress: Progress) -> None:
        self.checkpoints, self.progress, self.rank = checkpoints, progress, checkpoints.rank
        self.optimizer = checkpoints.optimizer
        # In a forward pass the model has its gathered parameters in their place; these are the shards.
        self._parameters = list(checkpoints.model.parameters())
        self.layout = layout_of(self.rank, checkpoints.model)
        # Replicas are equal bit for bit: one rank of each node writes for all.
        self._shared = self.rank.recipe.sharding not in SHARDED
        self.writes_all = not self._shared or self.rank.local == 0
        self._stream: torch.cuda.Stream | None = None
        if self.rank.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.rank.device)  # type: ignore[no-untyped-call]

    def bytes(self) -> int:
        """Of the tensors that `give` would write."""
        return packed_bytes(self._tensors())

    @torch.no_grad()
    def give(self) -> int:
        """Write the state while `progress` is held. From any thread. Returns the bytes. Raises OSError, and
        RuntimeError when the GPU does not answer."""
        rank, progress = self.rank, self.progress
        folder = make_handover_folder(rank.run, rank.node)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None:
                torch.cuda.set_device(rank.device)  # each thread has its own
                progress.wait(self._stream)
            about = {
                "attempt": rank.attempt.number,
                "step": progress.step,
                "layout": self.layout,
                "states": [list(state) for state in self._states()] if self.writes_all else [],
                "own": {
                    "rng": packed(progress.undo.rng),
                    "buffers": {name: value.cpu() for name, value in progress.undo.buffers().items()},
                },
                "scaler": self.checkpoints.scaler.state(),
                "unrecorded": progress.unrecorded,
            }
            return write_packed(_file(folder, rank.number), self._tensors(), about)

    def resume(self) -> Resumed:
        """In place of Checkpoints.restore, on every rank: from shared memory, else from a checkpoint.

        A handover counts when every rank has one of the same step and layout, newer than every checkpoint.
        Then it is for the loop to call `progress.begin`.
        """
        found = self._found()
        offer = self._offer(found)
        newest = self.checkpoints.newest()
        offers: list[Any] = [None] * self.rank.world
        dist.all_gather_object(offers, offer)
        dist.barrier()  # every rank has opened what it reads: the names can go
        remove_own = self.rank.local == 0
        skipped = why_not(offers, newest)
        if skipped is None:
            assert found is not None
            if remove_own:
                remove_handover(self.rank.run, self.rank.node)
            resumed = self._take(*found)
        else:
            if remove_own:
                remove_handover(self.rank.run, self.rank.node)
            step = self.checkpoints.restore()
            nothing = not any(offers)
            resumed = Resumed(step, "checkpoint" if step else None, skipped=None if nothing else skipped)
        return resumed

    def _found(self) -> tuple[Packed, Packed] | None:
        """(this rank's own, the one with the parameters)"""
        folder = handover_folder(self.rank.run, self.rank.node)
        writer = self.rank.number - (self.rank.local if self._shared else 0)
        own = read_packed(_file(folder, self.rank.number))
        whole = own if writer == self.rank.number else read_packed(_file(folder, writer))
        return (own, whole) if own is not None and whole is not None else None

    def _offer(self, found: tuple[Packed, Packed] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        own, whole = found
        same = [own.about[name] == whole.about[name] for name in ("attempt", "step")]
        differ = [name for name in self.layout if own.about["layout"].get(name) != self.layout[name]]
        return {
            "whole": all(same),
            "attempt": own.about["attempt"],
            "step": own.about["step"],
            "differ": differ,
        }

    @torch.no_grad()
    def _take(self, own: Packed, whole: Packed) -> Resumed:
        """Into the tensors that are there: states stay where their optimizer has put them."""
        self.checkpoints.make_states()
        tensors = iter(whole.tensors)
        for p in self._parameters:
            local(p).copy_(next(tensors))
        for p, names in zip(self._trained(), whole.about["states"], strict=True):
            if not names:  # it never had a gradient
                self.optimizer.state.pop(p, None)
            for name in names:
                local(self.optimizer.state[p][name]).copy_(next(tensors))
        # An optimizer that works on copies of the parameters renews them here.
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.checkpoints.scaler.restore(own.about["scaler"])
        self.checkpoints.own.load(own.about["own"], rng=True)
        return Resumed(own.about["step"], "shared-memory", own.about["unrecorded"])

    def _tensors(self) -> list[torch.Tensor]:
        if not self.writes_all:
            return []
        states = [value for state in self._states() for value in state.values()]
        return [local(tensor.detach()) for tensor in (*self._parameters, *states)]

    def _states(self) -> Iterator[dict[str, torch.Tensor]]:
        """Read without asking for the state_dict, which an optimizer may change something for."""
        for p in self._trained():
            yield self.optimizer.state.get(p, {})

    def _trained(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]


def layout_of(rank: Rank, model: nn.Module) -> Layout:
    """What decides which bytes are whose. Offload is not part of it, nor is whether gathered parameters are
    kept: the shards and the states of either are the same."""
    recipe = rank.recipe
    return {
        "ranks": [rank.world, rank.per_node],
        "sharding": {"fsdp-keep": "fsdp"}.get(recipe.sharding, recipe.sharding),
        "optimizer": recipe.optimizer.removeprefix("paged-"),
        "precision": recipe.precision,
        "shapes": [(str(p.dtype), *local(p).shape) for p in model.parameters()],
    }


def why_not(offers: list[dict[str, Any] | None], newest: int) -> str | None:
    """None: all ranks can go on from what they have in shared memory."""
    there = [offer for offer in offers if offer is not None]
    missing = [str(number) for number, offer in enumerate(offers) if offer is None]
    if missing:
        return f"rank {', '.join(missing)} has nothing of the attempt before in shared memory"
    differ = sorted({name for offer in there for name in offer["differ"]})
    if differ:
        return f"the state is laid out in another way: other {', '.join(differ)}"
    if len({(offer["attempt"], offer["step"], offer["whole"]) for offer in there}) > 1 or not all(
        offer["whole"] for offer in there
    ):
        return "the ranks' states in shared memory are of different steps"
    if there[0]["step"] <= newest:
        return f"the checkpoint of step {newest} is as new"
    return None


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"
