"""A step written down from shapes, held against the same step traced."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.memory.formulas import FORMULA_BAND, NO_ACTIVATIONS, formula_trace
from launcher.memory.model_parts import parts_of
from launcher.memory.peaks import peaks_of
from launcher.memory.recipe_trace import Profile, kept_to_the_end
from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks
from launcher.memory.trace import COMMUNICATION, GATHERED, GRADIENTS, TEMPORARIES, Trace
from launcher.spec.recipe import Recipe
from launcher.train.shapes import read_shapes
from tests.train.test_tracing import recipe, tracer

CONTEXT = 512
GPT = ("launcher.tasks.gpt:PydocGPT", {"layers": 6, "dim": 256, "heads": 4, "context": CONTEXT})
LLAMA = (
    "launcher.tasks.llama:LanguageModel",
    {
        "model": {"layers": 6, "dim": 256, "heads": 4, "kv_heads": 2, "hidden": 704, "vocabulary": 2048},
        "context": CONTEXT,
    },
)
MICRO = 4


def highest(trace: Trace) -> int:
    return max(moment.at(MICRO) for moments in trace.highest().values() for moment in moments)


def fsdp(**fields: Any) -> Recipe:
    return recipe(sharding="fsdp", **fields)


@pytest.mark.parametrize(
    "model", [pytest.param(LLAMA, id="llama"), pytest.param(GPT, id="gpt", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("chosen", "world"),
    [
        (recipe(sharding="none"), 1),
        (recipe(sharding="none", activations="checkpoint", grad_accum=2), 1),
        (fsdp(), 8),
        (fsdp(activations="checkpoint"), 8),
        (fsdp(activations="compress"), 8),
        (recipe(sharding="none", activations="compress"), 1),
        (fsdp(activations="selective", grad_accum=2, grad_sync="last"), 4),
    ],
    ids=[
        "none",
        "none checkpoint",
        "fsdp",
        "fsdp checkpoint",
        "fsdp compress",
        "none compress",
        "fsdp selective last",
    ],
)
def test_the_peak_is_that_of_a_trace_within_the_band(model: Any, chosen: Recipe, world: int) -> None:
    of, ranks = tracer(*model), Ranks(world, world, on_gpu=True)
    traced, shapes = of.sample(chosen, ranks, MICRO, complete=True), read_shapes(of.task, chosen)
    written = formula_trace(shapes, chosen, ranks, CONTEXT, complete=True)
    error = highest(written) / highest(traced) - 1
    print(f"{error:+.1%}")
    assert abs(error) < FORMULA_BAND
    assert [name for name, _ in written.phases] == [name for name, _ in traced.phases]
    for of_shapes, of_step in zip(written.work[:2], traced.work[:2], strict=True):
        assert of_shapes.at(MICRO) == pytest.approx(of_step.at(MICRO), rel=FORMULA_BAND)
    ours, theirs = (
        [(peak.when, peak.phase) for peak in peaks_of(Profile(trace, shapes, chosen), chosen, ranks)]
        for trace in (written, traced)
    )
    assert ours == theirs


@pytest.mark.parametrize("sharding", ["none", "fsdp", "fsdp-keep", "hybrid"])
@pytest.mark.parametrize(
    "activations", ["keep", "checkpoint", "selective", "every-second", "offload", "compress"]
)
@pytest.mark.parametrize("accumulates", [{}, {"grad_accum": 2}, {"grad_accum": 2, "grad_sync": "last"}])
def test_everything_is_freed_once_and_gradients_wait_as_they_do(
    sharding: str, activations: str, accumulates: Any
) -> None:
    chosen = recipe(sharding=sharding, activations=activations, **accumulates)
    freed_early = formula_trace(llama_block(2), chosen, Ranks(8, 4, on_gpu=True), CONTEXT, complete=True)
    written = kept_to_the_end(freed_early, chosen)
    born = [event for event in written.events if event >= 0]
    assert born == list(range(len(written.storages)))
    assert sorted(~event for event in written.events if event < 0) == born
    for phase, _, end in written.spans():
        alive = {written.storages[number].category for number in written.live_at(end - 1)}
        waits = chosen.grad_accum > 1 and phase in ("backward", "forward again")
        assert (GRADIENTS in alive) == waits


def llama_block(blocks: int, h: int = 4096, k: int = 1024, f: int = 14336) -> ModelShapes:
    matrices = {
        "q": (h, h),
        "k": (k, h),
        "v": (k, h),
        "o": (h, h),
        "gate": (f, h),
        "up": (f, h),
        "down": (h, f),
    }
    return ModelShapes(
        tuple(
            Parameter(f"layers.{number}.{name}.weight", shape, 4)
            for number in range(blocks)
            for name, shape in matrices.items()
        ),
        0,
    )


def test_a_llama_block_keeps_what_its_operators_save() -> None:
    h, k, f = 4096, 1024, 14336
    (block,) = parts_of(llama_block(1, h, k, f)).blocks
    kept = 2 * block.kept
    assert (kept, block.width) == (18 * h + 4 * k + 6 * f, h)
    # Its operators, in bytes for each token: with RMSNorm as one kernel, and computed in pieces in fp32.
    fused, in_pieces = 12 * h + 4 * k + 8 * f, 24 * h + 4 * k + 8 * f
    print(f"fused {kept / fused - 1:+.1%}, in pieces {kept / in_pieces - 1:+.1%}")
    assert kept == pytest.approx(fused, rel=0.05)
    assert kept == pytest.approx(in_pieces, rel=0.25)


def test_one_giant_matrix_outside_of_all_blocks_is_gathered_whole() -> None:
    giant = Parameter("encoder.weight", (2**15, 2**16), 4)
    model = ModelShapes((giant, *llama_block(2).parameters), 0)
    chosen, ranks = fsdp(), Ranks(8, 8, on_gpu=True)
    written = formula_trace(model, chosen, ranks, None)
    whole = [s.fixed for s in written.storages if s.module == "encoder"]
    assert set(whole) == {2 * giant.numel, 4 * giant.numel, 4 * giant.numel // 8}
    peak = max(peaks_of(Profile(written, model, chosen), chosen, ranks), key=lambda one: one.allocated)
    assert (peak.phase, peak.module) == ("backward", "encoder")
    # It is in 16 bit with its gradient when the reduce-scatter's input in fp32 comes, and then its own part.
    block = sum(p.numel for p in llama_block(1).parameters)
    assert peak.parts[COMMUNICATION] == 4 * giant.numel
    assert peak.parts[TEMPORARIES] == 2 * giant.numel
    assert peak.parts.get(GATHERED, 0) < 2 * block


def test_a_unit_costs_six_bytes_for_each_parameter_forward_and_ten_backward() -> None:
    model, ranks = llama_block(8), Ranks(8, 8, on_gpu=True)
    block = parts_of(model).blocks[0].numel
    trace = formula_trace(model, fsdp(), ranks, None)
    highest = trace.highest([None if one.category == GRADIENTS else one for one in trace.storages])
    (forward,), (backward,) = highest["forward"], highest["backward"]
    assert (forward.at(1), backward.at(1)) == (6 * block, 10 * block)


def test_without_tokens_there_are_no_activations_and_it_is_said() -> None:
    written = formula_trace(llama_block(2), fsdp(), Ranks(8, 8, on_gpu=True), None)
    assert all(storage.per_sample == 0 for storage in written.storages)
    assert written.work.forward_flops.at(8) == 0
    assert "not counted" in NO_ACTIVATIONS
