"""Handover of a rank's state to the next attempt, through the shared memory of its node.

Writing needs no other rank and no collective, because the others may be stuck. Each rank writes its shards,
in the order of the model's parameters. If several ranks of a node have a copy, the first one writes it. Under
another sharding, a rank reads its part from the files of its node if these are complete (`reshard`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.rundir.shared_memory_folders import handover_folder, make_handover_folder, remove_handover
from launcher.spec.optimizer_table import OPTIMIZERS, saved_as
from launcher.train.checkpoints.checkpoints import Checkpoints
from launcher.train.checkpoints.rank_state import not_persistent
from launcher.train.handover.progress import Progress
from launcher.train.handover.reshard import Parts, parts_of, place_of
from launcher.train.handover.tensor_file import Packed, packed_bytes, read_packed, write_packed
from launcher.train.local_shards import local
from launcher.train.mesh import TENSOR
from launcher.train.optimizers.state import make_states
from launcher.train.rank import Rank
from launcher.train.rng import packed

Layout = dict[str, Any]


@dataclass(frozen=True)
class Resumed:
    """The state that an attempt starts from; the same on every rank."""

    step: int
    source: Literal["shared-memory", "checkpoint"] | None
    "None if the attempt starts from scratch."
    unrecorded: dict[str, Any] | None = None
    "Result of `step` if its evaluation and metrics are still to be done (see Progress)."
    skipped: str | None = None
    "Why a handover exists but was not used."


@dataclass(frozen=True)
class PreviousState:
    """The handover of the previous attempt for this rank."""

    own: Packed
    tensors: list[Parts]
    """First the parameters, then the states. Empty if the node's files are of different steps; the offers of
    its ranks then differ, too."""
    differ: list[str]
    "Layout entries that differ and that resharding cannot handle."

    @property
    def offer(self) -> dict[str, Any]:
        """What the ranks compare before they load."""
        return {"attempt": self.own.about["attempt"], "step": self.own.about["step"], "differ": self.differ}


class Handover:
    """Writes and reads one rank's state. Create it before training: FSDP changes `model.parameters()`."""

    def __init__(self, checkpoints: Checkpoints, progress: Progress) -> None:
        self.checkpoints, self.progress, self.rank = checkpoints, progress, checkpoints.rank
        self.optimizer = checkpoints.optimizer
        # These are the shards. During a forward pass the model has gathered parameters in their place.
        self._parameters = [p for p in checkpoints.model.parameters() if checkpoints.holds(p)]
        self.layout = layout_of(self.rank, checkpoints.model)
        self._stream: torch.cuda.Stream | None = None
        if self.rank.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.rank.device)  # type: ignore[no-untyped-call]

    def bytes(self) -> int:
        """Return the size of the tensors that `give` would write."""
        return packed_bytes([local(tensor.detach()) for tensor in self._tensors() if self._writes(tensor)])

    @torch.no_grad()
    def give(self) -> int:
        """Write the state and return the bytes written. Any thread may call this while `progress` is held.

        Raises: OSError, and RuntimeError if the GPU does not answer or a tensor's content is lost.
        """
        rank, progress = self.rank, self.progress
        folder = make_handover_folder(rank.run, rank.node)
        if lost := progress.undo.lost():
            raise RuntimeError(f"{', '.join(lost)} changed for the first time in the failed step")
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if self._stream is not None:
                torch.cuda.set_device(rank.device)  # the current device is per thread
                progress.wait(self._stream)
            about = {
                "attempt": rank.attempt.number,
                "step": progress.step,
                "layout": self.layout,
                "states": [list(state) for state in self._states()],
                "places": [place_of(tensor) for tensor in self._tensors()],
                "own": {
                    "rng": packed(progress.undo.rng),
                    "buffers": {name: value.cpu() for name, value in progress.undo.buffers().items()},
                    "not_persistent": not_persistent(self.checkpoints.model),
                    "extra": progress.undo.extra,
                    **({} if progress.undo.task_state is None else {"task": progress.undo.task_state}),
                },
                "scaler": self.checkpoints.scaler.state(),
                "made_with": self.checkpoints.made_with,
                "unrecorded": progress.unrecorded,
                "evaluated": self.checkpoints.evaluated,
            }
            return write_packed(_file(folder, rank.number), self._parts(), about)

    def resume(self) -> Resumed:
        """Load the state from shared memory, else from a checkpoint. Every rank calls this instead of
        Checkpoints.restore; the loop must call `progress.begin` afterwards.

        A handover is used if every rank has one of the same step and layout, newer than every checkpoint.
        """
        # A GPU run compares on the CPU, too. A thread of gloo may free the tensors later.
        with self.progress.budget.host_side():
            previous = self._previous_state()
            newest = self.checkpoints.newest()
            offers = self.rank.all_values(None if previous is None else previous.offer)
            dist.barrier()  # every rank has opened its files, so they can be unlinked
        if self.rank.local == 0:
            remove_handover(self.rank.run, self.rank.node)
        skipped = why_not(offers, newest)
        with self._memory_of_states():
            if skipped is None:
                assert previous is not None
                return self._take(previous)
            step = self.checkpoints.restore()
        return Resumed(
            step,
            "checkpoint" if step else None,
            self.checkpoints.resumed_from.get("unrecorded"),
            skipped if any(offers) else None,
        )

    def _memory_of_states(self) -> AbstractContextManager[object]:
        """Return the context in which a memory budget counts optimizer states as in a normal step."""
        return self.progress.budget.host_side() if self.rank.recipe.offload == "cpu" else nullcontext()

    def _previous_state(self) -> PreviousState | None:
        folder = handover_folder(self.rank.run, self.rank.node)
        own = read_packed(_file(folder, self.rank.number))
        if own is None:
            return None
        differ = [name for name in self.layout if own.about["layout"].get(name) != self.layout[name]]
        number, ranks = self.rank.number, self._stage_ranks_here
        numbers = {ranks[0], self._replica_ranks_here[0], number}  # the first ranks have written the copies
        if reshards := bool(differ) and self._reshards(differ):
            numbers = {*ranks}
        # This rank's own file is already open.
        files = [own if each == number else read_packed(_file(folder, each)) for each in sorted(numbers)]
        opened = [file for file in files if file is not None]
        if len(opened) < len(files):
            return None
        if any(file.about[name] != own.about[name] for file in opened for name in ("attempt", "step")):
            return PreviousState(own, [], differ)
        parts = parts_of([(file.about["places"], file.tensors) for file in opened])
        if reshards:
            parameters = zip(self._parameters, parts[: len(self._parameters)], strict=True)
            if all(part.complete for part in parts) and all(part.fits(p) for p, part in parameters):
                differ = []
        return PreviousState(own, parts, differ)

    def _reshards(self, differ: list[str]) -> bool:
        """Return whether resharding can handle these differences. The scales of 8-bit states cannot be
        resharded: they belong to the blocks of each shard."""
        return {*differ} <= {"sharding", "tensor", "shapes"} and not OPTIMIZERS[
            self.rank.recipe.optimizer
        ].eight_bit

    @torch.no_grad()
    def _take(self, previous: PreviousState) -> Resumed:
        """Copy the state into the existing tensors: optimizer states stay on their device."""
        make_states(self.optimizer)
        own, tensors = previous.own, iter(previous.tensors)
        for p in self._parameters:
            next(tensors).copy_into(p)
        for p, names in zip(self._trained(), own.about["states"], strict=True):
            if not names:  # the parameter never had a gradient
                self.optimizer.state.pop(p, None)
            for name in names:
                next(tensors).copy_into(self.optimizer.state[p][name])
        # This renews the copies of parameters that some optimizers work on.
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.checkpoints.scaler.restore(own.about["scaler"])
        self.checkpoints.resumed_from = own.about["made_with"]
        self.checkpoints.evaluated = own.about.get("evaluated", self.checkpoints.evaluated)
        self.checkpoints.rank_state.load(own.about["own"], rng=True)
        return Resumed(own.about["step"], "shared-memory", own.about["unrecorded"])

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._parameters, *(value for state in self._states() for value in state.values())]

    def _parts(self) -> list[torch.Tensor]:
        """Return this rank's parts. Parameters without gradient are as of the end of the last step."""
        undo = self.progress.undo
        return [
            local(undo.kept(tensor).detach()) if self._writes(tensor) else local(tensor.detach()).new_empty(0)
            for tensor in self._tensors()
        ]

    def _writes(self, tensor: torch.Tensor) -> bool:
        """Return whether this rank writes its part of a tensor. Copies are equal bit for bit, so only the
        first rank of the stage on this node that has a copy writes it."""
        if not isinstance(tensor, DTensor):
            return self.rank.number == self._stage_ranks_here[0]
        return (
            tensor.device_mesh.mesh_dim_names != (TENSOR,) or self.rank.number == self._replica_ranks_here[0]
        )

    @property
    def _stage_ranks_here(self) -> range:
        """The ranks on this node with the same stage of the model."""
        return self.rank.here(self.rank.stage_ranks)

    @property
    def _replica_ranks_here(self) -> range:
        """The ranks of `_stage_ranks_here` with the same place in their tensor-parallel group."""
        ranks, tensor = self._stage_ranks_here, self.rank.mesh.tensor
        return ranks[(self.rank.number - ranks[0]) % tensor :: tensor]

    def _states(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the states of each trained parameter. `state_dict()` is avoided: it may have side effects."""
        for p in self._trained():
            yield self.optimizer.state.get(p, {})

    def _trained(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]


def layout_of(rank: Rank, model: nn.Module) -> Layout:
    """Return the settings that determine the bytes of each rank's file. Left out are offload and what is
    gathered at a time: they change neither shards nor states."""
    recipe = rank.recipe
    return {
        "ranks": [rank.world, rank.per_node],
        "tensor": recipe.tensor,
        "stages": [rank.mesh.pipeline, recipe.virtual_stages, recipe.stages],
        "sharding": "fsdp" if recipe.sharding.startswith("fsdp") else recipe.sharding,
        "optimizer": saved_as(recipe.optimizer),
        "precision": recipe.precision,
        "shapes": [(str(p.dtype), *local(p).shape) for p in model.parameters()],
    }


def why_not(offers: list[dict[str, Any] | None], newest: int) -> str | None:
    """Return why the handover cannot be used, or None if all ranks can continue from shared memory."""
    present = [offer for offer in offers if offer is not None]
    missing = [str(number) for number, offer in enumerate(offers) if offer is None]
    if missing:
        return f"rank {', '.join(missing)} has no state of the previous attempt in shared memory"
    differ = sorted({name for offer in present for name in offer["differ"]})
    if differ:
        return f"the state has another layout: other {', '.join(differ)}"
    if len({(offer["attempt"], offer["step"]) for offer in present}) > 1:
        return "the ranks' states in shared memory are of different steps"
    if present[0]["step"] <= newest:
        return f"the checkpoint of step {newest} is as new"
    return None


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"
