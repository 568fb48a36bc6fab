"""Saving and restoring one model, its optimizer, its loss scale, and the state of each rank.

Tensors are written with torch.distributed.checkpoint (DCP), so another world size or sharding can read them.
"""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable, Container
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from launcher.rundir.find import remove_partial_checkpoints
from launcher.rundir.made_with import made_with, why_not_from
from launcher.spec.events import CheckpointSaved
from launcher.spec.mesh import Mesh
from launcher.train.adapters.frozen import MARK, fingerprint
from launcher.train.checkpoints.disk_space import NoSpaceError, is_full
from launcher.train.checkpoints.folder import (
    CHANGED_BUFFERS,
    CHECKSUMS,
    LABEL,
    RESHAPED,
    CheckpointError,
    NotSavedError,
    OtherShardsError,
    OtherTrainingError,
    PartsError,
    RefusedError,
    check_label,
    check_markers,
    complete_checkpoints,
    directory,
    partial_path,
    read_marker,
    unreadable,
)
from launcher.train.checkpoints.parts_per_node import (
    NodePlanner,
    NodeWriter,
    PartsReader,
    discard,
    newest_on_all_nodes,
    set_aside,
)
from launcher.train.checkpoints.rank_state import RankState, rank_file_name
from launcher.train.checkpoints.reader import CheckpointPlanner, CheckpointReader, check_sums, read_metadata
from launcher.train.checkpoints.same_model import model_difference, with_states
from launcher.train.checkpoints.writer import Writer
from launcher.train.ddp import without_ddp
from launcher.train.issued_collectives import BACKGROUND_GROUP
from launcher.train.optimizers.quantization_blocks import other_shards
from launcher.train.optimizers.state import make_states
from launcher.train.rank import Rank
from launcher.train.rng import seed_all
from launcher.train.scaler import LossScaler
from launcher.train.seeds import derive_seed
from launcher.train.task import Task

# One rank may finish its part long before the slowest one.
UPLOAD_TIMEOUT = timedelta(hours=2)
TRIES, PAUSE_SECONDS = 3, 5.0
"Number of tries of the last save, and the pause between them."


@dataclass(frozen=True)
class Saved:
    """The outcome of one save, the same on every rank."""

    step: int
    path: Path
    problem: str | None
    "Why the checkpoint was not written; None if it is complete."


