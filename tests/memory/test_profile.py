"""What a recipe changes in a trace, on traces made by hand."""

from __future__ import annotations

import pytest

from launcher.memory.allocator import replay
from launcher.memory.formulas import formula_trace
from launcher.memory.peaks import peaks_of
from launcher.memory.recipe_trace import profile_of, with_shards_from_host
from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, states_of
from launcher.memory.timeline import CUBLAS, timeline
from launcher.memory.trace import (
    ACTIVATIONS,
    ALL_GATHER,
    BATCH,
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    PRODUCT,
    TEMPORARIES,
    Affine,
    Storage,
    Trace,
    Work,
)
from launcher.spec.recipe import Recipe

SHARDS, LARGE, SMALL = 4, 300, 100
"The number of ranks, and of elements of a block's two parameters."
GATHERED_BYTES = 2 * (LARGE + SMALL)
COPY_BYTES = GATHERED_BYTES // SHARDS


MIB = 2**20
NOTHING = Work(*[Affine(0, 0)] * 8)
SIZES = {"micro_batch_size": 1, "grad_accum": 1, "optimizer": "adamw"}


@pytest.mark.parametrize(
    ("precision", "offload", "on_gpu", "copied"),
    [
        ("bf16", "none", True, False),
        ("bf16", "cpu", False, False),  # they are there
        ("bf16", "cpu", True, True),
        ("bf16-mixed", "none", True, True),
        ("bf16-mixed", "cpu", True, True),  # once: they are cast
    ],
)
def test_an_all_gather_of_offloaded_parameters_begins_with_copies_of_its_shards(
    precision: str, offload: str, on_gpu: bool, copied: bool
) -> None:
    gathers = [Storage(size, 0, GATHERED, "block", ALL_GATHER) for size in (COPY_BYTES, GATHERED_BYTES)]
    cast = precision == "bf16-mixed"
    events = (0, 1, ~0, ~1) if cast else (1, ~1)
    starts = (("forward", 0), ("backward", len(events)), ("evaluation", len(events)))
    trace = Trace(tuple(gathers), events, starts, NOTHING)
    elements, itemsize = {"block.a": LARGE, "block.b": SMALL, "head": 9000}, 2 if precision == "bf16" else 4
    model = ModelShapes(tuple(Parameter(name, (size, 1), itemsize) for name, size in elements.items()), 0)
    fields = {**SIZES, "sharding": "fsdp", "precision": precision, "offload": offload}
    recipe = Recipe.model_validate(fields)
    found = profile_of([trace], model, recipe, Ranks(SHARDS, SHARDS, on_gpu=on_gpu))
    copies = COPY_BYTES if copied else 0
    assert [moment.fixed for moment in found.other_streams[ALL_GATHER]] == [GATHERED_BYTES + copies]
    assert found.trace.highest()["backward"] == ()


def test_without_a_cast_a_unit_of_a_rank_s_share_of_the_next_one_is_none_of_its_copies() -> None:
    units = tuple(Storage(size, 0, GATHERED, "unit", ALL_GATHER) for size in (COPY_BYTES, GATHERED_BYTES))
    starts = (("forward", 0), ("backward", 4), ("evaluation", 4))
    found = with_shards_from_host(Trace(units, (0, 1, ~0, ~1), starts, NOTHING), SHARDS, cast=False)
    assert [one.fixed for one in found.storages[2:]] == [COPY_BYTES / SHARDS, COPY_BYTES]


@pytest.mark.parametrize(("sends", "peak"), [(False, 10 + 100), (True, 10 + 100), (None, 100)])
def test_what_a_stage_has_sent_in_an_evaluation_stays_until_another_stage_sends(
    sends: bool | None, peak: int
) -> None:
    """`sends`: the second stage of a rank sends as well; None: the first stage sends nothing, either."""

    def stage(sends: bool, computes: int) -> Trace:
        sent = [Storage(10, 0, TEMPORARIES, "")] * sends
        tensors = (*sent, Storage(0, 0, BATCH, ""), Storage(computes, 0, TEMPORARIES, "layer"))
        numbers = range(len(tensors))
        starts = (("forward", 0), ("backward", 0), ("evaluation", 0))
        return Trace(tensors, (*numbers, *(~number for number in reversed(numbers))), starts, NOTHING)

    chosen = {"sharding": "none", "precision": "fp32", "pipeline": 2, "virtual_stages": 2, "grad_accum": 2}
    model, recipe = ModelShapes((), 0), Recipe.model_validate({**SIZES, **chosen})
    traces = [stage(sends is not None, 50), stage(bool(sends), 100)]
    found = profile_of(traces, model, recipe, Ranks(2, 2, on_gpu=True, stage=1))
    assert max(moment.fixed for moment in found.highest["evaluation"]) == peak


