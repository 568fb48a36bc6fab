"""Which samples make which step."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from transformers import BatchEncoding

from launcher.spec.verdict import FETCHED, STILL_FETCHING
from launcher.tasks.gpt import PydocGPT, documentation
from launcher.train.data.data import EvaluationData, Order, TrainingData, shuffled, to_device
from launcher.train.data.loading import SampleError
from launcher.train.data.slow_fetch import SlowFetch
from launcher.train.error_report import classify, in_a_line
from launcher.train.phase import Where
from launcher.train.rank import SetupError
from launcher.train.rng import seed_all
from launcher.train.task import TaskError
from tests.train.runs import job, one_rank, prepare, recipe


@dataclass(frozen=True)
class Batch:
    images: torch.Tensor
    boxes: list[torch.Tensor]
    path: str = "a.png"


def test_batches_that_are_objects_are_moved_to_the_device() -> None:
    """The meta device stands in for a GPU. The sizes of a PackedSequence stay in host memory."""
    tensor = torch.ones(2)
    batch = {"dataclass": Batch(tensor, [tensor]), "encoding": BatchEncoding({"ids": tensor}), "n": 3}
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved, sequence = to_device((batch, packed), torch.device("meta"))
    assert moved["dataclass"].images.is_meta and moved["dataclass"].boxes[0].is_meta
    assert moved["encoding"]["ids"].is_meta and (moved["dataclass"].path, moved["n"]) == ("a.png", 3)
    assert sequence.data.is_meta and sequence.batch_sizes.device.type == "cpu"
    assert not batch["dataclass"].images.is_meta


@pytest.fixture(params=["kept", "computed"])
def order_is(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "computed":
        monkeypatch.setattr("launcher.train.data.data.MOST_LISTED", 0)


@pytest.mark.usefixtures("order_is")
def test_the_samples_of_a_step_depend_on_seed_epoch_and_step_only() -> None:
    forwards = Order(103, 8, seed=1)
    steps = [forwards.step(step) for step in range(1, 40)]
    fresh = Order(103, 8, seed=1)
    assert [fresh.step(step) for step in reversed(range(1, 40))] == steps[::-1]
    assert Order(103, 8, seed=2).step(1) != steps[0]


@pytest.mark.usefixtures("order_is")
def test_an_epoch_has_each_sample_at_most_once_and_epochs_differ() -> None:
    order = Order(103, 8, seed=0)
    first = [index for step in range(1, 13) for index in order.step(step)]
    second = [index for step in range(13, 25) for index in order.step(step)]
    assert (order.steps_per_epoch, order.left_out) == (12, 7)
    assert len(set(first)) == len(set(second)) == 96
    assert first != second


@pytest.mark.parametrize("samples", [10**11, sys.maxsize])
def test_data_without_an_end_are_shuffled_in_the_memory_of_a_step(samples: int) -> None:
    order = Order(samples, 4096, seed=0)
    first, last = order.step(1), order.step(order.steps_per_epoch)
    assert len({*first, *last}) == 2 * 4096 and min(first + last) >= 0 and max(first + last) < samples
    assert abs(sum(first) / len(first) / samples - 0.5) < 0.05, "from everywhere, by ten standard deviations"


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 1000])
def test_a_computed_order_has_each_number_once(count: int) -> None:
    assert sorted(shuffled(range(count), count, seed=0)) == [*range(count)]


@pytest.mark.parametrize(("world", "micro"), [(1, 8), (1, 1), (2, 4), (2, 1), (4, 2), (8, 1)])
def test_no_split_changes_the_samples_of_a_step(world: int, micro: int) -> None:
    data = list(range(50))
    seen: list[Any] = []
    for rank in range(world):
        split = recipe(micro=micro, accumulation=8 // world // micro)
        batches = list(TrainingData(data, list, job(), split, rank, world).micro_batches(3))
        assert {len(batch) for batch in batches} == {micro}
        seen += [sample for batch in batches for sample in batch]
    assert seen == Order(50, 8, seed=0).step(3)


class Readers(Dataset[int]):
    """Each sample is the process that reads it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_workers_are_forked_once_and_begin_anew_at_another_step() -> None:
    """Workers that were forked later would share open files with this process, which reads samples, too."""
    data = TrainingData(Readers(), list, job(train={"workers": 2}), recipe(micro=4, accumulation=2), 0, 1)
    readers = [{pid for batch in data.micro_batches(step) for pid in batch} for step in (1, 2, 5)]
    assert len(readers[0]) == 2 and readers[0] == readers[1] == readers[2] and os.getpid() not in readers[0]
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_what_collate_draws_differs_from_batch_to_batch_and_not_with_the_workers(kind: Any) -> None:
    def batches(first: int, workers: int) -> list[Any]:
        asked = job(train={"workers": workers})
        data = TrainingData(kind(list(range(50))), _masked, asked, recipe(micro=4, accumulation=2), 0, 1)
        found = [batch for step in range(first, 5) for batch in data.micro_batches(step)]
        for worker in multiprocessing.active_children():  # the collection of garbage waits 5 s for each
            worker.terminate()
            worker.join()
        return found

    whole = batches(1, workers=0)
    assert len(set(whole)) == len(whole) == 8
    assert batches(1, workers=2) == whole
    assert batches(3, workers=0) == batches(3, workers=2) == whole[4:]


