"""Shapes and a trace become an Estimate."""

from __future__ import annotations

from launcher.memory.allocator import replay
from launcher.memory.estimate import Estimate
from launcher.memory.host import host_of
from launcher.memory.overheads import cublas_workspaces, overheads
from launcher.memory.peaks import peaks_of
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks, states_of
from launcher.memory.timeline import timeline
from launcher.memory.trace import Trace
from launcher.spec.cluster import Gpu
from launcher.spec.recipe import Recipe

BAND = 0.05
"Of a traced estimate. Against real steps on the CPU its worst error is below (docs/accuracy.md)."
BAND_WIDER = 0.10
"Where something of the recipe is not in the trace: compiled code, float8's casts."
ROUNDING = 0.02
"What the allocator adds to the tensors' own bytes, before its model has been asked."

NEVER_MODELLED = (
    "scratch inside kernels: cuDNN, flash attention's backward pass",
    "several CUDA streams, each of which has pools of its own in the allocator",
    "other processes on the same GPU",
)


def assess(
    model: ModelShapes,
    trace: Trace,
    recipe: Recipe,
    ranks: Ranks,
    gpu: Gpu | None,
    *,
    workers: int = 0,
    on_meta: bool = True,
    copies: bool = True,
    replayed: bool = False,
) -> Estimate:
    """`replayed`: what the allocator reserves comes from its model, which costs a fraction of a second;
    else it is taken to be a little more than the tensors' bytes."""
    peaks = peaks_of(model, trace, recipe, ranks)
    states = states_of(model, recipe, ranks)
    workspaces = cublas_workspaces(gpu.type if gpu is not None else "")
    allocated = max(peak.allocated for peak in peaks)
    reserved = round((allocated + sum(workspaces)) * (1 + ROUNDING))
    if replayed:
        before, sizes, events = timeline(model, trace, recipe, ranks)
        reserved = replay(
            sizes, events, before=(*workspaces, *before), expandable=recipe.expandable_segments
        ).reserved
    missing = _not_modelled(recipe)
    return Estimate(
        peaks=peaks,
        reserved=reserved,
        overhead=overheads(gpu, recipe, ranks),
        host=host_of(model, recipe, ranks, workers=workers, on_meta=on_meta, copies=copies),
        managed=states.managed,
        nvme=states.nvme,
        band=BAND_WIDER if missing else BAND,
        basis="traced",
        not_modelled=(*missing, *NEVER_MODELLED),
    )


def _not_modelled(recipe: Recipe) -> tuple[str, ...]:
    found = []
    if recipe.compile:
        found.append("torch.compile: fused kernels keep less than what was traced")
    if recipe.precision == "float8":
        found.append("float8: copies of inputs and weights in 8 bit; traced as bf16-mixed")
    return tuple(found)
