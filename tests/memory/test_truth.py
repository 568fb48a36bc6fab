"""The estimate against the peaks of real steps: a few cases. benchmarks/memory.py has them all."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.memory.cases import HALF, MIXED, Case, case, peak, truths, write_configs
from tests.memory.predicted import MOMENTS, peaks, predicted

ALONE: tuple[Case, ...] = (
    case("conv", micro=64),
    case("brain tiny", micro=64, optimizer="adamw-8bit", **MIXED),
    case("gpt dropout", micro=4, **HALF),
    case("llama", micro=4, optimizer="adam-mini", accumulation=2, precision="bf16"),
    case("llama tied", micro=2, activations="selective", **MIXED),
    case("hf gpt2", micro=2),
)
TOGETHER: tuple[Case, ...] = (
    case("video tiny", ranks=2, micro=4, activations="checkpoint", **MIXED),
    case("llama", ranks=2, micro=2, accumulation=2, grad_sync="last", **MIXED),
    case("llama", ranks=2, micro=2, sharding="ddp", optimizer="lion"),
    case("odd tied", ranks=2, micro=32, sharding="fsdp-keep"),
)
MOST, MEDIAN = 0.08, 0.02
Held = dict[Case, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """(true, predicted): bytes by moment and phase."""
    configs = write_configs(tmp_path_factory.mktemp("configs"))
    cases = ALONE + TOGETHER
    found = truths(cases, profile=ALONE[2:3])
    said = [
        peaks(predicted(one.job(configs), one.recipe, one.ranks, "cpu"))
        for one in cases
    ]
    return {one: (true, ours) for one, true, ours in zip(cases, found, said, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("one", ALONE + TOGETHER, ids=lambda one: one.name)
def test_every_moment_of_a_real_run_peaks_where_predicted(one: Case, held: Held) -> None:
    true, ours = held[one]
    for moment in MOMENTS:
        measured = max(true["peaks"][moment].values())
        assert max(ours[moment].values()) == pytest.approx(measured, rel=MOST), moment


@pytest.mark.slow
def test_half_of_the_peaks_are_within_two_percent(
    held: Held,
) -> None:
    errors = {one.name: peak(ours) / peak(true["peaks"]) - 1 for one, (true, ours) in held.items()}
    assert statistics.median(map(abs, errors.values())) <= MEDIAN, errors


@pytest.mark.slow
def test_the_count_of_storages_is_what_the_allocator_gave_out(
    held: Held,
) -> None:
    true, _ = held[ALONE[2]]
    for moment, size in true["profiled"].items():
        assert max(true["peaks"][moment].values()) == pytest.approx(size, rel=0.02)
