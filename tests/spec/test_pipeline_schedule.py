"""The cut of a model into stages, and the order of their passes."""

from __future__ import annotations

from collections import Counter

import pytest

from launcher.spec.pipeline_schedule import (
    SCHEDULES,
    Action,
    DeadlockError,
    Pass,
    balanced,
    bubble,
    finish,
    held_beside,
    in_groups,
    one_f_one_b,
    zero_bubble,
)
from launcher.spec.recipe import Recipe, Schedule
from tests.train.runs import recipe


def test_the_stages_of_a_report_and_of_a_model_with_a_large_vocabulary() -> None:
    assert balanced([1] * 57, 0, 0, 2) == (28, 29)
    assert balanced([10] * 7, before=25, after=3, stages=3) == (1, 3, 3)
    assert balanced([5, 1, 1, 1, 1, 1], 0, 0, 2) == (1, 5)
    assert balanced([1, 1, 1], 100, 100, 3) == (1, 1, 1)
    with pytest.raises(ValueError, match="2 blocks cannot be divided into 3 stages"):
        balanced([1, 1], 0, 0, 3)


SIZES = [(2, 1), (2, 5), (3, 2), (4, 4), (4, 11), (16, 40)]
CASES = [
    *((schedule, *size, 1) for schedule in SCHEDULES for size in SIZES),
    *(("1f1b", *size) for size in ((2, 2, 2), (2, 6, 3), (3, 3, 2), (4, 8, 2), (4, 12, 5), (16, 48, 3))),
]


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches", "chunks"), CASES)
def test_no_rank_waits_for_one_that_waits_and_the_bubble_is_that_of_the_papers(
    schedule: Schedule, ranks: int, micro_batches: int, chunks: int
) -> None:
    table = SCHEDULES[schedule](ranks, micro_batches, chunks)
    kinds: list[Pass] = ["forward", "backward"]
    if schedule == "zero-bubble":
        kinds.append("weights")
    for actions in table:
        assert Counter(actions) == Counter(
            Action(kind, index, chunk)
            for kind in kinds
            for index in range(micro_batches)
            for chunk in range(chunks)
        )
    assert len(finish(table)) == ranks
    asked = recipe(schedule=schedule, pipeline=ranks, accumulation=micro_batches, virtual_stages=chunks)
    plain = (ranks - 1) / (micro_batches * chunks)
    if schedule != "zero-bubble":
        assert bubble(asked) == pytest.approx(plain)
        return
    for later in (0.0, 0.3, 0.5):
        # (ranks - 1) x (forward + gradients of inputs - gradients of weights): table 2 of the paper.
        shorter = (1 + 2 * (1 - later) - 2 * later) / 3
        if micro_batches >= ranks:
            assert bubble(asked, later) == pytest.approx(plain * shorter)
        else:  # the end of the step has fewer gradients of weights than the rank waits for
            assert plain * shorter <= bubble(asked, later) + 1e-9 <= plain + 2e-9


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_what_a_rank_holds_follows_from_its_actions(ranks: int, micro_batches: int) -> None:
    for rank in range(ranks):
        one_f_one_b = recipe(schedule="1f1b", pipeline=ranks, accumulation=micro_batches)
        most = min(ranks - rank, micro_batches) - 1
        assert _most(one_f_one_b, rank, again=False) == {"forward": most, "backward": most}
        if micro_batches > ranks - rank:  # it goes on as it began
            assert _most(one_f_one_b, rank, again=True) == {"forward": most, "backward": most}
        gpipe = recipe(schedule="gpipe", pipeline=ranks, accumulation=micro_batches)
        most = micro_batches - 1
        assert _most(gpipe, rank, again=False) == {"forward": most, "backward": most}
        # No forward pass follows a backward pass, so none runs beside gradients.
        assert _most(gpipe, rank, again=True) == ({"backward": most - 1} if most else {})


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_zero_bubble_has_as_many_unfinished_micro_batches_as_the_first_rank_of_1f1b(
    ranks: int, micro_batches: int
) -> None:
    asked = recipe(schedule="zero-bubble", pipeline=ranks, accumulation=micro_batches)
    for rank in range(ranks):
        moments = held_beside(asked, rank)
        assert max(1 + one.held[0] + one.later for one in moments) == min(ranks, micro_batches)
        assert max(one.held[0] for one in moments) == min(ranks - rank, micro_batches) - 1
        assert max(one.later for one in moments) == min(rank, micro_batches - 1)


