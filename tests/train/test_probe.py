"""What a rank finds out alone before the first step is true, and leaves no trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from launcher.train.recovery.undo import Undo
from tests.train.changing import Changing
from tests.train.runs import measure

GLOO = 32 * 1024
"Bytes: gloo's threads hold a collective's tensors for a moment after it has ended, so that a peak under "
"FSDP, of a step or of a probe, is now and then higher by a few of them (17 KiB seen)."


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("probe")
    measure("probes.py", folder, ranks=2)
    return [json.loads((folder / f"rank {number}.json").read_text()) for number in (0, 1)]


def test_steps_with_probes_before_them_equal_steps_without_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["untouched"]) == 7
        for case, found in rank["untouched"].items():
            assert found["traces"] == [], f"{case}: after a probe"
            assert found["losses"][0] == found["losses"][1], case
            assert found["different"] == [], case


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
            slack = GLOO if case.startswith("fsdp") else 64 * case.startswith("ddp")
            for limit, answer in found["answers"]:
                possible = {
                    next((i for i, peak in enumerate(peaks) if peak - less <= limit), None)
                    for less in (0, slack, -slack)
                }
                assert answer in possible, f"{case}: {limit} of {peaks}"
            assert set(found["live"]) == {0}, f"{case}: freed behind each question"


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


def test_no_collective_is_issued_and_a_task_with_its_own_is_not_probed(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["alone"]["in time"] for rank in ranks)
    found = ranks[0]["alone"]["found"]
    assert found["ddp"] and found["fsdp"] and found["fsdp-keep"]
    for name in ("gathering", "gathering, compiled"):
        fits, off = found[name]
        assert fits == 0 and off.startswith("the task calls c10d.allreduce_"), name
    for rank in ranks:
        assert rank["alone"]["synced"].startswith("SyncBatchNorm"), "no step is repeated in process"


def test_a_confirmation_costs_about_a_step(ranks: list[dict[str, Any]]) -> None:
    for sharding, (step, confirmation) in ranks[0]["timed"].items():
        print(f"{sharding}: a step {step * 1e3:.1f} ms, a confirmation {confirmation * 1e3:.1f} ms")
        assert confirmation < 2 * step + 0.02


def test_undo_restores_buffers_that_are_replaced_resized_or_changed_uncounted() -> None:
    torch.manual_seed(0)
    model = Changing(16)
    undo = Undo(model, torch.device("cpu"))
    classes = torch.arange(8)
    for _ in range(3):
        undo.take()
        before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        outputs = []
        for _ in range(3):
            outputs.append(model(classes))
            undo.restore()
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
        after = dict(model.named_buffers())
        assert after.keys() == before.keys()
        for name, (buffer, values) in before.items():
            assert after[name] is buffer and torch.equal(buffer, values), name
            assert torch.equal(undo.buffers()[name], values), name
        model(classes)


def test_undo_copies_no_constant_and_what_changes_once_for_each_type() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.ones(1000, 1000))
    undo = Undo(model, torch.device("cpu"))
    mask = undo.buffers()["mask"]
    calls = []
    original = torch._foreach_copy_
    for _ in range(3):
        undo.take()
        model(torch.rand(3, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda into, of: calls.append(len(into)) or original(into, of))
        undo.take()
    assert sorted(calls) == [2, 4], "the counts, and the means and variances"
    assert undo.buffers()["mask"] is mask
