"""Ranks that share a copy of the model find out that their data differ, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from launcher.train.data.same_samples import APART, COMPARED, SameSamples, are_divided
from tests.train.runs import error, job, one_rank, prepare, recipe, start

WORLD = 8
MESHES = [{"pipeline": 2, "tensor": 2}, {"pipeline": 4}, {"tensor": 8, "sharding": "none"}]


def batch(seed: int) -> dict[str, Any]:
    """What a task may fetch: positive values, numbers of classes, strings, a mask and complex numbers."""
    drawn = torch.Generator().manual_seed(seed)
    return {
        "image": torch.rand((3, 4, 64, 64), generator=drawn),
        "class": [torch.randint(1000, (8,), generator=drawn)],
        "name": "a name",
        "mask": torch.rand((5, 3), generator=drawn) < 0.5,
        "spectrum": torch.randn((2, 9), generator=drawn, dtype=torch.complex64),
        "scores": torch.full((2, 2), -torch.inf),
    }


def apart(path: Path, mesh: dict[str, Any], of_rank: Callable[[int, int], Any], count: int = 2) -> float:
    """The sum over all ranks after `count` micro-batches. `of_rank`: number of a rank, and of its data -> a
    micro-batch."""
    run, total = prepare(path, job()), 0.0
    for number in range(WORLD):
        rank = replace(one_rank(run), number=number, world=WORLD, recipe=recipe(**mesh))
        samples = SameSamples(rank)
        for _ in range(count):
            samples.look(of_rank(number, rank.coordinates.data), "data")
        total += samples.difference()
        assert samples.difference() == 0
    return abs(total)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_equal_data_count_as_equal_and_others_do_not(mesh: dict[str, Any], tmp_path: Path) -> None:
    assert apart(tmp_path, mesh, lambda _, data: batch(data)) < 1e-6
    assert apart(tmp_path, mesh, lambda number, _: batch(number)) > APART
    assert apart(tmp_path, mesh, lambda number, data: batch(-1 if number == WORLD - 1 else data)) > APART


@pytest.mark.parametrize("key", ["image", "class", "mask", "spectrum"])
def test_one_tensor_that_differs_is_enough(key: str, tmp_path: Path) -> None:
    mesh = {"pipeline": 8, "sharding": "none"}
    assert apart(tmp_path, mesh, lambda number, _: {**batch(0), key: batch(number)[key]}) > APART


@pytest.mark.parametrize("of", [float, lambda number: numpy.full((2, 3), number)], ids=["number", "array"])
def test_numbers_and_arrays_are_compared_too(of: Any, tmp_path: Path) -> None:
    assert apart(tmp_path, {"pipeline": 2}, lambda number, _: [{"value": of(number)}]) > APART
    assert apart(tmp_path, {"pipeline": 2}, lambda number, data: [{"value": of(data)}]) < 1e-9


@pytest.mark.parametrize("collate", [torch.stack, list])
def test_the_same_samples_in_another_order_are_a_difference(collate: Any, tmp_path: Path) -> None:
    rows = torch.randn((16, 64), generator=torch.Generator().manual_seed(0))
    rows[3, 5] = torch.nan
    assert apart(tmp_path, {"pipeline": 2}, lambda number, _: collate([*rows.roll(number, 0)])) > APART
    assert apart(tmp_path, {"pipeline": 2}, lambda number, _: collate([*rows])) < 1e-9


def test_rounding_is_no_difference(tmp_path: Path) -> None:
    def rounded(number: int, data: int) -> Any:
        return batch(data)["image"] * (1 + number * 1e-7)

    assert apart(tmp_path, {"pipeline": 2}, rounded) < APART / 10


def test_only_the_first_micro_batches_are_compared(tmp_path: Path) -> None:
    samples = SameSamples(replace(one_rank(prepare(tmp_path, job())), world=2, recipe=recipe(tensor=2)))
    for _ in range(COMPARED):
        samples.look(torch.ones(1), "data")
    assert samples.difference() != 0
    samples.look(torch.ones(1), "data")
    assert samples.difference() == 0
    samples.look(torch.ones(1), "evaluation")
    assert samples.difference() != 0


@pytest.mark.slow
def test_a_dataset_without_a_seed_ends_a_pipeline_in_its_first_step(tmp_path: Path) -> None:
    run = prepare(tmp_path, job(task="conditioned:Unseeded", steps=1))
    ended = start(run, recipe("none", micro=2, accumulation=4, pipeline=2))
    assert "is not the same on every rank" in ended.output
    for number in range(2):
        told = error(run.attempt(0), number)
        assert told["failure"] == "user-error" and "got different samples" in told["exception"]


def test_ranks_with_different_numbers_of_samples_do_not_begin(tmp_path: Path) -> None:
    run = prepare(tmp_path, job(task="ragged:Divided", args={"samples": 33}, train={"eval_every": 2}))
    start(run, recipe("ddp"))
    for number in range(2):
        told = error(run.attempt(0), number)
        assert told["failure"] == "user-error"
        assert 'data("eval") has 17 samples on rank 0, but 16 on rank 1.' in told["exception"]


@pytest.mark.parametrize("couples", [False, True])
def test_ranks_with_different_samples_under_one_index_say_so(couples: bool, tmp_path: Path) -> None:
    declared = {"couples_samples": couples}
    run = prepare(tmp_path, job(task="ragged:Divided", args={"samples": 33}, steps=1, model=declared))
    ended = start(run, recipe("ddp"))
    assert ended.codes == {0: 0, 1: 0} and "is not the same on every rank" in ended.output


@pytest.mark.parametrize(
    ("numbers", "divided"),
    [
        ([[1.0, 1.0], [2.0, 2.0]], True),
        ([[1.0, 1.0], [1.0 + APART / 2, 1.0]], False),
        ([[1.0, 1.5], [2.0, 2.0]], False),  # random numbers without a seed, which do no harm
        ([[], [2.0, 2.0]], False),  # a sample that could not be fetched
    ],
)
def test_a_divided_dataset_is_told_from_random_samples(numbers: list[list[float]], divided: bool) -> None:
    assert are_divided(numbers) is divided
