"""What a rank finds out alone before the first step is true, and leaves no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.spec.events import Probed
from tests.train.runs import job, measure, prepare, recipe, start

GLOO = 32 * 1024
"Bytes: gloo's threads hold a collective's tensors for a moment after it has ended, so that a peak under "
"FSDP, of a step or of a probe, is now and then higher by a few of them (17 KiB seen)."


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("probe")
    measure("probes.py", folder, ranks=2)
    return [json.loads((folder / f"rank {number}.json").read_text()) for number in (0, 1)]


@pytest.mark.slow
def test_steps_with_probes_before_them_equal_steps_without_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["untouched"]) == 8
        for case, found in rank["untouched"].items():
            assert found["traces"] == [], f"{case}: after a probe"
            assert found["losses"][0] == found["losses"][1], case
            assert found["different"] == [], case


@pytest.mark.slow
def test_what_the_probe_calls_too_large_is_too_large_and_nothing_else(ranks: list[dict[str, Any]]) -> None:
    """The budgets are at the edges: at a step's very peak, and a byte (with gloo, some KiB) below it."""
    for rank in ranks:
        for case, found in rank["exact"].items():
            peaks = [max(steps) for steps in found["peaks"]]
            assert peaks == sorted(peaks, reverse=True)
            assert all(max(steps[:2]) >= max(steps) - GLOO for steps in found["peaks"]), (
                f"{case}: two steps tell"
            )
            # DDP's own scalars cost it a few bytes more.
            slack = GLOO if case.startswith("fsdp") else 64 * case.startswith(("ddp", "zero1"))
            for limit, answer in found["answers"]:
                possible = {
                    next((i for i, peak in enumerate(peaks) if peak - less <= limit), None)
                    for less in (0, slack, -slack)
                }
                assert answer in possible, f"{case}: {limit} of {peaks}"
            assert set(found["live"]) == {0}, f"{case}: freed behind each question"


@pytest.mark.slow
def test_on_one_device_it_trains_with_what_fits_and_runs_out_one_rung_higher(
    ranks: list[dict[str, Any]],
) -> None:
    found = ranks[0]["really"]
    assert {index for index, _ in found.values()} >= {None, 1, 2}
    for limit, (index, runs) in found.items():
        if index is None:
            assert runs[-1][1] < 2, limit
            continue
        assert runs[-1 if index else 0][1] == 3, limit
        if index:
            assert runs[0][1] < 2, limit


@pytest.mark.slow
def test_no_collective_is_issued_and_a_task_with_its_own_is_not_probed(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["alone"]["in time"] for rank in ranks)
    found = ranks[0]["alone"]["found"]
    assert found["ddp"] and found["zero1"] and found["fsdp"] and found["fsdp-keep"]
    for name in ("gathering", "gathering, compiled"):
        fits, off = found[name]
        assert fits == 0 and off.startswith("the task calls c10d.allreduce_"), name
    for rank in ranks:
        assert rank["alone"]["synced"].startswith("SyncBatchNorm"), "no step is repeated in process"


@pytest.mark.slow
def test_a_confirmation_costs_about_a_step(ranks: list[dict[str, Any]]) -> None:
    for sharding, (step, confirmation) in ranks[0]["timed"].items():
        print(f"{sharding}: a step {step * 1e3:.1f} ms, a confirmation {confirmation * 1e3:.1f} ms")
        assert confirmation < 2 * step + 0.02


def test_the_probe_does_not_load_the_training_data_once_more(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(task="traps:Loading", steps=1, train={"probe": "always"}))
    ended = start(run, recipe("none", micro=8), ranks=1)
    assert ended.codes == {0: 0} and any(isinstance(event, Probed) for event in run.read_events())
    assert ended.output.count("loading train") == 1


@pytest.mark.slow
def test_nothing_that_the_probe_does_can_be_observed(tmp_path: Path) -> None:
    """Parameters, states, buffers, random numbers, generators and attributes of task, data and model, global
    names, the environment: each of them is changed by a step of this task."""
    for ranks, found in (
        (1, measure("traceless.py", tmp_path / "1", 1)),
        (2, measure("traceless.py", tmp_path / "2", 2)),
    ):
        assert found["changed by a step"] == found["all"], "else this test shows nothing"
        for name in ("by the probe", "by a probe that finds less", "by a refused climb", "by the comparison"):
            assert found[name] == [[]] * ranks, name
