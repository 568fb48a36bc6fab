"""An optimizer on the host: gradients leave the device in the backward pass, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.rundir.layout import RunDir
from launcher.spec import variables
from launcher.spec.events import Downgrade, Resumed
from launcher.spec.verdict import EXIT_OOM
from launcher.train.cpu_memory_budget import MIB, MemoryBudget
from launcher.train.optimizers.host_gradients import HostGradients
from tests.train.runs import job, losses, measure, prepare, recipe, start

FIELDS: dict[str, Any] = {"train": {"clip_norm": 0.05, "probe": "never", "checkpoint_every": 2}}
SUPERVISED = {variables.SUPERVISED: "1"}


@pytest.mark.parametrize(
    ("cases", "ranks", "per_node"),
    [
        pytest.param("short", 2, 2, marks=pytest.mark.slow),
        pytest.param("one", 1, 1, marks=pytest.mark.slow),
        pytest.param("two", 2, 2, marks=pytest.mark.slow),
        pytest.param("four", 4, 2, marks=pytest.mark.thorough),
    ],
)
def test_clipping_and_accumulation_give_the_same_weights_bit_for_bit(
    tmp_path: Path, cases: str, ranks: int, per_node: int
) -> None:
    measure("host_gradients.py", tmp_path, ranks=ranks, per_node=per_node, env={"CASES": cases})
    for rank in range(ranks):
        for name, found in json.loads((tmp_path / f"rank {rank}.json").read_text()).items():
            plain, moved = found["none"], found[name.split()[0]]
            assert {one["digest"] for one in found.values()} == {plain["digest"]}, name
            assert moved["steps"] == plain["steps"], name
            assert all(norm > 0.05 for _, _, norm, _ in moved["steps"]), name
            on_device, everywhere, trained = moved["gradients"]
            assert plain["gradients"][0] == plain["gradients"][1] == everywhere == trained, name
            if name.endswith("zero1"):  # DDP's buckets stay
                assert on_device == everywhere
                continue
            assert on_device == 0, name
            # The optimizer's states have left as well.
            assert plain["peak"] - moved["peak"] > everywhere, name


def drilled(path: Path, offload: str, sharding: str, drill: str) -> RunDir:
    """Memory runs out in the second of two micro-batches, beside the gradients of the first one."""
    ranks = 1 if sharding == "none" else 2
    run = prepare(path, job(**FIELDS))
    chosen = recipe(sharding, 4 // ranks, 2, offload=offload)
    ended = start(run, chosen, ranks=ranks, env={"TRAIN_MEMORY_FAIL": drill})
    assert ended.codes == dict.fromkeys(range(ranks), 0), ended.output
    [turn] = [event for event in run.read_events() if isinstance(event, Downgrade)]
    assert turn.in_process and turn.step == 4
    return run


@pytest.mark.parametrize("sharding", [pytest.param("fsdp", marks=pytest.mark.slow), "none"])
def test_a_step_is_repeated_in_process_without_the_gradients_of_the_failed_try(
    tmp_path: Path, sharding: str
) -> None:
    # A step of two micro-batches allocates 78 and 44 times in its backward passes, half of it in the second.
    place, micro = (60, 2) if sharding == "fsdp" else (40, 4)
    drill = f"step=4,phase=backward,rank=last,allocation={place},micro_batch={micro}"
    ended = {
        offload: losses(drilled(tmp_path / offload, offload, sharding, drill))
        for offload in ("none", "cpu-optimizer")
    }
    assert list(ended["none"]) == [1, 2, 3, 4, 5, 6]
    assert ended["none"] == ended["cpu-optimizer"]


@pytest.mark.slow
def test_memory_that_runs_out_in_the_update_restarts_from_the_last_complete_step(tmp_path: Path) -> None:
    chosen = recipe("fsdp", 2, 2, offload="cpu-optimizer")
    straight, run = (prepare(tmp_path / name, job(**FIELDS)) for name in ("straight", "run"))
    assert start(straight, chosen).codes == {0: 0, 1: 0}
    ended = start(run, chosen, env={**SUPERVISED, "TRAIN_MEMORY_FAIL": "step=4,phase=optimizer,rank=1"})
    assert EXIT_OOM in ended.codes.values(), ended.output
    assert list(losses(run)) == [1, 2, 3]
    again = start(run, chosen, env=SUPERVISED)
    assert again.codes == {0: 0, 1: 0}, again.output
    assert [event.step for event in run.read_events() if isinstance(event, Resumed)] == [3]
    assert losses(run) == losses(straight)


def test_a_whole_gradient_waits_for_the_next_one_and_a_failed_pass_leaves_none() -> None:
    """Four matrices of 1 MiB and an idle one; the pass fails in the first of them, the last of the pass."""
    fails = False

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            live.append(budget.live)
            if fails:
                raise torch.OutOfMemoryError("of a test")
            return gradient

    live: list[int] = []
    with MemoryBudget(64 * MIB) as budget:
        blocks = [nn.Linear(512, 512, bias=False) for _ in range(4)]
        idle = nn.Parameter(torch.ones(3))
        weights = [block.weight for block in blocks]
        gradients = HostGradients([*weights, idle], budget.host_side)

        def passes() -> None:
            x = torch.ones(1, 512)
            for block in blocks:
                x = Fails.apply(block(x))
            x.sum().backward()

        before = budget.live
        for _ in range(2):
            passes()
        assert budget.live == before
        # At the second matrix and later, one gradient is there.
        assert [round((one - before) / MIB) for one in live] == [0, 1, 1, 1] * 2
        assert gradients.of(idle) is None and all(weight.grad is None for weight in weights)
        fails = True
        gradients.drop()
        with pytest.raises(torch.OutOfMemoryError):
            passes()
        gradients.drop()
        assert all(gradients.of(weight) is None for weight in weights)
        fails = False
        passes()
        moved = [gradients.of(weight) for weight in weights]
    without = [nn.Linear(512, 512, bias=False) for _ in range(4)]
    x = torch.ones(1, 512)
    for block, weight in zip(without, weights, strict=True):
        block.weight = nn.Parameter(weight.detach().clone())
        x = block(x)
    x.sum().backward()
    assert all(torch.equal(a, b.weight.grad) for a, b in zip(moved, without, strict=True))