@pytest.mark.parametrize("marked", [True, False])
def test_cublas_takes_a_workspace_at_the_first_product_of_each_pass_and_keeps_it(marked: bool) -> None:
    product = [Storage(0, 0, PRODUCT, "layer")] if marked else []
    tensors = [Storage(60 * MIB, 0, ACTIVATIONS, "layer"), Storage(40 * MIB, 0, ACTIVATIONS, "layer")]
    storages = [*tensors, *product, *product]
    mark = [(2, ~2), (3, ~3)] if marked else [(), ()]
    forward, backward = (0, *mark[0]), (1, ~0, *mark[1], ~1)
    starts = (("forward", 0), ("backward", len(forward)), ("evaluation", len(forward) + len(backward)))
    trace = Trace(tuple(storages), (*forward, *backward), starts, NOTHING)
    model = ModelShapes((Parameter("layer.weight", (1, 1), 4),), 0)
    recipe = Recipe.model_validate({**SIZES, "sharding": "none", "precision": "fp32"})
    workspaces = {"forward": 32 * MIB, "backward": 32 * MIB}
    line = timeline(model, trace, recipe, Ranks(1, 1, on_gpu=True), workspaces)
    at = [line.at(event) for event, one in enumerate(line.events) if one >= 0 and line.names[one] == CUBLAS]
    first = ("first step", "forward"), ("first step", "backward")
    assert at == [*(first if marked else [("first step", "init")] * 2)]
    needed = replay(line.sizes, line.events, streams=line.streams).peak_reserved
    assert needed >= (100 + 64) * MIB


@pytest.mark.parametrize(
    ("sharding", "accumulation", "sync", "twice"),
    [
        ("ddp", 2, "each", True),
        ("zero1", 2, "each", True),
        ("ddp", 2, "last", False),
        ("ddp", 1, "each", False),
        ("fsdp", 2, "each", False),
    ],
)
def test_ddp_makes_its_buckets_anew_beside_the_gradients_of_the_first_micro_batch(
    sharding, accumulation, sync, twice
):
    sizes = {**SIZES, "grad_accum": accumulation}
    recipe = Recipe(precision="fp32", sharding=sharding, grad_sync=sync, **sizes)
    model, ranks = ModelShapes((Parameter("w", (64, 64), 4),), buffers=0), Ranks(2, 2, on_gpu=True)
    profile = profile_of([formula_trace(model, recipe, ranks, None)], model, recipe, ranks)
    peaks = {(peak.when, peak.phase): peak.parts for peak in peaks_of(profile, recipe, ranks)}
    resumed = peaks.get(("resume", "forward"))
    assert (resumed is not None) == twice
    if resumed is not None:
        assert resumed[GRADIENTS] == peaks["first step", "forward"][GRADIENTS] == 2 * model.gradients
        assert resumed["optimizer states"] == states_of(model, recipe, ranks).gpu.optimizer


def test_ddp_copies_buffers_at_the_beginning_of_each_forward_pass_but_not_all_of_many_at_once():
    recipe, ranks = Recipe(precision="fp32", sharding="ddp", **SIZES), Ranks(2, 2, on_gpu=True)
    for buffers, copied in ((100 * MIB, 100 * MIB), (2000 * MIB, 500 * MIB)):
        model = ModelShapes((Parameter("w", (64, 64), 4),), buffers)
        profile = profile_of([formula_trace(model, recipe, ranks, None)], model, recipe, ranks)
        peaks = {(peak.when, peak.phase): peak for peak in peaks_of(profile, recipe, ranks)}
        for when in ("first step", "steady state", "evaluation"):
            assert peaks[when, "forward"].parts[COMMUNICATION] == copied
        held = peaks["checkpoint", "save"].allocated
        assert peaks["steady state", "forward"].allocated == held + copied
