"""Memory runs out within a step: the run goes on in the same processes, on every rank, as if it had known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launcher.report.history import history
from launcher.rundir.files import read_json_lines
from launcher.rundir.layout import RunDir
from launcher.rundir.time import seconds_of
from launcher.spec.events import Downgrade
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.phase import Where
from launcher.train.recovery.recovery import Recovery
from tests.train.runs import job, measure, one_rank, prepare, recipe, start


@pytest.fixture(scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 4))])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A hang ends in the timeout. With 4 ranks they pretend to be on two nodes."""
    return measure("lowers.py", tmp_path_factory.mktemp("lowers"), request.param, min(2, request.param))


@pytest.mark.slow
def test_all_is_bit_for_bit_as_in_a_run_that_changed_in_time(
    measured: dict[str, Any],
) -> None:
    for name, cases in measured["lowered"].items():
        for text, found in cases.items():
            print(f"{name:20} {text:60} {found['seconds']:.2f} s")
            assert found["recipe"], (name, text)
            assert not any(found["different"]), (name, text, found["different"])


@pytest.mark.slow
def test_no_step_is_lost_or_done_twice_and_the_events_tell_where_it_was(measured: dict[str, Any]) -> None:
    for name, cases in measured["lowered"].items():
        for text, found in cases.items():
            assert found["steps"] == [1, 2, 3, 4], (name, text)
            asked = dict(part.split("=") for part in text.split(","))
            assert found["events"] == [[int(asked["step"]), asked["phase"], True]], (name, text)


@pytest.mark.slow
def test_nothing_is_left_in_memory(measured: dict[str, Any]) -> None:
    left = [found["left"] for cases in measured["lowered"].values() for found in cases.values()]
    assert not any(left), left


@pytest.mark.slow
def test_a_batch_larger_than_what_was_probed_is_probed_before_any_rank_computes_with_it(
    measured: dict[str, Any],
) -> None:
    if (found := measured.get("outgrown")) is None:
        pytest.skip("tried on two ranks")
    assert found["sizes"][0] == 8 and found["sizes"][-1] < 8, found
    assert ["downgrade", "probe"] in found["events"]
    assert not [one for one in found["events"] if one[1] in ("forward", "backward")], found
    assert found["steps"] == [1, 2, 3, 4]


@pytest.mark.slow
def test_batches_of_any_number_of_tensors_are_probed_a_few_times_and_trained_with(
    measured: dict[str, Any],
) -> None:
    """Two batches of one step, one with more tensors, the other with larger ones."""
    if (found := measured.get("varying")) is None:
        pytest.skip("tried on one and two ranks")
    assert found["steps"] == [1, 2, 3, 4] and not any(found["different"]), found
    assert 2 < len(found["asked"]) < 20, found
    assert set(found["asked"]) == {1}, "the planned micro-batch fits each time"


@pytest.mark.slow
def test_a_failure_that_passed_is_forgiven_once(measured: dict[str, Any]) -> None:
    if (found := measured.get("climbs")) is None:
        pytest.skip("tried on two ranks")
    assert found["passes"] == [["downgrade", 2], ["climb", 5]]
    assert found["comes again"] == [["downgrade", 2], ["climb", 5], ["downgrade", 6]]


@pytest.mark.slow
def test_what_was_thrown_away_is_lost_and_not_part_of_the_step_that_counts(tmp_path: Path) -> None:
    """Four losses of 0.1 s a step, memory runs out after the second one or later; then eight."""
    run = prepare(tmp_path / "run", job(steps=4, args={"pace": 0.1}, train={"probe": "never"}))
    drill = {"TRAIN_MEMORY_FAIL": "step=3,phase=backward,allocation=50"}
    ended = start(run, recipe("none", micro=2, accumulation=4), ranks=1, env=drill)
    assert ended.codes == {0: 0}, ended.output
    [turn] = [event for event in run.read_events() if isinstance(event, Downgrade)]
    lines = read_json_lines(run.metrics)
    lost = lines[2]["seconds_lost"]
    assert 0.2 <= turn.seconds <= lost + 1e-3 and turn.step == 3
    assert not any("seconds_lost" in line for line in lines if line["step"] != 3)
    assert all(line["seconds"] >= 0.8 for line in lines[2:]), lines
    ends = [seconds_of(line["time"]) for line in lines]
    assert lost + lines[2]["seconds"] <= ends[2] - ends[1] + 1e-3, lines
    head, _, told = history(run)
    assert head == f"history   1 downgrade in process: {turn.seconds:.2g} s lost"
    speeds = [1 / lines[at]["seconds"] for at in (1, 3)]
    assert f"{speeds[0]:.3g} -> {speeds[1]:.3g} steps/s" in told


def alone(where: Where) -> Recovery:
    return Recovery(nn.Linear(2, 2), one_rank(RunDir(Path("run"))), where, Unlimited(), end=pytest.fail)


def test_a_discarded_pass_leaves_no_gradient_of_a_parameter_that_it_had_taken_out_of_the_model() -> None:
    recovery = alone(Where("forward", 3, users=True))
    weight: Any = recovery.model.weight
    weight.grad = torch.ones(2, 2)
    del recovery.model.weight
    recovery.begin()
    assert recovery.discard() == ()
    assert recovery.model.weight is weight and weight.grad is None


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (dist.DistBackendError("NCCL error ... Cuda failure 2 'out of memory'"), False),
        (MemoryError(), False),
        (ValueError("no such label"), False),
    ],
)
def test_a_step_is_repeated_whichever_library_ran_out_of_device_memory(
    error: Exception, goes_on: bool
) -> None:
    """Not when the device or the connection may be broken, nor for host memory."""

    def passing() -> None:
        raise error

    def wrapping() -> None:
        try:
            passing()
        except Exception as cause:
            raise KeyError("the user's own") from cause

    for micro_batch in (passing, wrapping):
        recovery = alone(Where("forward", 3, users=True))
        if not goes_on:
            with pytest.raises((type(error), KeyError)):
                recovery.attempt("kind", micro_batch)
            broken = isinstance(error, (torch.AcceleratorError, dist.DistError))
            assert (recovery.where.why_not is not None) == broken
            continue
        assert recovery.attempt("kind", micro_batch) is None
        assert recovery.failure is not None and recovery.failure.phase == "forward"


def test_a_batch_that_was_met_once_is_no_surprise_again_whichever_of_its_tensors_is_long() -> None:
    recovery = Recovery.__new__(Recovery)
    recovery.probed = None
    wide, long = (torch.zeros(4, 9), torch.zeros(4, 2)), (torch.zeros(4, 3), torch.zeros(4, 5))
    recovery.record_size(wide, 4)
    assert not recovery.outgrows(wide, 4) and recovery.outgrows(long, 4)
    recovery.record_size(long, 4)
    square = (torch.zeros(4, 9), torch.zeros(4, 5), torch.zeros(4, 4))  # one more tensor, of size 4 x 4
    assert not recovery.outgrows(wide, 4) and not recovery.outgrows(long, 4) and recovery.outgrows(square, 4)
    recovery.record_size(square, 4)
    assert not recovery.outgrows(square, 4)
