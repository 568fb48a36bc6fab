"""The budget counts what a hand computation counts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from launcher.rundir.layout import RunDir
from launcher.train.cpu_memory_budget import MIB, MemoryBudget, Unlimited, open_budget
from launcher.train.loop import Trainer
from launcher.train.rank import SetupError
from tests.train.runs import job, one_rank, recipe

FLOAT = 4  # bytes


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_storage_counts_once_from_birth_to_death() -> None:
    with MemoryBudget(MIB) as budget:
        a = torch.zeros(1000)
        view = a[10:].view(9, 110)
        assert budget.live == 1000 * FLOAT
        b = view + 1
        assert budget.live == 1990 * FLOAT
        a.add_(1)
        assert budget.live == 1990 * FLOAT
        del a
        assert budget.live == 1990 * FLOAT, "the view keeps it alive"
        del view, b
        assert budget.live == 0
    assert budget.peak == 1990 * FLOAT


def test_what_was_made_on_the_host_does_not_count_later_until_it_is_moved_to_the_device() -> None:
    with MemoryBudget(MIB) as budget:
        with budget.host_side():
            a = torch.zeros(1000)
            with budget.host_side():
                pass
            b = a + 1
        view = a[10:]
        a.add_(b)
        assert budget.live == 0, "an operator that returns it does not put it into the books"
        c = a + 1
        assert budget.live == 1000 * FLOAT, "what is computed from it is counted"
        del c
        budget.track([view])
        assert budget.live == 1000 * FLOAT
        del a, b, view
        assert budget.live == 0
        another = torch.zeros(1000)  # may be at the same address
        assert budget.live == another.nbytes


def test_a_training_step_costs_parameters_gradients_activations_and_states() -> None:
    batch, width = 8, 32
    parameters = (width * width + width) * FLOAT
    with MemoryBudget(MIB) as budget:
        model = nn.Linear(width, width)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        assert budget.live == parameters
        with budget.host_side():
            x = torch.randn(batch, width)
        assert budget.live == parameters, "host memory is not the device's"
        budget.track({"x": [x]})
        assert budget.live == parameters + batch * width * FLOAT
        out = model(x)
        activations = 2 * batch * width * FLOAT  # input and output
        assert budget.live == parameters + activations
        out.pow(2).sum().backward()
        del out
        gc.collect()
        assert budget.live == 2 * parameters + batch * width * FLOAT
        optimizer.step()
        steps = 2 * FLOAT  # one fp32 step count for weight and bias each
        assert budget.live == 4 * parameters + batch * width * FLOAT + steps


def test_what_would_pass_the_limit_is_refused_like_on_a_gpu() -> None:
    with MemoryBudget(3 * MIB) as budget:
        kept = torch.zeros(MIB // 2)  # 2 MiB
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(MIB // 2)
        assert "Tried to allocate 2.00 MiB" in str(caught.value)
        assert "total capacity of 3.00 MiB of which 1.00 MiB is free" in str(caught.value)
        assert budget.live == kept.nbytes
        torch.zeros(MIB // 4)
        filler = torch.zeros(MIB // 4 - 1)
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 8 bytes.* of which 4 bytes is free"):
            torch.zeros(2)
        del filler


@pytest.mark.usefixtures("one_rank_group")
def test_fsdp_counts_shards_and_gathered_parameters() -> None:
    """One rank: the shard is as large as the parameter, which exists a second time while it is gathered."""
    width = 64
    weights = width * width * FLOAT
    mesh = init_device_mesh("cpu", (1,))
    with MemoryBudget(MIB) as budget:
        model = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        gc.collect()
        assert budget.live == 2 * weights
        with torch.no_grad():
            x = torch.zeros(1, width)
            for layer in model:
                x = layer(x)
        gc.collect()
        assert budget.live == 2 * weights + x.nbytes, "gathered parameters are freed again"
        assert budget.peak >= 3 * weights
        # A budget without room for a gathered layer fails in the gather, which resizes a storage.
        budget.limit = budget.live + weights // 2
        with pytest.raises(torch.OutOfMemoryError):
            model[0](x)


@pytest.mark.usefixtures("one_rank_group")
def test_the_result_of_a_collective_counts_once() -> None:
    """Until it is used, a tensor that holds no memory wraps it."""
    mesh = init_device_mesh("cpu", (1,))
    with MemoryBudget(MIB) as budget:
        x = torch.zeros(1000)
        summed = all_reduce(x, "sum", mesh).view(10, 100)
        gc.collect()
        assert type(summed) is AsyncCollectiveTensor
        assert budget.live == 2 * x.nbytes
        wait_tensor(summed)  # torch keeps the result until somebody waits for it


@pytest.mark.usefixtures("one_rank_group")
def test_a_trainer_holds_each_buffer_once(tmp_path: Path) -> None:
    """The first values of a buffer that is in no checkpoint are kept in host memory."""
    made = job(task="normed:Normed")
    with MemoryBudget(2**30) as budget:
        rank = one_rank(RunDir(tmp_path), job=made, recipe=recipe("none", micro=8))
        trainer = Trainer(rank, budget.where, budget)
        assert dict(trainer.model.named_buffers()).keys() - trainer.model.state_dict().keys()
        gc.collect()
        held = {t.untyped_storage() for t in (*trainer.model.parameters(), *trainer.model.buffers())}
        assert budget.live == sum(storage.nbytes() for storage in held)


def test_without_the_variable_nothing_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAIN_MEMORY_BUDGET", raising=False)
    assert isinstance(open_budget(torch.device("cpu")), Unlimited)
    monkeypatch.setenv("TRAIN_MEMORY_BUDGET", "64MiB")
    budget = open_budget(torch.device("cpu"))
    assert isinstance(budget, MemoryBudget) and budget.limit == 64 * MIB
    monkeypatch.setenv("TRAIN_MEMORY_BUDGET", "64 apples")
    with pytest.raises(SetupError, match="TRAIN_MEMORY_BUDGET: '64 apples' is not a size"):
        open_budget(torch.device("cpu"))


def test_each_peak_is_taken_once_and_the_highest_stays() -> None:
    with MemoryBudget(MIB) as budget:
        kept = torch.zeros(1000)
        torch.zeros(2000)
        assert (budget.take_peak(), budget.take_peak()) == (3000 * FLOAT, kept.nbytes)
        torch.zeros(500)
        assert (budget.take_peak(), budget.peak) == (1500 * FLOAT, 3000 * FLOAT)


def test_what_is_on_the_meta_device_takes_no_memory() -> None:
    with MemoryBudget(MIB) as budget:
        nn.Linear(4096, 4096, device="meta")
        assert budget.live == budget.peak == 0


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_takes_the_memory_of_its_indices_and_values(layout: torch.layout) -> None:
    with MemoryBudget(MIB) as budget:
        with budget.host_side():
            dense = torch.eye(100)
        sparse = dense.to_sparse(layout=layout)
        # Rows and columns in one table, to which the others add where each row or column begins.
        indices = 2 * 100 if layout == torch.sparse_coo else 2 * 100 + 101
        assert budget.live == 100 * FLOAT + 8 * indices
        with budget.host_side():
            whole = (sparse @ dense).nbytes
        assert whole == dense.nbytes
        del sparse
        assert budget.live == 0
