"""Recipes that cannot work: each rule has a reason, a source and the nearest valid recipe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.spec.fire_drill import BUDGET, DRILLS
from launcher.spec.mesh import UNCUT, UNSTAGED, data_ranks, in_buckets, model_parallel
from launcher.spec.optimizer_table import OPTIMIZERS, without_eight_bit
from launcher.spec.recipe import RECOMPUTED, REPLICATED, SHARDED, Recipe


@dataclass(frozen=True)
class Setting:
    """What a rule needs to know in addition to the recipe."""

    ranks: int
    nodes: int
    gpus_per_node: int
    "0 if the ranks compute on the CPU."
    batch_norm: bool = False
    couples_samples: bool = False
    "Whether the loss of one sample depends on the other samples of its micro-batch."
    nvme_dir: bool = False
    "Whether the job names a directory for states on NVMe."
    entrypoint: bool = False
    "Whether the built-in entrypoint runs the job (`task:`). It has adapters that a `command:` lacks."
    micro_batch_fixed: bool = False
    "Whether the job fixes `recipe.micro_batch_size`."
    lower_micro_batch: bool | None = None
    "`retries.lower_micro_batch` of the job."
    adapter: bool = False
    "Whether the job trains an adapter."
    clips: bool = False
    "Whether the built-in entrypoint limits the norm of the gradient (`train.clip_norm`)."
    counts_allocations: bool = False
    "Whether each allocation is counted, for a drill or for a memory budget on the CPU."
    shardable: bool = True
    "Whether FSDP can shard the model, as far as that is known."
    every_gradient: bool = True
    "Whether each trained parameter gets a gradient, or DDP searches for those that get none."

    @property
    def keeps_micro_batch(self) -> bool:
        """Whether a smaller micro-batch changes the training. It is then lowered last."""
        return self.batch_norm or self.couples_samples

    @property
    def least_micro_batch(self) -> int:
        return 2 if self.keeps_micro_batch else 1

    @property
    def why_micro_batch_stays(self) -> str | None:
        """Why the micro-batch is never lowered, or None if it may be."""
        if self.lower_micro_batch is False:
            return "retries.lower_micro_batch: false keeps the micro-batch"
        if self.lower_micro_batch is None and self.couples_samples and self.micro_batch_fixed:
            return (
                "the loss couples samples and the job fixes recipe.micro_batch_size, which is lowered only "
                "with retries.lower_micro_batch: true"
            )
        return None


@dataclass(frozen=True)
class Rule:
    name: str
    broken: Callable[[Recipe, Setting], bool]
    reason: str
    source: str
    cure: Callable[[Recipe, Setting], dict[str, Any]]
    "Return the fields to change for the nearest valid recipe. Empty if there is none."


@dataclass(frozen=True)
class Broken:
    rule: Rule
    cure: dict[str, Any]

    def __str__(self) -> str:
        change = ", ".join(f"{name}: {as_yaml(value)}" for name, value in self.cure.items())
        instead = f"; nearest valid: {change}" if change else ""
        return f"{self.rule.reason} [{self.rule.name}; {self.rule.source}]{instead}"


def as_yaml(value: object) -> str:
    """Return a value as a user writes it in a job file."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        value = list(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def changes_line(recipe: Recipe, other: Recipe) -> str:
    """Return what to write into the job file to get `recipe` instead of `other`."""
    return ", ".join(f"{name}: {as_yaml(new)}" for name, (_, new) in recipe.changes_from(other).items())


def _in_backward(condition: Callable[[Recipe, Setting], bool]) -> Callable[[Recipe, Setting], bool]:
    return lambda r, s: r.optimizer_step == "backward" and condition(r, s)


def _splits_backward(r: Recipe) -> bool:
    return r.pipeline > 1 and r.schedule == "zero-bubble"


def _unread_without_pipeline(r: Recipe) -> dict[str, Any]:
    return {name: value for name, value in UNSTAGED.items() if getattr(r, name) != value}


