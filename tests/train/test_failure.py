"""Which class a failure gets, and what counts as a complete checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as dynamos
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from launcher.rundir.layout import RunDir
from launcher.spec.job import Training
from launcher.spec.verdict import OutOfMemory
from launcher.train.checkpoints.folder import MARKER, complete_checkpoints
from launcher.train.data.loading import WorkerError
from launcher.train.error_report import classify, write_error
from launcher.train.largest_tensors import Moment, Piece, with_tensors
from launcher.train.optimizers.learning_rate import learning_rate
from launcher.train.phase import Where
from launcher.train.rank import Place, RendezvousError, SetupError
from launcher.train.replaced_parameters import Originals, Replaced
from launcher.train.task import TaskError
from launcher.train.tracing.tracer import UntraceableError

GLOO_CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:4711"
)
GLOO_TIMEOUT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/buffer.cc:72] Timed out waiting 15000ms for send"
)
CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)


def test_a_parameter_that_sharding_has_replaced_does_not_hide_that_memory_ran_out() -> None:
    """A task may have kept one without using it."""
    model = nn.Linear(2, 2)
    kept, originals = model.weight, Originals(model)
    model.weight = nn.Parameter(torch.ones(1))
    originals.check(model)
    assert type(kept) is Replaced
    piece = Piece(kept.untyped_storage()._cdata, 16)
    told = with_tensors(OutOfMemory(kind="gpu", requested=8), Moment(8, 32, 0, (piece,)), None)
    assert [tensor.shape for tensor in told.largest] == [(2, 2)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_which_torch_compile_keeps_do_not_hide_that_memory_ran_out(device: str) -> None:
    with dynamos.patch(fake_tensor_allow_unsafe_data_ptr_access=False), FakeTensorMode():
        fake = torch.empty(2, 2, device=device)
    real = torch.ones(2, 2)
    piece = Piece(real.untyped_storage()._cdata, 16)
    told = with_tensors(OutOfMemory(kind="gpu", requested=8), Moment(8, 32, 0, (piece,)), None)
    assert [tensor.shape for tensor in told.largest] == [(2, 2)] and fake.shape == real.shape


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "gpu-oom"),
        (RuntimeError("CUDA error: out of memory"), "gpu-oom"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "gpu-oom",
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "gpu-oom"),
        (dist.DistBackendError("NCCL error ... Cuda failure 2 'out of memory'"), "gpu-oom"),
        (RuntimeError(CPU_ALLOCATOR), "host-oom"),
        (MemoryError(), "host-oom"),
        (OSError(12, "Cannot allocate memory"), "host-oom"),
        (RendezvousError("2 ranks could not connect: timed out after 600000ms"), "rendezvous-failed"),
        (RuntimeError(GLOO_TIMEOUT), "nccl-timeout"),
        (RuntimeError("Application timeout caused pair closure"), "nccl-timeout"),
        (RuntimeError(GLOO_CLOSED), None),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), None),
        (SetupError("sharding: none is for one rank"), "user-error"),
        (ValueError("Expected more than 1 value per channel when training"), "user-error"),
        (SystemExit(0), "user-error"),
        (KeyboardInterrupt(), "cancelled"),
        (WorkerError("DataLoader worker (pid 7) is killed by signal: Segmentation fault"), None),
        (WorkerError("DataLoader worker (pid 7) is killed by signal: Killed"), "host-oom"),
    ],
)
def test_a_failure_in_the_forward_pass_gets_its_class(error: BaseException, failure: str | None) -> None:
    assert classify(error, Where("forward", 3, users=True)) == failure


def test_memory_that_ran_out_is_seen_below_the_exception_that_came_of_it() -> None:
    error = ValueError("step 3 failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert classify(error, Where("forward", 3, users=True)) == "gpu-oom"
    error.__context__, error.__cause__ = error.__cause__, None
    assert classify(error, Where("forward", 3, users=True)) == "user-error", "raised from None"
    error.__suppress_context__ = False
    assert classify(error, Where("forward", 3, users=True)) == "gpu-oom"


def mixed_types() -> None:
    torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)


def changed_input() -> None:
    x = torch.ones(2, 2, requires_grad=True) + 0
    y = checkpoint(torch.tanh, x, use_reentrant=False)
    x += y
    x.sum().backward()


def other_mode() -> None:
    block = torch.nn.Dropout()
    y = checkpoint(lambda x: block(x * 2), torch.ones(2, requires_grad=True), use_reentrant=False)
    block.eval()
    y.sum().backward()


class Heads(torch.nn.ModuleList):
    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self[head](x)


def two_calls() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        heads = Heads(torch.nn.Linear(2, 1) for _ in range(2))
        model = DistributedDataParallel(heads, find_unused_parameters=True)
        (model(torch.ones(1, 2), 0) + model(torch.ones(1, 2), 1)).sum().backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("fails", "remedy"),
    [
        (mixed_types, "y.to(weight.dtype)"),
        (changed_input, "write x = x + block(x)"),
        (other_mode, "A block computed something else when it ran again"),
        (two_calls, "call it once, with one forward for all parts of the loss"),
    ],
)
def test_what_to_do_about_an_error_of_torch_is_in_the_error_file(
    fails: Callable[[], None], remedy: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError) as caught:
        fails()
    run = RunDir(tmp_path)
    place = Place(run, run.attempt(0), number=0, node=0)
    assert write_error(place, caught.value, Where("backward", 3, users=True)) == "user-error"
    assert remedy in json.loads(place.attempt.error(0).read_text())["exception"]


def test_a_failure_of_launchers_own_code_is_not_the_users() -> None:
    assert classify(ValueError("a bug"), Where("optimizer", 3)) is None


def test_the_place_in_the_users_code_is_told_with_the_error_that_reports_it(tmp_path: Path) -> None:
    """As after an exception in state() of the task."""
    run = RunDir(tmp_path)
    place = Place(run, run.attempt(0), number=0, node=0)
    with pytest.raises(KeyError) as cause:
        {}["level"]
    with pytest.raises(TaskError) as caught:
        raise TaskError("state() of T: KeyError: 'level'") from cause.value
    assert write_error(place, caught.value, Where("init")) == "user-error"
    lines = json.loads(place.attempt.error(0).read_text())["traceback"].splitlines()
    assert any(f'File "{__file__}"' in line for line in lines)
    assert lines[-1] == "launcher.train.task.TaskError: state() of T: KeyError: 'level'"


def test_an_exit_comes_from_the_users_code_wherever_launcher_calls_it() -> None:
    """export_files() or state() of the task, for example."""
    assert classify(SystemExit(0), Where("init")) == "user-error"


class UntoldError(Exception):
    def __str__(self) -> str:
        raise KeyError("reason")


def test_an_exception_whose_message_cannot_be_made_has_an_error_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    place = Place(run, run.attempt(0), number=0, node=0)
    assert write_error(place, UntoldError(), Where("forward", 3, users=True)) == "user-error"
    content = json.loads(place.attempt.error(0).read_text())
    assert content["exception"] == "UntoldError: (its message is unknown: __str__ raised KeyError)"
    assert content["phase"] == "forward"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (AssertionError(), "AssertionError"),
        (ValueError("\n  heads must divide the width\nmore"), "ValueError: heads must divide the width"),
        (UntoldError(), "UntoldError: (its message is unknown: __str__ raised KeyError)"),
    ],
)
def test_a_plan_says_why_a_step_was_not_traced_whatever_the_message_is(error: Exception, line: str) -> None:
    assert str(UntraceableError("loss()", error)) == f"loss(): {line}"


def test_only_a_directory_with_its_marker_is_a_checkpoint(tmp_path: Path) -> None:
    for name, marker in {
        "step-00000100": {"step": 100},
        "step-00000200": {"step": 200},
        "step-00000300": None,
        "step-00000400": {"step": 300},
        ".step-00000500.partial": {"step": 500},
        "notes": {"step": 600},
    }.items():
        (tmp_path / name).mkdir()
        if marker is not None:
            (tmp_path / name / MARKER).write_text(json.dumps(marker))
    (tmp_path / "step-00000700").mkdir()
    (tmp_path / "step-00000700" / MARKER).write_text('{"step": 7')
    assert list(complete_checkpoints(tmp_path)) == [100, 200]
    assert complete_checkpoints(tmp_path / "nowhere") == {}


def test_the_learning_rate_warms_up_and_ends_at_a_tenth() -> None:
    training = Training(lr=1.0, warmup_steps=4)
    rates = [learning_rate(step, 20, training) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