def _most(asked: Recipe, rank: int, *, again: bool) -> dict[str, int]:
    """The most micro-batches that wait during each kind of pass."""
    found: dict[str, int] = {}
    for one in held_beside(asked, rank):
        if one.again == again:
            found[one.kind] = max(found.get(one.kind, 0), one.held[0])
    return found


def test_an_interleaved_rank_holds_parts_of_more_micro_batches() -> None:
    """Megatron-LM begins with (ranks - rank - 1) x 2 + (chunks - 1) x ranks forward passes."""
    asked = recipe(pipeline=4, accumulation=8, virtual_stages=2)
    most = [max(1 + sum(one.held) for one in held_beside(asked, rank)) for rank in range(4)]
    assert most == [11, 9, 7, 5]
    # The last rank has the last stage's loss once.
    assert {one.held[1] for one in held_beside(asked, 3) if one.chunk == 1} == {0}
    # A chunk's first backward pass meets no gradients of its own, though the chunk behind it has some.
    firsts = {(one.chunk, one.again) for one in held_beside(asked, 0) if one.kind == "backward"}
    assert firsts == {(0, False), (0, True), (1, False), (1, True)}


def test_interleaved_forward_passes_alone_do_not_wait_for_each_other_either() -> None:
    """An evaluation, whose last micro-batches may be fewer than the ranks."""
    for ranks, chunks, batches in ((2, 2, 3), (4, 2, 5), (4, 3, 17), (8, 4, 12)):
        forward = tuple(
            Action("forward", start + index, chunk)
            for start in range(0, batches, ranks)
            for index, chunk in in_groups(ranks, min(ranks, batches - start), chunks)
        )
        assert len(finish((forward,) * ranks)) == ranks


def test_a_schedule_whose_stages_wait_for_each_other_is_found() -> None:
    forward, backward = Action("forward", 0), Action("backward", 0)
    with pytest.raises(DeadlockError, match="all ranks wait: 0 in backward 0, 1 in forward 0"):
        finish(((backward, forward), (forward, backward)))
    # The second message waits until the first is received, so an order of its own is not possible either.
    other = Action("forward", 1)
    with pytest.raises(DeadlockError, match="all ranks wait: 0 in forward 1, 1 in forward 1"):
        finish(((forward, other), (other, forward)))


def test_1f1b_is_the_order_of_the_paper() -> None:
    order = [" ".join(f"{kind[0]}{at}" for kind, at, _ in actions) for actions in one_f_one_b(3, 4)]
    assert order == ["f0 f1 f2 b0 f3 b1 b2 b3", "f0 f1 b0 f2 b1 f3 b2 b3", "f0 b0 f1 b1 f2 b2 f3 b3"]


def test_zero_bubble_is_the_order_of_the_paper() -> None:
    """Figure 3, ZB-H1."""
    order = [" ".join(f"{kind[0]}{at}" for kind, at, _ in actions) for actions in zero_bubble(3, 4)]
    assert order == [
        "f0 f1 f2 b0 w0 f3 b1 w1 b2 w2 b3 w3",
        "f0 f1 b0 f2 b1 w0 f3 b2 w1 b3 w2 w3",
        "f0 b0 f1 b1 f2 b2 w0 f3 b3 w1 w2 w3",
    ]


def test_the_interleaved_order_is_that_of_megatron_lm() -> None:
    """A capital letter: the second stage of a rank."""
    order = [
        " ".join(f"{kind[0].upper() if chunk else kind[0]}{at}" for kind, at, chunk in actions)
        for actions in one_f_one_b(2, 4, 2)
    ]
    assert order == [
        "f0 f1 F0 F1 f2 B0 f3 B1 F2 b0 F3 b1 B2 B3 b2 b3",
        "f0 f1 F0 B0 F1 B1 f2 b0 f3 b1 F2 B2 F3 B3 b2 b3",
    ]
