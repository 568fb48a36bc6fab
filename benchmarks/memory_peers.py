"""What other tools say of the cases of benchmarks/memory.py: each answers in bytes, or that it cannot.

None is asked beyond what it claims: accelerate and DeepSpeed know Adam, one device or ZeRO. They get the same
parameters; the trackers of torch the same model, recomputation and sharding, on fake tensors.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from launcher.spec.job import Job
from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.forward import loss_of
from launcher.train.mesh import meshes
from launcher.train.model import arranged, new_model
from launcher.train.optimizers.build import build_optimizer
from launcher.train.rank import Rank
from launcher.train.sharding.sharding import accumulate
from launcher.train.task import Task, load_task
from tests.train.runs import one_rank, prepare

DEEPSPEED = "0.19.8"
Peer = Callable[[Job, Recipe, int], int]


class CannotError(NotImplementedError):
    """Why the tool has no answer."""


def accelerate(job: Job, recipe: Recipe, ranks: int) -> int:
    """The arithmetic of `accelerate estimate-memory`, whose command wants the name of a model on the hub."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils.modeling import calculate_maximum_sizes

    _refuse(recipe, sharding=("none", "ddp"), precision=("fp32", "bf16-mixed"), optimizer=("adamw",))
    total, _ = calculate_maximum_sizes(_on_meta(job))
    stages = estimate_training_usage(total, "float32" if recipe.precision == "fp32" else "bfloat16")
    return max(stages.values())


def deepspeed(job: Job, recipe: Recipe, ranks: int) -> int:
    """Its estimator for ZeRO-3, which is fsdp here."""
    _refuse(recipe, sharding=("fsdp",), precision=("bf16-mixed",), optimizer=("adamw",))
    estimate = _deepspeeds("stage3.py", "estimate_zero3_model_states_mem_needs")
    model = _on_meta(job)
    # The largest layer as its model_to_params() takes it: of any module's own parameters.
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    _, on_gpu, _ = estimate(
        total_params=sum(p.numel() for p in model.parameters()),
        largest_layer_params=largest,
        num_gpus_per_node=ranks,
        cpu_offload=False,
        cpu_offload_params=False,
    )
    return int(on_gpu)


@cache
def _deepspeeds(file: str, function: str) -> Callable[..., Any]:
    """One function of its source distribution, which is fetched and not installed: it is one sum."""
    folder = _scratch()
    wanted = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", f"deepspeed=={DEEPSPEED}"]
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), *wanted]
    subprocess.run(command, capture_output=True, check=True)
    with tarfile.open(folder / f"deepspeed-{DEEPSPEED}.tar.gz") as archive:
        text = archive.extractfile(f"deepspeed-{DEEPSPEED}/deepspeed/runtime/zero/{file}")
        assert text is not None
        tree = ast.parse(text.read())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(found, []), file, "exec"), names)
    return names[function]


def torch_tracker(job: Job, recipe: Recipe, ranks: int) -> int:
    """torch's FSDPMemTracker, for other shardings its MemTracker, over two steps and an evaluation."""
    if recipe.offload != "none":
        raise CannotError("offload: host and device are one on fake CPU tensors")
    task = load_task(job.task or "", job.args, job.workdir)
    task.loss_chunks = recipe.loss_chunks
    batch = task.collate([task.data("train")[0]] * recipe.micro_batch_size)
    try:
        return _tracked(task, one_rank(prepare(_scratch(), job), job=job, recipe=recipe, world=ranks), batch)
    except Exception as error:
        raise CannotError(f"{type(error).__name__}: {str(error).splitlines()[0][:80]}") from error


def _tracked(task: Task, rank: Rank, batch: Any) -> int:
    recipe = rank.recipe
    with _pretended(rank.world):
        mesh = meshes(rank)
        model, fake = _whole(task, recipe), FakeTensorMode()
        _forget_values(model, fake)
        with fake:
            model = arranged(model, task, rank, Unlimited(), mesh)
            optimizer = build_optimizer(model, rank, Unlimited())
            arrived = tree_map_only(torch.Tensor, fake.from_tensor, batch)
            if recipe.sharding in SHARDED:
                tracker = FSDPMemTracker(model, optimizer)
                tracker.track_inputs((arrived,))
            else:
                tracker = MemTracker()
                tracker.track_external(model, optimizer, *_tensors(arrived))
            with tracker:
                for _ in range(2):
                    _step(task, model, optimizer, rank, arrived, tracker)
                model.eval()
                with torch.no_grad():
                    loss_of(task, model, arrived, rank)
            return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _whole(task: Task, recipe: Recipe) -> nn.Module:
    model = new_model(task, recipe)
    if any(p.is_meta for p in model.parameters()):
        task.initialise(model.to_empty(device="cpu"), 0)
    return model


def _forget_values(model: nn.Module, fake: FakeTensorMode) -> None:
    """Tied parameters stay one."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(fake.from_tensor(parameter.data), parameter.requires_grad)
            module._parameters[name] = made[parameter]
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = fake.from_tensor(buffer)


def _step(task: Task, model: nn.Module, optimizer: Any, rank: Rank, batch: Any, tracker: MemTracker) -> None:
    for number in range(rank.recipe.grad_accum):
        with accumulate(model, rank.recipe, last=number == rank.recipe.grad_accum - 1):
            loss, _ = loss_of(task, model, batch, rank)
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
        tracker.reset_mod_stats()  # it refuses a second forward pass otherwise
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def _pretended(world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


PEERS: dict[str, Peer] = {"accelerate": accelerate, "deepspeed": deepspeed, "torch tracker": torch_tracker}


def _refuse(recipe: Recipe, **claimed: tuple[str, ...]) -> None:
    for field, values in claimed.items():
        value = getattr(recipe, field)
        if value not in values:
            raise CannotError(f"{field}: {value}")
    if recipe.offload != "none":
        raise CannotError(f"offload: {recipe.offload}")


def _on_meta(job: Job) -> nn.Module:
    with torch.device("meta"):
        return load_task(job.task or "", job.args, job.workdir).model()


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


@cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp())