def _has_full_nodes(ranks: int, setting: Setting) -> bool:
    nodes, rest = divmod(ranks * setting.nodes, setting.ranks)
    return nodes > 1 and rest == 0


def _step_after(recipe: Recipe, _: Setting) -> dict[str, Any]:
    return {"optimizer_step": "after"}


def _not_compiled(recipe: Recipe, _: Setting) -> dict[str, Any]:
    if recipe.activations == "budget":
        return {"compile": False, "activations": "checkpoint", "activation_budget": 1.0}
    return {"compile": False}


def _unsharded(recipe: Recipe, setting: Setting) -> dict[str, Any]:
    sharding = "ddp" if data_ranks(recipe, setting.ranks) > 1 else "none"
    return {"sharding": sharding, **({"offload": "cpu-optimizer"} if recipe.offload == "cpu" else {})}


def _two_samples(recipe: Recipe, _: Setting) -> dict[str, Any]:
    accum = recipe.grad_accum
    least = next((size for size in range(2, accum + 1) if accum % size == 0), None)
    return {} if least is None else {"micro_batch_size": least, "grad_accum": accum // least}


RULES = (
    Rule(
        "scaler-needs-fp16",
        lambda r, s: r.grad_scaler and r.precision != "fp16-mixed",
        "a gradient scaler is for fp16; bf16 has the exponent range of fp32, and torch's GradScaler fails "
        "on it on CUDA (\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16')",
        "pytorch#127176; 8.36B autoencoder on 8x A6000, field report",
        lambda r, s: {"grad_scaler": False},
    ),
    Rule(
        "fp16-needs-scaler",
        lambda r, s: r.precision == "fp16-mixed" and not r.grad_scaler,
        "fp16 gradients below 6e-8 become zero without a gradient scaler",
        "IEEE 754 binary16: smallest subnormal 2^-24",
        lambda r, s: {"grad_scaler": True},
    ),
    Rule(
        "float8-needs-gpu",
        lambda r, s: r.precision == "float8" and s.gpus_per_node == 0,
        "float8 matrix products need a GPU of compute capability 8.9 or newer",
        "torchao.float8",
        lambda r, s: {"precision": "bf16-mixed"},
    ),
    Rule(
        "float8-no-adapter",
        lambda r, s: r.precision == "float8" and s.adapter,
        "float8 matrix products convert a weight that is trained; under an adapter the weights are frozen",
        "torchao.float8",
        lambda r, s: {"precision": "bf16-mixed"},
    ),
    Rule(
        "bitsandbytes-no-dtensor",
        lambda r, s: OPTIMIZERS[r.optimizer].eight_bit and r.sharding in SHARDED and not s.entrypoint,
        "bitsandbytes optimizers do not accept FSDP2's DTensor parameters (\"got mixed torch.Tensor and "
        'DTensor"; on CUDA it can be an illegal memory access)',
        "bitsandbytes#1633, measured with bitsandbytes 0.50.2 and torch 2.13",
        lambda r, s: {"optimizer": without_eight_bit(r.optimizer)},
    ),
    Rule(
        "paged-needs-gpu",
        lambda r, s: OPTIMIZERS[r.optimizer].paged and s.gpus_per_node == 0,
        "paged optimizer states are CUDA managed memory; without a GPU nothing is paged",
        "bitsandbytes 0.50.2: warns and acts as unpaged",
        lambda r, s: {"optimizer": OPTIMIZERS[r.optimizer].instead},
    ),
    Rule(
        "paged-or-offloaded",
        lambda r, s: OPTIMIZERS[r.optimizer].paged and r.offload != "none",
        "paged states are CUDA managed memory that already moves to the host when the GPU runs out; "
        "offloaded states are never on the GPU",
        "bitsandbytes 0.50.2, get_paged: cudaMallocManaged",
        lambda r, s: {"optimizer": OPTIMIZERS[r.optimizer].instead},
    ),
    Rule(
        "batch-norm-needs-two",
        lambda r, s: s.batch_norm and r.micro_batch_size == 1,
        "BatchNorm has no variance with one sample per micro-batch: training raises or diverges. Each rank "
        "needs at least two samples of batch.global",
        "torch.nn.functional.batch_norm: expected more than 1 value per channel when training",
        _two_samples,
    ),
    Rule(
        "compiled-batch-norm-is-not-recomputed",
        lambda r, s: s.batch_norm and r.compile and r.activations in RECOMPUTED,
        "where torch.compile cannot capture a block as one graph, its recomputation would update BatchNorm's "
        "statistics a second time",
        "torch 2.13, measured with momentum=None",
        lambda r, s: {"activations": "keep"},
    ),
    Rule(
        "coupled-samples-need-two",
        lambda r, s: s.couples_samples and r.micro_batch_size == 1,
        "the loss couples samples (model.couples_samples), and a micro-batch of one sample has no other: its "
        "contrastive loss is constant. Each rank needs at least two samples of batch.global",
        "InfoNCE with one sample: -log(1) = 0",
        _two_samples,
    ),
    Rule(
        "ranks-need-sharding",
        lambda r, s: data_ranks(r, s.ranks) > 1 and r.sharding == "none",
        "several ranks without DDP or FSDP train separate models: nothing reduces their gradients",
        "torch.distributed",
        lambda r, s: {"sharding": "ddp"},
    ),
    Rule(
        "mesh-divides-ranks",
        lambda r, s: s.ranks % model_parallel(r) != 0,
        "each copy of the model takes tensor x pipeline ranks, which must divide the number of ranks",
        "launcher.spec.mesh",
        lambda r, s: UNCUT,
    ),
    Rule(
        "tensor-within-node",
        lambda r, s: (s.ranks // s.nodes) % r.tensor != 0,
        "a tensor-parallel group gathers and reduces activations in each layer, so it must not span nodes: "
        "tensor must divide the number of ranks per node",
        "Megatron-LM, arXiv 2104.04473, section 3.2",
        lambda r, s: {"tensor": math.gcd(r.tensor, s.ranks // s.nodes)},
    ),
    Rule(
        "mesh-needs-entrypoint",
        lambda r, s: model_parallel(r) > 1 and not s.entrypoint,
        "tensor and pipeline parallelism are done by the built-in training loop; a `command:` splits its "
        "model itself",
        "launcher.train.mesh",
        lambda r, s: UNCUT,
    ),
    Rule(
        "stages-need-pipeline",
        lambda r, s: r.pipeline == 1 and bool(_unread_without_pipeline(r)),
        "schedule, virtual_stages and stages are for a pipeline; with pipeline: 1 nothing reads them",
        "launcher.spec.pipeline_schedule",
        lambda r, s: _unread_without_pipeline(r),
    ),
    Rule(
        "stages-are-pipeline",
        lambda r, s: (
            r.pipeline > 1 and r.stages is not None and len(r.stages) != r.pipeline * r.virtual_stages
        ),
        "stages has the number of blocks of each of the pipeline x virtual_stages stages",
        "launcher.spec.pipeline_schedule",
        lambda r, s: {"stages": None},
    ),
    Rule(
        "virtual-stages-interleave",
        lambda r, s: r.pipeline > 1 and r.virtual_stages > 1 and r.schedule != "1f1b",
        "several stages on each rank are for schedule: 1f1b, which then interleaves them",
        "Megatron-LM, arXiv 2104.04473, section 2.2",
        lambda r, s: {"virtual_stages": 1, "stages": None},
    ),
    Rule(
        "virtual-stages-need-rounds",
        lambda r, s: r.virtual_stages > 1 and r.grad_accum % r.pipeline != 0,
        "the interleaved schedule takes as many micro-batches at a time as there are ranks in the pipeline: "
        "grad_accum must be a multiple of pipeline",
        "Megatron-LM, arXiv 2104.04473, section 2.2",
        lambda r, s: {"virtual_stages": 1, "stages": None},
    ),
    Rule(
        "zero-bubble-needs-linear",
        lambda r, s: _splits_backward(r) and (r.compile or r.precision == "float8"),
        "zero-bubble leaves the gradients of nn.Linear layers for later; compiled blocks and float8 layers "
        "compute them together with those of the activations",
        "launcher.train.pipeline.deferred_weight_gradients",
        lambda r, s: {"schedule": "1f1b"},
    ),
    Rule(
        "layer-units-run-eagerly",
        lambda r, s: r.sharding == "fsdp-layers" and (r.compile or _splits_backward(r)),
        "fsdp-layers gathers weights in the middle of a block, which torch.compile cannot capture, and frees "
        "them before zero-bubble computes their gradients",
        "launcher.train.sharding.layer_units",
        lambda r, s: {"sharding": "fsdp"},
    ),
    Rule(
        "fsdp-shards-every-parameter",
        lambda r, s: r.sharding in SHARDED and not s.shardable,
        "FSDP cannot shard a parameter of the model",
        "launcher.train.sharding.sharding.check_shardable",
        _unsharded,
    ),
    Rule(
        "ddp-needs-every-gradient",
        lambda r, s: in_buckets(r) and not s.every_gradient,
        "DDP waits for the gradient of each trained parameter, and the loss does not use all of them: set "
        "train.find_unused_parameters: true",
        "torch.nn.parallel.DistributedDataParallel, find_unused_parameters",
        lambda r, s: {"sharding": "fsdp"},
    ),
    Rule(
        "hybrid-needs-nodes",
        lambda r, s: r.sharding == "hybrid" and not _has_full_nodes(s.ranks // r.pipeline, s),
        "hybrid sharding replicates over nodes and shards within one, so the ranks of the job, or of each "
        "stage of a pipeline, must be several full nodes",
        "torch.distributed.fsdp.fully_shard, 2-D device mesh",
        lambda r, s: {"sharding": "fsdp"},
    ),
    Rule(
        "cpu-offload-needs-fsdp",
        lambda r, s: r.offload == "cpu" and r.sharding not in SHARDED,
        "offloading parameters to the CPU is FSDP2's CPUOffloadPolicy",
        "torch.distributed.fsdp.CPUOffloadPolicy",
        lambda r, s: {"sharding": "fsdp"},
    ),
    Rule(
        "nvme-needs-directory",
        lambda r, s: r.offload == "nvme-optimizer" and s.entrypoint and not s.nvme_dir,
        "states on NVMe need a directory there: set train.nvme_dir",
        "launcher.train.optimizers.offload",
        lambda r, s: {"offload": "cpu-optimizer"},
    ),
    # The built-in entrypoint also runs offload on the CPU, where it frees nothing, so that tests need no GPU.
    Rule(
        "offload-needs-gpu",
        lambda r, s: r.offload != "none" and s.gpus_per_node == 0 and not s.entrypoint,
        "there is no GPU to offload from",
        "CPUOffloadPolicy pins memory: Cannot access accelerator device when none is available",
        lambda r, s: {"offload": "none"},
    ),
    Rule(
        "activation-offload-needs-gpu",
        lambda r, s: r.activations == "offload" and s.gpus_per_node == 0 and not s.entrypoint,
        "there is no GPU to offload activations from",
        "torch.autograd.graph.save_on_cpu",
        lambda r, s: {"activations": "checkpoint"},
    ),
    Rule(
        "ratio-needs-checkpoint",
        lambda r, s: r.checkpoint_ratio < 1 and r.activations != "checkpoint",
        "checkpoint_ratio is the part of the blocks that activations: checkpoint recomputes",
        "launcher.train.activations.activations",
        lambda r, s: {"checkpoint_ratio": 1.0},
    ),
    Rule(
        "budget-needs-compile",
        lambda r, s: r.activations == "budget" and not r.compile,
        "activations: budget, which activation_budget implies, is a setting of torch.compile's partitioner: "
        "it needs compile: true",
        "torch._functorch.config.activation_memory_budget",
        lambda r, s: {"compile": True},
    ),
    Rule(
        "compile-no-counting",
        lambda r, s: r.compile and s.counts_allocations,
        f"allocations of compiled code are not counted, which a drill ({DRILLS}) needs, and on the CPU a "
        f"memory budget ({BUDGET})",
        "launcher.train.cpu_memory_budget",
        _not_compiled,
    ),
    Rule(
        "activation-budget-needs-budget",
        lambda r, s: r.activation_budget < 1 and r.activations != "budget",
        "activation_budget is the share of a compiled block's activations that activations: budget keeps",
        "torch._functorch.config.activation_memory_budget",
        lambda r, s: {"activation_budget": 1.0},
    ),
    Rule(
        "embedding-states-need-8-bit",
        lambda r, s: r.embedding_states == "8-bit" and not OPTIMIZERS[r.optimizer].eight_bit,
        "embedding_states: 8-bit is for an optimizer with 8-bit states",
        "launcher.train.optimizers.eight_bit",
        lambda r, s: {"embedding_states": "32-bit"},
    ),
    Rule(
        "step-in-backward-needs-entrypoint",
        _in_backward(lambda r, s: not s.entrypoint),
        "optimizer_step: backward is done by the built-in training loop; a `command:` updates its parameters "
        "itself",
        "launcher.train.step_in_backward",
        _step_after,
    ),
    Rule(
        "step-in-backward-no-accumulation",
        _in_backward(lambda r, s: r.grad_accum > 1),
        "a step in the backward pass uses a gradient as soon as it is complete, so micro-batches cannot be "
        "accumulated",
        "launcher.train.step_in_backward",
        _step_after,
    ),
    Rule(
        "step-in-backward-no-clipping",
        _in_backward(lambda r, s: s.clips),
        "a step in the backward pass cannot limit the norm of the whole gradient, which is known only at its "
        "end: set train.clip_norm: null",
        "launcher.train.step_in_backward",
        _step_after,
    ),
    Rule(
        "step-in-backward-no-pipeline",
        _in_backward(lambda r, s: r.pipeline > 1),
        "a step in the backward pass has one micro-batch, so all stages but one would wait",
        "launcher.train.step_in_backward",
        _step_after,
    ),
    Rule(
        "step-in-backward-no-scaler",
        _in_backward(lambda r, s: r.grad_scaler),
        "a step in the backward pass cannot be left out when a gradient overflows, which a gradient scaler "
        "needs",
        "torch.amp.GradScaler",
        _step_after,
    ),
    Rule(
        "step-in-backward-no-ddp",
        _in_backward(lambda r, s: r.sharding in REPLICATED),
        "DDP keeps all gradients in its buckets, so a step in the backward pass would free nothing",
        "torch.nn.parallel.DistributedDataParallel, gradient_as_bucket_view",
        lambda r, s: {"sharding": "fsdp"},
    ),
    Rule(
        "step-in-backward-no-offload",
        _in_backward(lambda r, s: r.offload != "none"),
        "a step in the backward pass updates parameters on the GPU; for an optimizer on the host, gradients "
        "leave the GPU in the backward pass without it",
        "launcher.train.optimizers.offload",
        _step_after,
    ),
)


_last_broken_first = list(RULES)


def obeys_rules(recipe: Recipe, setting: Setting) -> bool:
    """Return whether the recipe breaks no rule. Faster than `broken_rules`: recipes that are tried in a row
    differ in one field, and often break the same rule."""
    for place, rule in enumerate(_last_broken_first):
        if rule.broken(recipe, setting):
            _last_broken_first.insert(0, _last_broken_first.pop(place))
            return False
    return True


def broken_rules(recipe: Recipe, setting: Setting) -> list[Broken]:
    """Return every rule that the recipe breaks, in the order of the table."""
    return [Broken(rule, rule.cure(recipe, setting)) for rule in RULES if rule.broken(recipe, setting)]


def nearest_valid(recipe: Recipe, setting: Setting) -> Recipe | None:
    """Apply cures until no rule is broken. Return None if a broken rule has no cure."""
    for _ in RULES:
        broken = broken_rules(recipe, setting)
        if not broken:
            return recipe
        if not broken[0].cure:
            return None
        recipe = recipe.model_copy(update=broken[0].cure)
    return None