class Checkpoints:
    """The checkpoints of a run. `save` and `finished` return the same on all ranks. They do not raise if the
    disk is full or not writable."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        rank: Rank,
        samples: int | None = None,
        task: Task | None = None,
    ) -> None:
        """`samples` is the number in the training data. Raises TaskError if the task's state cannot be
        saved."""
        # torch would add DDP's prefix to only one of the names of a module that has several.
        self.model, self.optimizer, self.scaler, self.rank = without_ddp(model), optimizer, scaler, rank
        self.folder = rank.run.checkpoints
        self.saved = 0
        "The step of the newest checkpoint that this attempt has read or completed."
        self.evaluated: tuple[int, float | None] = (0, None)
        "The last step, and its held-out loss if it was evaluated."
        self.made_with = made_with(rank.job, rank.recipe, samples)
        self.resumed_from: dict[str, Any] = {}
        "The marker of the checkpoint that this attempt starts from, or `made_with` of the handover."
        in_background = rank.job.train.async_checkpoints
        self._in_background = rank.device.type == "cuda" if in_background is None else in_background
        self._no_space = False
        "Whether a save of this attempt found no space."
        self._upload: tuple[int, Future[Any]] | None = None
        self._group: dist.ProcessGroup | None = None
        self._background = ThreadPoolExecutor(1)
        "Runs the steps after a save in the background."
        self._stager: DefaultStager | None = None
        self.rank_state = RankState(model, rank.device, task)
        if task is not None and rank.job.adapter is not None:
            self.made_with[MARK] = fingerprint(self.model, task, rank)

    def save(self, step: int) -> Saved | None:
        """Save a checkpoint. Every rank calls this while no save is in progress. None means that the save
        continues in the background: call `finished` for its outcome."""
        if not self._in_background:
            return self._save_now(step)
        self._stager = self._stager or _stager(self.rank.device)
        state, writer = self._state_to_save(), self._writer(step)
        upload = async_save(
            state,
            storage_writer=writer,
            planner=self._planner(),
            process_group=self._own_group(),
            async_stager=self._stager,
        )
        # The stager has copied everything before it returns, so training may continue.
        self._upload = (
            step,
            self._background.submit(self._published, cast("Future[Any]", upload).result, writer),
        )
        return None

    def finished(self, *, wait: bool = False) -> Saved | None:
        """Return the outcome of the background save, once. None if there is none or, without `wait`, if it is
        still in progress."""
        if self._upload is None or not (wait or self._upload[1].done()):
            return None
        step, upload = self._upload
        self._upload = None
        try:
            problem = upload.result()
        except CheckpointException as error:
            return self._failed(step, error)
        return self._ended(step, problem)

    def complete(self, seconds: float, say: Callable[[str], object]) -> Saved | None:
        """Wait up to `seconds` for the background save before the process ends, and `say` so. Return None if
        there is no save, or if it failed or did not end in time. Any thread may call this."""
        if self._upload is None:
            return None
        step, upload = self._upload
        if not upload.done():
            say(
                f"waiting up to {seconds:.0f} s for the checkpoint of step {step}, which is still being "
                "written"
            )
            futures.wait([upload], timeout=seconds)
        if not upload.done() or upload.exception() is not None or upload.result() is not None:
            return None
        return Saved(step, directory(self.folder, step), None)

    def save_last(self, step: int) -> Saved:
        """Save the last checkpoint, with retries. Raises NotSavedError on every rank."""
        for left in reversed(range(TRIES)):
            outcome = self._save_now(step)
            if outcome.problem is None:
                # Ranks may exit at once after a stop, so all must first know that the checkpoint is complete.
                dist.barrier(self._own_group())
                return outcome
            if left:
                self.rank.say(f"{outcome.problem}. Retrying in {PAUSE_SECONDS:.0f} s")
                time.sleep(PAUSE_SECONDS)
        raise NotSavedError(outcome.problem)

    def restore(self) -> int:
        """Load the newest complete checkpoint. Return its step, or 0 if there is none.

        Raises: CheckpointError.
        """
        step = self.newest()
        check_markers(self.folder, step)
        if step == 0:
            return 0
        path = directory(self.folder, step)
        self.resumed_from = self._made_with(path)
        make_states(self.optimizer)
        state, saved = self._state(), read_metadata(path)
        reshaped = self.resumed_from.get(RESHAPED, {})
        one_stage = self.rank.mesh.pipeline == 1
        if problem := model_difference(state["model"], saved, whole=one_stage, reshaped=reshaped):
            raise OtherTrainingError(
                f"{path.name} cannot be resumed from: {problem}. Resume with the model that was trained, or "
                "start a new run"
            )
        if problem := other_shards(state["optimizer"]["state"], saved):
            raise OtherShardsError(f"{path.name} cannot be resumed from: {problem}")
        groups, states = state["optimizer"].pop("param_groups"), state["optimizer"]["state"]
        saved_names = with_states(saved)
        without_gradient = {name: states.pop(name) for name in [*states] if name not in saved_names}
        # DCP reads into tensors of the saved shape. These come from the rank's own file, as all buffers do.
        other_shapes = {name: state["model"].pop(name) for name in reshaped if name in state["model"]}
        try:
            load(state, storage_reader=self._reader(path), planner=CheckpointPlanner())
        except CheckpointException as error:
            causes = {type(cause) for cause, _ in error.failures.values()}
            cause = _first_cause(error)
            for told in (PartsError, RefusedError):  # they say what to do
                if told in causes:
                    raise told(f"{path.name} could not be read: {cause}") from error
            raise CheckpointError(unreadable(path, cause)) from error
        states |= without_gradient
        state["model"] |= other_shapes
        state["optimizer"]["param_groups"] = groups  # the job's settings, with the names that this rank has
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._options,
        )
        self._forget_states(without_gradient, groups)
        self.scaler.restore(self.resumed_from.get("scaler"))
        self._restore_own(path, step)
        self.saved = step
        return step

    def _forget_states(self, names: Container[str], groups: list[dict[str, Any]]) -> None:
        """Drop the states of parameters that never had a gradient; the optimizer creates them later.
        `groups` are the optimizer's groups with names in place of parameters."""
        for group, named in zip(self.optimizer.param_groups, groups, strict=True):
            for p, name in zip(group["params"], named["params"], strict=True):
                if name in names:
                    self.optimizer.state.pop(p, None)

    def _made_with(self, path: Path) -> dict[str, Any]:
        marker = read_marker(path)
        reason = why_not_from(marker, self.rank.job, self.rank.recipe, self.made_with.get("samples"))
        frozen = self.made_with.get(MARK)
        if reason is None and marker.get(MARK, frozen) != frozen:
            reason = "its adapter was trained over other frozen weights than the task's model has now"
        if reason is not None:
            raise OtherTrainingError(f"{path.name} cannot be resumed from: {reason}")
        return marker

    def _own_group(self) -> dist.ProcessGroup:
        """Return the group for checkpoints. It is separate because a thread's collectives must not mix with
        those of the training, and because a slow disk needs a longer timeout."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=UPLOAD_TIMEOUT, group_desc=BACKGROUND_GROUP)
        return self._group

    def _save_now(self, step: int) -> Saved:
        try:
            state, writer = self._state_to_save(), self._writer(step)
            saving = partial(
                save,
                state,
                storage_writer=writer,
                planner=self._planner(),
                process_group=self._own_group(),
            )
            problem = self._published(saving, writer)
        except CheckpointException as error:
            return self._failed(step, error)
        return self._ended(step, problem)

    def _published(self, saved: Callable[[], Metadata], writer: Writer) -> str | None:
        """Wait for the save and publish it. Return why that failed, or None; the same on every rank.

        Raises: CheckpointException.
        """
        metadata = saved()
        if not isinstance(writer, NodeWriter):
            return None  # rank 0 has published it in DCP's last step
        problem = None
        if self.rank.leads:
            try:
                writer.publish(metadata)
            except OSError as error:
                problem = f"{self.rank.host(self.rank.node)}: {error}"
        problem = next(filter(None, self.rank.all_values(problem, self._own_group())), None)
        if self.rank.leads and problem is None:
            writer.clean()
        elif self.rank.leads:
            discard(writer.final)
        return problem

    def _ended(self, step: int, problem: str | None) -> Saved:
        if problem is not None:
            problem = f"checkpoint of step {step} could not be written: {problem}"
        else:
            self.saved = step
        return Saved(step, directory(self.folder, step), problem)

    def _failed(self, step: int, error: CheckpointException) -> Saved:
        """Remove the partial checkpoint. When DCP raises `error`, every rank has stopped writing."""
        final = directory(self.folder, step)
        problem = f"checkpoint of step {step} could not be written: {_first_cause(error)}"
        self._no_space = self._no_space or any(is_full(cause) for cause, _ in error.failures.values())
        if self.rank.leads:
            shutil.rmtree(partial_path(final), ignore_errors=True)
        return Saved(step, final, problem)

    def _writer(self, step: int) -> Writer:
        marker = {
            "step": step,
            "world": self.rank.world,
            "mesh": [*self.rank.mesh],
            "torch": str(torch.__version__),
            LABEL: f"{self.rank.run.id} attempt {self.rank.attempt.number} step {step}",
            CHECKSUMS: torch.serialization.get_crc32_options(),
            "scaler": self.scaler.state(),
            **self.made_with,
        }
        if self.rank.job.adapter is not None:
            changed = self.rank.all_values(self.rank_state.changed(), self._own_group())
            marker[CHANGED_BUFFERS] = sorted(set().union(*changed))
        reshaped = self.rank.all_values(self.rank_state.reshaped(), self._own_group())
        if any(reshaped):
            marker[RESHAPED] = {name: shape for shapes in reshaped for name, shape in shapes.items()}
        at, held_out = self.evaluated
        if self.rank.job.train.keep_best and at == step and held_out is not None and isfinite(held_out):
            marker["eval_loss"] = held_out
        make_writer: Callable[..., Writer] = Writer
        if self.rank.no_shared_folder:
            host = self.rank.host(self.rank.node)
            make_writer = partial(NodeWriter, node=self.rank.node, per_node=self.rank.per_node, host=host)
        return make_writer(
            directory(self.folder, step),
            rank_file_name(self.rank.number),
            self.rank_state.pack(),
            marker,
            keep=self.rank.job.train.keep_checkpoints,
            scarce=self._no_space,
            first=self.rank.leads,
        )

    def _planner(self) -> NodePlanner | None:
        """Return the planner; None means DCP's default."""
        return NodePlanner(self.rank.per_node) if self.rank.no_shared_folder else None

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether a checkpoint holds the parameter. Frozen parameters under an adapter are left out,
        because the task makes them again when the run is resumed."""
        return parameter.requires_grad or self.rank.job.adapter is None

    @property
    def _options(self) -> StateDictOptions | None:
        if self.rank.job.adapter is None:
            return None
        return StateDictOptions(ignore_frozen_params=True, strict=False)

    def _state(self) -> dict[str, Any]:
        if not self.optimizer.state:  # torch would create the states with a real optimizer step
            make_states(self.optimizer)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._options)
        # torch leaves out a frozen parameter under one name only; a tied parameter has several.
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not self.holds(parameter):
                model.pop(name, None)
        return {"model": model, "optimizer": optimizer}

    def _state_to_save(self) -> dict[str, Any]:
        """Return the state that this rank saves. DCP takes a replica from any rank, but buffers are
        not replicas: only the first rank of each stage saves its own, in each folder."""
        state, ranks = self._state(), self.rank.stage_ranks
        first = (self.rank.here(ranks) if self.rank.no_shared_folder else ranks)[0]
        return (
            state if self.rank.number == first else {**state, "model": self.rank_state.shared(state["model"])}
        )

    def newest(self) -> int:
        """Return the step of the newest complete checkpoint, or 0.

        Rank 0 decides for all: on a network file system ranks may see different directories.
        """
        if self.rank.no_shared_folder:
            return self._newest_on_all()
        choice = [0]
        if self.rank.first:
            choice = [max(complete_checkpoints(self.folder), default=0)]
            remove_partial_checkpoints(self.rank.run)
        dist.broadcast_object_list(choice, src=0)
        return choice[0]

    def _newest_on_all(self) -> int:
        """Return `newest` if each node has its own folder. Raises PartsError if a node has lost its part."""
        rank, complete_here, recorded = self.rank, None, set[int]()
        if rank.leads:
            complete = complete_checkpoints(self.folder)
            complete_here = {step: str(read_marker(path).get("save")) for step, path in complete.items()}
            remove_partial_checkpoints(rank.run)
        if rank.first:
            recorded = {event.step for event in rank.run.read_events() if isinstance(event, CheckpointSaved)}
        answers = rank.all_values((rank.node, complete_here, recorded))
        by_node = {node: steps for node, steps, _ in answers if steps is not None}
        newest = newest_on_all_nodes(list(by_node.values()))
        lost = [
            step
            for step in answers[0][2]
            if step > newest and any(step in steps for steps in by_node.values())
        ]
        if lost:
            without = ", ".join(rank.host(node) for node, steps in by_node.items() if max(lost) not in steps)
            final = directory(self.folder, max(lost))
            raise PartsError(
                f"{final.name} was complete, but {without or 'a host'} has lost its part: restore {final} "
                f"there, or delete it on the other hosts to resume from step {newest}"
            )
        if rank.leads:
            set_aside(self.folder, newest)
        return newest

    def _reader(self, path: Path) -> CheckpointReader:
        rank = self.rank
        if not rank.no_shared_folder:
            return CheckpointReader(path)
        own = [rank_file_name(number) for number in self._own_files(read_marker(path))]
        return PartsReader(path, rank.host(rank.node), own, rank.hosts)

    def _same_mesh(self, marker: dict[str, Any]) -> bool:
        return _mesh_of(marker) == self.rank.mesh

    def _own_files(self, marker: dict[str, Any]) -> list[int]:
        """Return the ranks of the checkpoint whose own state this rank takes: after a change of the mesh, the
        first rank of each stage."""
        if self._same_mesh(marker):
            return [self.rank.number]
        before = _mesh_of(marker)
        return [stage * before.data * before.tensor for stage in range(before.pipeline)]

    def _restore_own(self, path: Path, step: int) -> None:
        """Restore this rank's own state. After a change of the mesh, take the buffers of the first rank of
        each stage, and seed new random numbers, the same in every attempt."""
        rank, same = self.rank, self._same_mesh(self.resumed_from)
        for file in (path / rank_file_name(number) for number in self._own_files(self.resumed_from)):
            try:
                if self.resumed_from.get(CHECKSUMS):
                    check_sums(file, "the rank's own state")
                check_label(file)
                self.rank_state.restore(file, rng=same)
            except pickle.UnpicklingError as error:
                raise RefusedError(f"{file} contains objects that no checkpoint needs: {error}") from None
            except (OSError, RuntimeError) as error:
                raise CheckpointError(unreadable(path, error)) from error
        if not same:
            one_stage = _mesh_of(self.resumed_from).pipeline == 1
            whose = "the old rank 0" if one_stage else "the first rank of each old stage"
            rank.say(
                "the number of ranks or their mesh changed: dropout draws from a new stream, "
                f"and buffers (such as BatchNorm's statistics) and state() of the task are those of {whose}"
            )
            number = rank.number // rank.mesh.tensor  # a tensor-parallel group draws the same numbers
            seed_all(derive_seed("resumed", rank.job.train.seed, step, number))


def _mesh_of(marker: dict[str, Any]) -> Mesh:
    return Mesh(*marker.get("mesh", (1, marker.get("world"), 1)))


def _stager(device: torch.device) -> DefaultStager:
    """Return a stager that copies into host memory and reuses it: pinning takes longer than copying."""
    gpu = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=gpu,
        )
    )


def _first_cause(error: CheckpointException) -> str:
    """Return the failure of the first rank that DCP reports."""
    if not error.failures:
        return f"{type(error).__name__}: {error}"
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, (NoSpaceError, PartsError, RefusedError)):
        return str(cause)
    return f"rank {rank}: {type(cause).__name__}: {cause}"