def test_a_subclass_of_list_that_augments_is_seeded_by_sample() -> None:
    class Augments(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index), random.random()

    def samples(micro: int) -> list[Any]:
        split = recipe(micro=micro, accumulation=8 // micro)
        made = TrainingData(Augments(range(50)), list, job(), split, 0, 1).micro_batches(2)
        return [sample for batch in made for sample in batch]

    assert samples(8) == samples(2)
    assert len({drawn for _, drawn in samples(8)}) == 8


class Fails(Dataset[torch.Tensor]):
    """Its sample 7 raises `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise self.error
        return index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("raised", "failure"),
    [
        (KeyError("caption"), "user-error"),
        (StopIteration(), "user-error"),  # which by itself would only end the step, with fewer samples
        (RuntimeError("the server timed out after 5 s"), "user-error"),
        (MemoryError(), "host-oom"),
        (OSError(28, "No space left on device"), "disk-full"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_sample_that_raises_is_named(raised: Exception, failure: str, workers: int) -> None:
    data = TrainingData(Fails(raised), list, job(train={"workers": workers}), recipe(micro=8), 0, 1)
    with pytest.raises(SampleError) as error:
        list(data.micro_batches(1))
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()
    said = f'SampleError: sample 7 of data("train") raised {type(raised).__name__}: {raised}'
    assert in_a_line(error.value).partition("\n")[0] == said
    assert "raise self.error" in "".join(traceback.format_exception(error.value))
    assert classify(error.value, Where("data", 1, users=True)) == failure


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("raised", "failure"),
    [
        (StopIteration(), "user-error"),  # which by itself would only end the step, with fewer samples
        (SystemExit(0), "user-error"),
        (KeyError("length"), "user-error"),
        (MemoryError(), "host-oom"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_samples_whose_collation_raises_are_named(raised: BaseException, failure: str, workers: int) -> None:
    def collate(_: list[Any]) -> Any:
        raise raised

    data = TrainingData(list(range(8)), collate, job(train={"workers": workers}), recipe(micro=8), 0, 1)
    with pytest.raises(SampleError) as error:
        list(data.micro_batches(1))
    indices = ", ".join(str(sample) for sample in data.samples(1, 1))
    said = f'SampleError: collate() of samples {indices} of data("train") raised {type(raised).__name__}: '
    assert in_a_line(error.value).startswith(said)
    assert "in collate" in "".join(traceback.format_exception(error.value))
    assert classify(error.value, Where("data", 1, users=True)) == failure
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()


def _masked(_: list[Any]) -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


class Noisy(dict[str, torch.Tensor]):
    def __getitem__(self, key: str) -> torch.Tensor:
        return super().__getitem__(key) + torch.rand(()) + random.random() + float(numpy.random.rand())


class Draws(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return Noisy(x=torch.tensor(index))["x"]


NOISY = [Noisy(x=torch.tensor(index)) for index in range(50)]
PLAIN = [{"x": torch.tensor(index), "name": ("sample", index)} for index in range(50)]


@pytest.mark.parametrize(
    ("data", "collate"),
    [(Draws(), default_collate), (NOISY, default_collate), (PLAIN, default_collate), (PLAIN, _masked)],
    ids=["dataset", "samples that draw when read", "plain samples", "collate"],
)
def test_fetching_neither_follows_nor_changes_the_random_numbers_of_training(data: Any, collate: Any) -> None:
    def fetched() -> str:
        feed = TrainingData(data, collate, job(), recipe(micro=4, accumulation=2), 0, 1)
        return str([*feed.micro_batches(2), feed.samples(2, 1)])

    def state() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())

    seed_all(1)
    before, first = state(), fetched()
    assert state() == before
    seed_all(2)
    assert fetched() == first


@pytest.mark.parametrize("samples", [1, 5, 7, 12, 13])
def test_evaluation_counts_each_sample_once_in_equally_many_batches_per_rank(samples: int) -> None:
    ranks = [list(EvaluationData(list(range(samples)), list, 3, rank, 2).batches()) for rank in range(2)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch for batches in ranks for batch, _ in batches)
    counted = [sample for batches in ranks for batch, counts in batches if counts for sample in batch]
    assert sorted(counted) == list(range(samples))


def test_data_that_cannot_make_the_batch_is_refused_with_numbers() -> None:
    with pytest.raises(SetupError, match=r"has 5 samples, but batch\.global is 8"):
        Order(5, 8, seed=0)
    with pytest.raises(SetupError, match=r"4 x grad_accum 1 x 1 data-parallel ranks is not batch\.global 8"):
        TrainingData(list(range(9)), list, job(), recipe(micro=4), 0, 1)
    with pytest.raises(TaskError, match="generator has no length"):
        TrainingData((n for n in range(9)), list, job(), recipe(micro=4), 0, 2)
    for data in (Stream(), DataLoader(list(range(9)))):  # type: ignore[arg-type]
        with pytest.raises(TaskError, match=r"no length or no \[index\].*without a DataLoader"):
            TrainingData(data, list, job(), recipe(micro=4), 0, 2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))

    def __len__(self) -> int:
        return 9


def test_the_held_out_text_is_not_in_the_training_text() -> None:
    task = PydocGPT(context=64)
    train, held_out = (
        b"".join(bytes(w[:-1].tolist()) for w in task.data(part)) for part in ("train", "eval")
    )
    text = documentation()
    assert text.startswith(train) and held_out in text[len(train) :]
    assert len(held_out) == pytest.approx(len(text) / 10, rel=0.02)
    windows = [held_out[i : i + 64] for i in range(0, len(held_out), 64)]
    assert sum(window in train for window in windows) < 0.02 * len(windows)


def test_a_rank_that_fetches_for_long_tells_so_once_and_when_it_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"collective_timeout": 20}
    slow = SlowFetch(one_rank(prepare(tmp_path, job()), number=1, world=2, job=job(train=train)))
    slow.look()
    with slow.fetching():
        slow.look()
        assert not capsys.readouterr().out
        slow._limit = 0.0
        slow.look()
        slow.look()
        [line] = capsys.readouterr().out.splitlines()
        assert line.startswith(f"rank 1 {STILL_FETCHING} after ") and "give up after 20 s" in line
    assert capsys.readouterr().out.startswith(f"rank 1 {FETCHED} after ")
