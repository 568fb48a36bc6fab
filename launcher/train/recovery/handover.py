"""The state of a rank for the next attempt, in its node's shared memory: giving it and taking it up.

Giving needs no other rank and no collective: they may be stuck. What is written are the rank's own plain
tensors, in the order of the model's parameters; the same recipe of layout cuts and orders them alike. Under
another sharding a rank takes its part out of the files of its node, where they have everything (`reshard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from launcher.rundir.shared import handover_folder, make_handover_folder, remove_handover
from launcher.spec.optimizers import OPTIMIZERS, saved_as
from launcher.spec.recipe import SHARDED
from launcher.train.checkpoints.checkpoints import Checkpoints
from launcher.train.checkpoints.own import not_persistent
from launcher.train.optimizers.state import local
from launcher.train.rank import Rank
from launcher.train.recovery.packed import Packed, packed_bytes, read_packed, write_packed
from launcher.train.recovery.progress import Progress
from launcher.train.recovery.reshard import parts_of, place_of
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


@dataclass(frozen=True)
class Found:
    """What the attempt before has left for this rank."""

    own: Packed
    states: list[list[str]]
    "Names of the optimizer's states of each parameter that is trained."
    copies: list[Callable[[torch.Tensor], object]]
    "Each writes one tensor: the parameters, then the states."
    whole: bool
    "All files are of one step."
    differ: list[str]
    "What of the layout is another one, and cannot be bridged."


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
        return packed_bytes([local(tensor.detach()) for tensor in self._tensors()])

    @torch.no_grad()
    def give(self) -> int:
        """Write the state while `progress` is held. From any thread. Returns the bytes. Raises OSError, and
        RuntimeError when the GPU does not answer."""
        rank, progress = self.rank, self.progress
        folder = make_handover_folder(rank.run, rank.node)
        if lost := progress.undo.lost():
            raise RuntimeError(f"{', '.join(lost)} changed for the first time in the step that failed")
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None:
                torch.cuda.set_device(rank.device)  # each thread has its own
                progress.wait(self._stream)
            about = {
                "attempt": rank.attempt.number,
                "step": progress.step,
                "layout": self.layout,
                "states": [list(state) for state in self._states()] if self.writes_all else [],
                "places": [place_of(tensor) for tensor in self._tensors()],
                "own": {
                    "rng": packed(progress.undo.rng),
                    "buffers": {name: value.cpu() for name, value in progress.undo.buffers().items()},
                    "not_persistent": not_persistent(self.checkpoints.model),
                    **({} if progress.undo.task_state is None else {"task": progress.undo.task_state}),
                },
                "scaler": self.checkpoints.scaler.state(),
                "made_with": self.checkpoints.made_with,
                "unrecorded": progress.unrecorded,
            }
            return write_packed(_file(folder, rank.number), self._parts(), about)

    def resume(self) -> Resumed:
        """In place of Checkpoints.restore, on every rank: from shared memory, else from a checkpoint.

        A handover counts when every rank has one of the same step and layout, newer than every checkpoint.
        Then it is for the loop to call `progress.begin`.
        """
        with self.progress.budget.host_side():
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
            with self._where_states_are():
                resumed = self._take(found)
        else:
            if remove_own:
                remove_handover(self.rank.run, self.rank.node)
            with self._where_states_are():
                step = self.checkpoints.restore()
            resumed = Resumed(
                step,
                "checkpoint" if step else None,
                self.checkpoints.before.get("unrecorded"),
                skipped if any(offers) else None,
            )
        return resumed

    def _where_states_are(self) -> AbstractContextManager[object]:
        """A memory budget counts the optimizer's states as the step that makes them does."""
        return self.progress.budget.host_side() if self.rank.recipe.offload == "cpu" else nullcontext()

    def _found(self) -> Found | None:
        folder = handover_folder(self.rank.run, self.rank.node)
        own = read_packed(_file(folder, self.rank.number))
        if own is None:
            return None
        differ = [name for name in self.layout if own.about["layout"].get(name) != self.layout[name]]
        first = self.rank.number - self.rank.local
        # Of replicas one rank of each node has written for all.
        numbers = [first if self._shared else self.rank.number]
        if reshards := bool(differ) and self._reshards(differ):
            numbers = list(range(first, first + self.rank.per_node))
        # Each file once.
        mine = self.rank.number
        files = [own if number == mine else read_packed(_file(folder, number)) for number in numbers]
        found = [file for file in files if file is not None]
        if len(found) < len(files):
            return None
        same = all(file.about[name] == own.about[name] for file in found for name in ("attempt", "step"))
        written = [file for file in found if file.tensors]
        states = written[0].about["states"] if written else []
        if not reshards or not same or not written:
            tensors = written[0].tensors if written else ()
            return Found(own, states, [partial(_copy, part) for part in tensors], same, differ)
        parts = parts_of([(file.about["places"], file.tensors) for file in written])
        parameters = zip(self._parameters, parts[: len(self._parameters)], strict=True)
        if all(part.complete for part in parts) and all(part.fits(p) for p, part in parameters):
            differ = []
        return Found(own, states, [part.copy_into for part in parts], same, differ)

    def _reshards(self, differ: list[str]) -> bool:
        """8-bit states have scales of the blocks of each shard."""
        return {*differ} <= {"sharding", "shapes"} and not OPTIMIZERS[self.rank.recipe.optimizer].eight_bit

    def _offer(self, found: Found | None) -> dict[str, Any] | None:
        if found is None:
            return None
        about = found.own.about
        return {
            "whole": found.whole,
            "attempt": about["attempt"],
            "step": about["step"],
            "differ": found.differ,
        }

    @torch.no_grad()
    def _take(self, found: Found) -> Resumed:
        """Into the tensors that are there: states stay where their optimizer has put them."""
        self.checkpoints.make_states()
        own, copies = found.own, iter(found.copies)
        for p in self._parameters:
            next(copies)(p)
        for p, names in zip(self._trained(), found.states, strict=True):
            if not names:  # it never had a gradient
                self.optimizer.state.pop(p, None)
            for name in names:
                next(copies)(self.optimizer.state[p][name])
        # An optimizer that works on copies of the parameters renews them here.
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.checkpoints.scaler.restore(own.about["scaler"])
        self.checkpoints.before = own.about["made_with"]
        self.checkpoints.own.load(own.about["own"], rng=True)
        return Resumed(own.about["step"], "shared-memory", own.about["unrecorded"])

    def _tensors(self) -> list[torch.Tensor]:
        if not self.writes_all:
            return []
        return [*self._parameters, *(value for state in self._states() for value in state.values())]

    def _parts(self) -> list[torch.Tensor]:
        """What this rank has of them; parameters without gradient as they were after the last step."""
        undo = self.progress.undo
        return [local(undo.kept(tensor).detach()) for tensor in self._tensors()]

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
        "optimizer": saved_as(recipe.optimizer),
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


def _copy(part: torch.Tensor, tensor: torch.Tensor) -> None:
    local(tensor).copy_(part)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"
