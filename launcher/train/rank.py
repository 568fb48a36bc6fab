"""This rank: its environment, its recipe, its device and the process group."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from launcher.rundir.layout import AttemptDir, RunDir
from launcher.spec import variables
from launcher.spec.errors import RefusedError
from launcher.spec.fire_drill import counts_allocations
from launcher.spec.job import Job
from launcher.spec.mesh import Mesh, mesh_of
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting

CONNECT_SECONDS = 30.0
"Time in which the first rank is expected to serve the store. After that, torch waits with longer pauses."


class SetupError(RefusedError):
    """The environment, the run directory or the recipe is unusable."""


class RendezvousError(Exception):
    """The ranks could not connect to each other."""


@dataclass(frozen=True)
class Place:
    """The directories and number of a rank; available before anything else can fail."""

    run: RunDir
    attempt: AttemptDir
    number: int
    "The RANK variable: 0 to world - 1 over all nodes."
    node: int


@dataclass(frozen=True)
class Rank(Place):
    """One process of one attempt."""

    job: Job
    recipe: Recipe
    workdir: str
    local: int
    world: int
    per_node: int
    "Ranks that were started on this node; the same number on every node."
    device: torch.device
    stop_file: Path
    no_shared_folder: bool = False
    "Each node has its own run directory and its part of each checkpoint."
    hosts: tuple[str, ...] = ()
    "Names of the nodes, if known."

    @property
    def leads(self) -> bool:
        """True for the rank that writes to disk on behalf of all ranks that share its run directory."""
        return self.local == 0 if self.no_shared_folder else self.first

    def host(self, node: int) -> str:
        return self.hosts[node] if node < len(self.hosts) else f"node {node}"

    @property
    def first(self) -> bool:
        return self.number == 0

    @cached_property
    def mesh(self) -> Mesh:
        return mesh_of(self.recipe, self.world)

    @cached_property
    def coordinates(self) -> Mesh:
        """This rank's place in the mesh."""
        return self.mesh.coordinates(self.number)

    @property
    def stage_ranks(self) -> range:
        """Numbers of the ranks with the same stage."""
        size = self.world // self.mesh.pipeline
        first = self.coordinates.pipeline * size
        return range(first, first + size)

    def here(self, numbers: range) -> range:
        """Return the part of a range of rank numbers that is on this node."""
        first = self.number - self.local
        return range(max(first, numbers.start), min(first + self.per_node, numbers.stop))

    def setting(self, *, batch_norm: bool, couples_samples: bool = False) -> Setting:
        gpus_per_node = self.per_node if self.device.type == "cuda" else 0
        return Setting(
            self.world,
            self.world // self.per_node,
            gpus_per_node,
            batch_norm,
            couples_samples,
            nvme_dir=self.job.train.nvme_dir is not None,
            entrypoint=True,
            micro_batch_fixed=self.job.recipe.micro_batch_size is not None,
            lower_micro_batch=self.job.retries.lower_micro_batch,
            adapter=self.job.adapter is not None,
            clips=self.job.train.clip_norm is not None,
            counts_allocations=counts_allocations(self.job.env, gpus_per_node),
        )

    def say(self, text: str) -> None:
        """Print a line on rank 0; do nothing on other ranks."""
        if self.first:
            print(text, flush=True)

    def stop_requested(self) -> bool:
        """Return True on rank 0 if the stop file exists, False on all other ranks.

        The other ranks learn it from the step's sums, so that not every rank reads the shared file system.
        """
        return self.first and os.access(self.stop_file, os.F_OK)

    def once(self, *values: torch.Tensor | float) -> tuple[torch.Tensor | float, ...]:
        """Return the values on one of the ranks that compute the same, and zeros on the others, so that
        `add_up` counts each sample once. A loss comes only from the last stage, a metric from any stage."""
        return values if self.coordinates.tensor == 0 else (0.0,) * len(values)

    def difference_in_group(self, loss: torch.Tensor | float) -> torch.Tensor | float:
        """Return a number that `add_up` sums to zero if the ranks of a tensor-parallel group have equal
        losses."""
        mesh, own = self.mesh, self.coordinates
        if mesh.tensor == 1 or own.pipeline != mesh.pipeline - 1:
            return 0.0
        return loss * (mesh.tensor - 1 if own.tensor == 0 else -1)

    def difference_in_copy(self, value: float) -> float:
        """Return a number that `add_up` sums to zero if the ranks that share a copy of the model, with all
        its parts and stages, have equal values."""
        mesh, own = self.mesh, self.coordinates
        first = own.tensor == own.pipeline == 0
        return value * (mesh.tensor * mesh.pipeline - 1) if first else -value

    def by_stage(self, value: float) -> tuple[float, ...]:
        """Return a value for each stage, zero for other stages, so that `add_up` returns a sum per stage."""
        own = self.coordinates.pipeline
        return tuple(value if stage == own else 0.0 for stage in range(self.mesh.pipeline))

    def add_up(self, *values: torch.Tensor | float) -> list[float]:
        """Return the sum of each value over all ranks, in fp64, with one collective."""
        if self.world == 1:
            return [float(value.detach() if isinstance(value, torch.Tensor) else value) for value in values]
        numbers = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.device)  # one copy to a GPU for all
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                sums[place] = value.detach()
        dist.all_reduce(sums)
        result: list[float] = sums.tolist()
        return result

    def all_values(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Return the value of each rank of the group, or of the job, in order. Each of these ranks must
        call this. Do not call it in a step: the values are pickled."""
        values: list[Any] = [value] * (self.world if group is None else group.size())
        if len(values) > 1:
            dist.all_gather_object(values, value, group=group)
        return values


def this_place() -> Place:
    """Return this rank's place, read from the environment. Raises SetupError."""
    run_path = os.environ.get(variables.RUN_DIR)
    if not run_path:
        raise SetupError(f"{variables.RUN_DIR} is not set: it must name the run directory")
    run = RunDir(Path(run_path).absolute())
    return Place(
        run=run,
        attempt=run.started(os.environ),
        number=int(os.environ.get("RANK", "0")),
        node=int(os.environ.get(variables.NODE_RANK, os.environ.get("GROUP_RANK", "0"))),
    )


def this_rank(place: Place) -> Rank:
    """Return this rank, read from the run directory and the environment. Raises SetupError."""
    about, recipe = place.run.read_about(), place.run.read_recipe(place.attempt)
    if about.workdir is None:
        raise SetupError(f"{place.run.run} is missing or not readable")
    if not recipe:
        raise SetupError(f"neither {place.attempt.recipe} nor {place.run.plan} contains a recipe")
    job = about.job.validated()
    if job.task is None:
        raise SetupError("the job has a `command:`; this entrypoint runs jobs with a `task:`")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if about.apart and place.number // per_node != place.node:
        raise SetupError(
            f"rank {place.number} is on node {place.node}, but the hosts of this run share no folder and "
            "each has only the files of its own ranks: number the ranks in the order of the nodes, as "
            "scripts/start.sh does"
        )
    return Rank(
        **vars(place),
        job=job,
        recipe=Recipe.model_validate(recipe),
        workdir=about.workdir,
        local=local,
        world=int(os.environ.get("WORLD_SIZE", "1")),
        per_node=per_node,
        device=_device(about.gpus_per_node, local),
        stop_file=Path(os.environ.get(variables.STOP_FILE, str(place.attempt.stop))),
        no_shared_folder=about.apart,
        hosts=tuple(about.hosts or ()),
    )


def _device(gpus: int, local: int) -> torch.device:
    """Return the GPU of this rank, or the CPU if the plan has no GPUs. Raises SetupError."""
    if gpus == 0:
        return torch.device("cpu")
    # Let torch ask NVML: forked workers cannot use CUDA if the CUDA runtime was called before the fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if not torch.cuda.is_available():
        raise SetupError(f"the plan gives each node {gpus} GPU(s), but torch sees no CUDA device on this one")
    if local >= torch.cuda.device_count():
        raise SetupError(
            f"rank {local} of this node has no GPU: only {torch.cuda.device_count()} are visible"
        )
    return torch.device("cuda", local)


def join_ranks(rank: Rank) -> None:
    """Create the process group and wait for the other ranks. Raises RendezvousError.

    The group is never destroyed: that, and its destructors, can wait forever for ranks that have ended (seen
    with gloo and DDP after a successful training). Every attempt has a new store, so plain `env://` is
    enough. torchrun serves it on several nodes, and rank 0 on one host.
    """
    backend = "gloo"
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
        backend = "cpu:gloo,cuda:nccl"
    try:
        if rank.world == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        else:
            if not rank.first:
                _wait_for_store()
            timeout = timedelta(seconds=rank.job.train.collective_timeout)
            dist.init_process_group(backend, timeout=timeout)
            dist.barrier()
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(f"{rank.world} ranks could not connect to each other: {error}") from error


def _wait_for_store() -> None:
    """Return once the store accepts connections, or after CONNECT_SECONDS.

    If torch tries to connect 0.05 s too early, it connects 0.4 s later; if 0.7 s too early, 1.4 s later
    (torch 2.13).
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + CONNECT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=CONNECT_SECONDS):
            return
        time.sleep(0.005)
