"""Fire drills: where memory runs out when TRAIN_MEMORY_FAIL says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.rundir.layout import RunDir
from launcher.train.cpu_memory_budget import MIB, MemoryBudget, open_budget
from launcher.train.drill import Drill, Drills, parse_drills, read_drills
from launcher.train.phase import Where
from launcher.train.rank import SetupError
from tests.train.countdown import Countdown
from tests.train.runs import one_rank, recipe

CPU = torch.device("cpu")


def budget_of(monkeypatch: pytest.MonkeyPatch, text: str, where: Where, number: int = 0) -> MemoryBudget:
    monkeypatch.delenv("TRAIN_MEMORY_BUDGET", raising=False)
    monkeypatch.setenv("TRAIN_MEMORY_FAIL", text)
    rank = one_rank(RunDir(Path("run")), number=number, world=2, recipe=recipe(micro=8))
    budget = open_budget(CPU, where, read_drills(rank, where))
    assert isinstance(budget, MemoryBudget)
    return budget


def allocations_until_failure(most: int = 20) -> int | None:
    for number in range(1, most + 1):
        try:
            torch.zeros(1)
        except torch.OutOfMemoryError:
            return number
    return None


def test_a_drill_strikes_at_its_allocation_and_then_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Where("backward", 1)
    with budget_of(monkeypatch, "rank=first, step=2, phase=backward, allocation=3", where):
        assert allocations_until_failure() is None, "another step"
        where.step, where.phase = 2, "forward"
        assert allocations_until_failure() is None, "another phase"
        where.phase = "backward"
        assert allocations_until_failure() == 3
        assert allocations_until_failure() is None


def test_a_second_drill_waits_for_the_step_to_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Where("forward", 1)
    with budget_of(monkeypatch, "phase=forward;phase=forward,allocation=2", where) as budget:
        assert (allocations_until_failure(), allocations_until_failure()) == (1, 2)
        assert allocations_until_failure() is None
        assert budget.report() is None, "there is no limit to report"


def test_a_drill_is_over_when_the_micro_batch_is_small_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Where("forward", 1, micro_batch=4)
    with budget_of(monkeypatch, "phase=forward,micro_batch=8", where):
        assert allocations_until_failure() is None
        where.micro_batch = None  # as the attempt began
        assert allocations_until_failure() == 1


def test_a_drill_reads_like_a_real_failure_and_obeys_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Where("forward", 1)
    with budget_of(monkeypatch, "phase=forward", where) as budget:
        told: list[int] = []
        budget.on_oom = told.append
        with pytest.raises(
            torch.OutOfMemoryError, match=r"Tried to allocate 1.00 MiB.*TRAIN_MEMORY_FAIL: phase=f"
        ):
            torch.zeros(MIB // 4)
        assert (told, budget.live) == ([MIB], 0)


def test_the_allocation_that_fails_can_be_counted_from_now() -> None:
    countdown = Countdown()
    with MemoryBudget(MIB, drills=countdown):  # type: ignore[arg-type]
        kept = [torch.zeros(1), torch.zeros(1)]
        assert countdown.allocations == len(kept)
        kept[0].add_(1)
        kept.append(kept[0].view(1))
        assert countdown.allocations == 2, "neither in place nor a view"
        countdown.fail_in(3)
        assert allocations_until_failure() == 3
        countdown.fail_in(1)
        countdown.fail_in(None)
        assert allocations_until_failure() is None


def test_what_never_came_about_is_told_by_the_attempt_that_it_was_meant_for() -> None:
    coming = parse_drills("phase=data;phase=forward,attempt=0;phase=backward,attempt=1", world=1)
    drills = Drills(coming, Where("data", 1), micro_batch=8)
    assert drills.strikes() == "phase=data"
    assert drills.missed(0) == ["phase=forward,attempt=0"]
    assert drills.missed(1) == ["phase=backward,attempt=1"]


def test_ranks_have_names() -> None:
    text = "phase=data,rank=last;phase=data,rank=first;phase=data,rank=all;phase=data;phase=data,rank=2"
    assert [drill.rank for drill in parse_drills(text, world=4)] == [3, 0, None, None, 2]
    [full] = parse_drills("rank=1,step=2,phase=optimizer,allocation=3,micro_batch=4", world=2)
    assert full == Drill(full.text, "optimizer", 1, 2, 3, 4)
    assert parse_drills("", world=1) == []


def test_only_the_rank_that_is_named_counts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN_MEMORY_FAIL", "rank=last,phase=forward")
    other, named = (one_rank(RunDir(Path("run")), number=number, world=2) for number in (0, 1))
    assert read_drills(other, Where()) is None
    assert read_drills(named, Where()) is not None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("phase=backwards", "'backwards' is not a phase"),
        ("step=2", "phase is missing"),
        ("phase=forward,steps=2", "'steps' is not a key"),
        ("phase=forward,step=0", "step is '0', not a number from 1 on"),
        ("phase=forward,step=1,step=2", "step is given twice"),
        ("phase=forward,rank=2", "rank '2' is not one of the 2"),
    ],
)
def test_a_drill_that_cannot_be_is_refused_with_what_can(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        parse_drills(text, world=2)
    assert "rank: all, first, last or a number" in str(caught.value)


def test_a_rank_that_is_started_with_one_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAIN_MEMORY_FAIL", "step=2")
    with pytest.raises(SetupError, match="TRAIN_MEMORY_FAIL: phase is missing"):
        read_drills(one_rank(RunDir(Path("run"))), Where())
