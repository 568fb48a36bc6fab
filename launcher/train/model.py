"""Build the model as the recipe says: its precision, activations, compilation and sharding."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.spec.listed_names import listed
from launcher.spec.recipe import SHARDED, Recipe
from launcher.train.activations.activations import apply_activations
from launcher.train.adapters.adapter import initialise_adapter, initialise_with_adapter, with_adapter
from launcher.train.adapters.nf4 import NF4Linear
from launcher.train.compiling.compiling import Forward, apply_compile
from launcher.train.cpu_memory_budget import Budget
from launcher.train.dtensor_pitfalls import refused_pitfalls
from launcher.train.float8 import to_float8
from launcher.train.local_shards import local
from launcher.train.mesh import Meshes
from launcher.train.on_meta import checked, model_on_meta
from launcher.train.optimizers.build import NONE_TRAINED
from launcher.train.optimizers.offload import copy_gradients_to_host
from launcher.train.outer_units import check_outer_units
from launcher.train.pipeline.cut import cut, is_elsewhere
from launcher.train.pipeline_parts import chunks_of
from launcher.train.precision import cast, rounded_buffers, with_fp32_outputs
from launcher.train.rank import Rank
from launcher.train.replaced_parameters import Originals
from launcher.train.sharding.kept_memory import KeptMemory
from launcher.train.sharding.sharding import shard
from launcher.train.task import Task, TaskError, blocks_of, outer_units_of
from launcher.train.tensor.tensor_parallel_rng import OwnNumbers
from launcher.train.tensor_parallel import add_up_gradients, check_parts, parallelize, styles_of

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def new_model(
    task: Task, recipe: Recipe, *, on_meta: bool = False, say: Callable[[str], None] | None = None
) -> nn.Module:
    """Return the whole model on the CPU; on the meta device if `on_meta` or the task's `built_on_meta`.

    `say` is called with warnings about precision and evaluation mode. Raises TaskError for a model that
    cannot be trained.
    """
    model = model_on_meta(task) if on_meta or task.built_on_meta else checked(task, task.model())
    if say is not None and recipe.precision == "bf16" and (rounded := rounded_buffers(model)):
        say(
            f"precision: bf16 rounds the buffers {listed(rounded)} to three decimal digits. For exact values "
            "keep them as integers, compute them in forward, or use precision: bf16-mixed"
        )
    if (in_evaluation := _put_in_training(model)) and say is not None:
        say(
            f"{listed(in_evaluation)} of the model came in evaluation mode and is now in training mode, in "
            """which dropout draws and BatchNorm's statistics change. To keep it in evaluation mode, override
            its """
            "train()"
        )
    if not on_meta and type(task).initialise is Task.initialise:
        _check_values(model, task)
    kept = KeptMemory(model, task)
    model = cast(model, recipe)
    if task.adapter is not None:
        model = with_adapter(model, task, recipe)
    kept.check(model)
    _check_trained(model)
    if say is not None and recipe.precision != "bf16" and (in_bf16 := _in_bf16(model)):
        say(
            f"{listed(in_bf16)} of the model is in bf16, and is trained in it with precision: "
            f"{recipe.precision}, too: small updates are lost. Let model() return fp32, or set "
            "precision: bf16"
        )
    return with_fp32_outputs(model, recipe)


def _check_values(model: nn.Module, task: Task) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise TaskError(
            f"model() of {type(task).__name__} returned {listed(empty)} on the meta device, without values. "
            "Build the model on the CPU, or set built_on_meta = True and define initialise()"
        )


def _put_in_training(model: nn.Module) -> list[str]:
    """Call `train()` of the model. Return the names of the outermost modules that it changed; none if the
    whole model was in evaluation mode, as `from_pretrained` returns it."""
    before = {name: module for name, module in model.named_modules() if not module.training}
    model.train()
    changed = {name for name, module in before.items() if module.training}
    return [name for name in before if name in changed and name.rpartition(".")[0] not in changed]


def _in_bf16(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.bfloat16]


def _check_trained(model: nn.Module) -> None:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise TaskError(f"the model {NONE_TRAINED}")
    for name, p in trained.items():
        if p.is_complex():
            raise TaskError(
                f"{name} is a complex parameter, which launcher's optimizers do not train: make it a real "
                "one with a last dimension of 2, and call torch.view_as_complex(weight) in forward"
            )
    for name, module in model.named_modules():
        looks_up = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if looks_up and module.sparse and module.weight.requires_grad:
            raise TaskError(
                f"{name} of the model has sparse gradients, which launcher neither clips nor reduces: leave "
                "out sparse=True"
            )
    if half := [name for name, p in trained.items() if p.dtype == torch.float16]:
        raise TaskError(
            f"{listed(half)} of the model would be trained in torch.float16, in which the epsilon of the "
            "optimizer is zero and its steps are too large: let model() return fp32, as model.float() or "
            "from_pretrained(..., dtype=torch.float32) does. The recipe's precision chooses other types"
        )


def arranged(
    model: nn.Module,
    task: Task,
    rank: Rank,
    budget: Budget,
    mesh: Meshes,
    compiled: Callable[[Forward], Forward] | None = None,
) -> nn.Module:
    """Return this rank's part of the model, ready to train.

    `compiled` replaces torch.compile. Raises SetupError.
    """
    recipe, device = rank.recipe, rank.device
    if recipe.precision == "float8":
        to_float8(model, blocks_of(task, model), device, recipe.tensor)
    blocks = blocks_of(task, model)
    outer = outer_units_of(task, model)
    if recipe.sharding in SHARDED:
        check_outer_units(model, blocks, outer)
    originals, kept = Originals(model), KeptMemory(model, task)
    # Cut layers first, so that their hooks belong to what is recomputed and gathered.
    numbers = keep_own_part(model, task, rank, mesh)
    remaining = set(model.modules())
    blocks, outer = ([unit for unit in units if unit in remaining] for units in (blocks, outer))
    # Compiled code draws its random numbers from seeds.
    recomputable = numbers.recomputable if numbers is not None and not recipe.compile else None
    apply_activations(blocks, recipe, device, budget, recomputable)
    apply_compile(blocks, recipe, device, budget, compiled, numbers)
    on_meta = any(p.is_meta for p in model.parameters())
    fill = partial(_initialise, task, device=device, seed=rank.job.train.seed) if on_meta else None
    if task.adapter is not None and not on_meta:
        initialise_adapter(model, rank.job.train.seed)
    # On a CPU that stands in for a GPU, FSDP's shards and their gradients count as host memory.
    on_host = recipe.offload == "cpu" and device.type == "cpu"
    with budget.host_side() if on_host else nullcontext():
        model = shard(model, blocks, outer, rank, fill, mesh).train()
    originals.check(model)
    kept.check(model)
    if mesh.tensor is not None:
        check_parts(model)
        if recipe.sharding not in SHARDED:
            add_up_gradients(model)
    budget.track(list(model.buffers() if on_host else (*model.parameters(), *model.buffers())))
    if on_host:
        copy_gradients_to_host(model, budget)
    return model


def keep_own_part(model: nn.Module, task: Task, rank: Rank, mesh: Meshes) -> OwnNumbers | None:
    """Reduce the model to what this rank computes: its part of each layer, and the blocks of its stage.
    Return the random numbers of ranks that share layers."""
    styles = styles_of(model, task, mesh.tensor.size()) if mesh.tensor is not None else {}
    if rank.recipe.pipeline > 1:
        cut(model, task, rank)
    if mesh.tensor is None:
        return None
    here = {name: style for name, style in styles.items() if not is_elsewhere(model, f"{name}.weight")}
    numbers = parallelize(model, task, here, mesh.tensor)
    for chunk in chunks_of(model):
        chunk.register_forward_hook(numbers.leave_model)
    return numbers


def _initialise(task: Task, model: nn.Module, device: torch.device, seed: int) -> None:
    """Fill the tensors of the model. Raises TaskError for one that the task leaves without a value, and for a
    parameter that it replaces although it is divided."""
    before = dict(model.named_parameters())
    packed = {module.packed for module in model.modules() if isinstance(module, NF4Linear)}  # bytes
    for tensor in (*before.values(), *model.buffers()):
        # What the task forgets would have values from an earlier use of the memory.
        if tensor.is_floating_point():
            local(tensor.detach()).fill_(math.nan)
    with refused_pitfalls():
        if task.adapter is None:
            task.initialise(model, seed)
        else:
            initialise_with_adapter(task, model, device, seed)
    name, now = f"initialise() of {type(task).__name__}", dict(model.named_parameters())
    if replaced := [n for n, p in before.items() if isinstance(p, DTensor) and now.get(n) is not p]:
        raise TaskError(
            f"{name} replaced {listed(replaced)} of the model, of which each rank has a part: fill each "
            "parameter in place, as launcher.train.initialise.draw_normal does"
        )
    tensors = {**now, **dict(model.named_buffers())}
    parts = {n: local(t.detach()) for n, t in tensors.items() if t.dtype in _FLOATS and t not in packed}
    if missing := [n for n, part in parts.items() if part.numel() and part.max().isnan()]:
        raise TaskError(f"{name} did not fill {listed(missing)} of the model")
