"""Compute an Estimate from a model's shapes and a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from launcher.memory.accuracy import error_band
from launcher.memory.allocator import replay
from launcher.memory.estimate import Estimate, Peak
from launcher.memory.host import Surroundings, host_of
from launcher.memory.oom_point import Failure, first_failure
from launcher.memory.overheads import cublas_workspaces, overheads, workspaces_at
from launcher.memory.peaks import at_least, peaks_of
from launcher.memory.recipe_trace import Profile
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks, states_of
from launcher.memory.timeline import CUBLAS, timeline
from launcher.memory.trace import COMPUTE, GRADIENTS, REDUCE_SCATTER
from launcher.spec.cluster import Gpu
from launcher.spec.recipe import Recipe

UNCOMPILED = "torch.compile: fused kernels keep less than the traced step"
FLOAT8 = "float8: copies of inputs and weights in 8 bit; traced as bf16-mixed"
ROUNDING = 0.02
"Share that the allocator adds to the bytes of tensors, used if its model is not run."

NEVER_MODELLED = (
    "scratch memory inside kernels: cuDNN, flash attention's backward pass",
    "other processes on the same GPU",
)


def assess(
    profile: Profile,
    recipe: Recipe,
    ranks: Ranks,
    surroundings: Surroundings,
    *,
    replayed: bool = False,
) -> Estimate:
    """Estimate the memory of a recipe.

    `replayed`: compute the reserved bytes by the allocator's model, in a fraction of a second. Otherwise they
    are the bytes of tensors and of cuBLAS's workspaces plus ROUNDING. Without GPUs, tensors count as host
    memory and nothing is added.
    """
    device = replace(ranks, on_gpu=True)
    peaks = peaks_of(profile, recipe, device)
    if ranks.on_gpu:
        workspaces = _workspaces(surroundings)
        peaks = tuple(
            peak.with_part(CUBLAS, workspaces_at(peak.when, peak.phase, recipe, workspaces)) for peak in peaks
        )
    highest, pools = max(peak.allocated for peak in peaks), dict[str, int]()
    if not ranks.on_gpu:
        reserved = highest
    elif replayed:
        reserved, pools = _replayed(profile, recipe, device, surroundings, highest)
    else:
        reserved = _sum_of_pools(profile, recipe, device, surroundings)
    return _estimate(profile.model, recipe, ranks, surroundings, reserved, peaks, pools)


def assess_in_part(profile: Profile, recipe: Recipe, ranks: Ranks, surroundings: Surroundings) -> Estimate:
    """Return a lower bound of `assess` for GPUs, without peaks. `profile`: a part of the recipe's profile."""
    reserved = _sum_of_pools(profile, recipe, ranks, surroundings)
    return _estimate(profile.model, recipe, ranks, surroundings, reserved)


def assess_at_least(
    model: ModelShapes, kept: float, recipe: Recipe, ranks: Ranks, surroundings: Surroundings
) -> Estimate:
    """Return a lower bound of `assess` for GPUs that needs no trace of the recipe.

    `kept`: bytes that a forward pass keeps on the GPU for the backward pass.
    """
    return _estimate(model, recipe, ranks, surroundings, at_least(model, recipe, ranks, kept))


def _estimate(
    model: ModelShapes,
    recipe: Recipe,
    ranks: Ranks,
    surroundings: Surroundings,
    reserved: int,
    peaks: tuple[Peak, ...] = (),
    pools: Mapping[str, int] = MappingProxyType({}),
) -> Estimate:
    device = replace(ranks, on_gpu=True)
    host = host_of(model, recipe, device, surroundings)
    states = states_of(model, recipe, device)
    overhead = overheads(surroundings.gpu, recipe, ranks)
    if surroundings.gpu is not None and states.managed:
        free = max(0, surroundings.gpu.memory - reserved - sum(overhead.values()))
        host["paged states without room on the GPU"] = ranks.per_node * max(0, states.managed - free)
    if not ranks.on_gpu:
        host = {"tensors of the ranks": ranks.per_node * reserved, **host}
    return Estimate(
        peaks=peaks,
        reserved=reserved,
        pools=dict(pools),
        overhead=overhead,
        host={name: size for name, size in host.items() if size},
        managed=states.managed,
        nvme=states.nvme,
        band=error_band(),
        basis="traced",
        not_modelled=_not_modelled(recipe, ranks),
    )


def _sum_of_pools(profile: Profile, recipe: Recipe, ranks: Ranks, surroundings: Surroundings) -> int:
    """Return the bytes that the streams' pools need together: each keeps what it held at its own peak."""
    peaks = peaks_of(profile.on_compute_stream, recipe, ranks)
    micro = recipe.micro_batch_size
    others = {
        stream: max((moment.at(micro) for moment in moments), default=0)
        for stream, moments in profile.other_streams.items()
    }
    gradients = others.get(REDUCE_SCATTER, 0)
    compute = max(peak.allocated - min(peak.parts.get(GRADIENTS, 0), gradients) for peak in peaks)
    return round((compute + sum(others.values()) + sum(_workspaces(surroundings).values())) * (1 + ROUNDING))


def _replayed(
    profile: Profile,
    recipe: Recipe,
    ranks: Ranks,
    surroundings: Surroundings,
    highest: int,
) -> tuple[int, dict[str, int]]:
    """Return the bytes that the allocator's model reserves, and each stream's share of them. `highest`: the
    most allocated bytes at any peak."""
    line = timeline(profile.model, profile.trace, recipe, ranks, _workspaces(surroundings))
    allocator = replay(
        line.sizes,
        line.events,
        expandable=recipe.expandable_segments,
        streams=line.streams,
    )
    pools = dict(allocator.peak_pools)
    missing = max(0, highest - allocator.peak_reserved)  # a resume is not in the timeline
    pools[COMPUTE] = pools.get(COMPUTE, 0) + missing
    return allocator.peak_reserved + missing, pools


def _workspaces(surroundings: Surroundings) -> dict[str, int]:
    return cublas_workspaces(surroundings.gpu.type if surroundings.gpu is not None else "")


def failure_of(profile: Profile, recipe: Recipe, ranks: Ranks, gpu: Gpu) -> Failure | None:
    """Return where the recipe runs out of memory on this GPU; None if nowhere, or before the first tensor.

    `profile`: of a complete trace.
    """
    free = gpu.memory - sum(overheads(gpu, recipe, ranks).values())
    line = timeline(profile.model, profile.trace, recipe, ranks, cublas_workspaces(gpu.type))
    return first_failure(line, free, expandable=recipe.expandable_segments) if free > 0 else None


def _not_modelled(recipe: Recipe, ranks: Ranks) -> tuple[str, ...]:
    float8 = (FLOAT8,) if recipe.precision == "float8" else ()
    return (*float8, *NEVER_MODELLED) if ranks.on_gpu else float8
