"""The tests that ranks run: they connect, and run collectives whose values and times are checked.

This module imports torch only in `load` and in the functions of TESTS, which run in the forked ranks.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from launcher.spec import variables

Report = Callable[..., None]
"Reports to the parent: `at` is a step that begins, `done` one that has ended, `result` a measurement."

PERIOD = 7
"Values repeat after this many elements. Their sums over up to 4,096 ranks are exact in fp32."
ITERATIONS = ((2**16, 20), (2**24, 5), (2**62, 2))
"(largest size in bytes, timed repetitions). One untimed repetition comes first."
COMPUTE_SECONDS = 0.3
SWEEP_BYTES = {"cuda": 2**31, "cpu": 2**26}
"Larger than any cache."
SMALL = 60_000
"Bytes below which a message takes as long as an empty one."
BUSY = 4
"On a busy machine, a message may take this many times as long as the previous size suggests."
TIMED_SECONDS = 1.0
"Repetitions end after about this time."


def load() -> None:
    """Import what the ranks need before the fork, without calling CUDA."""
    for name in ("torch", "torch.distributed", "torch.distributed.fsdp"):
        importlib.import_module(name)


def connect(report: Report, seconds: float, gpus: bool) -> None:
    """Connect all ranks and run one all-reduce."""
    import torch
    import torch.distributed as dist

    report(at="connect")
    began = time.monotonic()
    device = _join(seconds, gpus)
    report(done=True, at="first all-reduce")
    total = torch.full((1,), float(dist.get_rank()), device=device)
    dist.all_reduce(total)
    wrong = int(total) != dist.get_world_size() * (dist.get_world_size() - 1) // 2
    report(done=True, result={"seconds": time.monotonic() - began, "wrong": [None] if wrong else []})


def collective(report: Report, seconds: float, gpus: bool, name: str, sizes: list[int]) -> None:
    """Run one collective with each size, check its values and measure its time."""
    import torch
    import torch.distributed as dist

    report(at="connect")
    until = time.monotonic() + seconds  # the parent ends the rank at this time, however long it connected
    device = _join(seconds, gpus)
    world = dist.get_world_size()
    report(done=True)
    for wanted, after in zip(sizes, [*sizes[1:], 0], strict=True):
        count = max(1, wanted // (4 * world))  # elements of fp32 of one rank's part
        size = 4 * world * count
        report(at=f"{name} of {size} bytes")
        operation = _Operation(name, count, device)
        began = time.perf_counter()
        operation.run()
        _finish(device)
        first_seconds, lateness = _max_over_ranks(
            time.perf_counter() - began, time.monotonic() - until, device
        )
        wrong = operation.wrong()
        most = next(number for largest, number in ITERATIONS if size <= largest)
        repeat = max(1, min(most, int(TIMED_SECONDS / first_seconds)))
        dist.barrier()
        began = time.perf_counter()
        for _ in range(repeat):
            operation.run()
        _finish(device)
        each = (time.perf_counter() - began) / repeat
        result = {"name": name, "bytes": size, "seconds": each, "wrong": wrong}
        report(done=True, result=result)
        del operation
        # Stop if the next size would exceed the time limit, since a slow network would look like a hang. The
        # time of a small message does not predict that of a large one.
        if size >= SMALL and BUSY * first_seconds * (1 + 3 * after / size) > -lateness:
            break
    if gpus:
        torch.cuda.synchronize(device)
    dist.barrier()


def compute(report: Report, seconds: float, gpus: bool) -> None:
    """Multiply matrices and copy memory, without other ranks, and check that equal inputs give equal bits."""
    import torch

    report(at="matrix product")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    torch.manual_seed(0)  # every rank multiplies the same numbers
    size, dtype = (8192, torch.bfloat16) if gpus else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    first, repeated = left @ right, torch.empty_like(left)
    flops = 2 * size**3 * _per_second(lambda: torch.matmul(left, right, out=repeated), device)
    wrong = int(not torch.equal(first, repeated))
    report(done=True, at="memory sweep")
    source = torch.arange(SWEEP_BYTES["cuda" if gpus else "cpu"] // 8, device=device)  # int64
    target = torch.empty_like(source)
    bytes_per_second = 2 * source.nbytes * _per_second(lambda: target.copy_(source), device)  # read, written
    wrong += not torch.equal(source, target)
    report(done=True, result={"flops": flops, "bytes_per_second": bytes_per_second, "wrong": [None] * wrong})


def _per_second(action: Callable[[], object], device: Any) -> float:
    """Repeat an action for COMPUTE_SECONDS, and return how often it is done in a second."""
    _finish(device)
    began, times = time.perf_counter(), 0
    while time.perf_counter() < began + COMPUTE_SECONDS:
        action()
        times += 1
        _finish(device)
    return times / (time.perf_counter() - began)


def _max_over_ranks(first: float, late: float, device: Any) -> tuple[float, float]:
    """Return the maximum of each number over all ranks, so that all ranks decide alike."""
    import torch
    import torch.distributed as dist

    numbers = torch.tensor([max(first, 1e-9), late], dtype=torch.float64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return float(numbers[0]), float(numbers[1])


def _join(seconds: float, gpus: bool) -> Any:
    """Connect with the backend of training, and return this rank's device."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    # The backend is that of launcher.train.rank. The parent ends ranks that wait too long.
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=2 * seconds))
    dist.barrier()
    return device


def _finish(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Operation:
    """A collective whose inputs identify their rank: element i of rank r is (r + 1)(i % 7 + 1)."""

    def __init__(self, name: str, count: int, device: Any) -> None:
        """`count` is the number of elements of one rank's part. The whole has `count` elements per rank."""
        import torch
        import torch.distributed as dist

        self.name, self.rank, self.world = name, dist.get_rank(), dist.get_world_size()
        self.count, self.device = count, device
        whole, part = count * self.world, count
        self.sent = self._pattern(part if name == "all-gather" else whole) * (self.rank + 1)
        self.received = torch.zeros(part if name == "reduce-scatter" else whole, device=device)

    def _pattern(self, length: int) -> Any:
        import torch

        period = torch.arange(1, PERIOD + 1, dtype=torch.float32, device=self.device)
        return period.repeat(-(-length // PERIOD))[:length]  # without temporary tensors of the whole length

    def run(self) -> None:
        import torch.distributed as dist

        if self.name == "all-reduce":
            self.received.copy_(self.sent)
            dist.all_reduce(self.received)
        elif self.name == "all-gather":
            dist.all_gather_into_tensor(self.received, self.sent)
        elif self.name == "reduce-scatter":
            dist.reduce_scatter_tensor(self.received, self.sent)
        elif self.name == "broadcast":
            if self.rank == 0:
                self.received.copy_(self.sent)
            dist.broadcast(self.received, 0)
        elif self.name == "all-to-all":
            dist.all_to_all_single(self.received, self.sent)
        else:
            after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
            work = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, self.sent, after), dist.P2POp(dist.irecv, self.received, before)]
            )
            for request in work:
                request.wait()

    def wrong(self) -> list[int | None]:
        """Return the ranks whose values arrived wrong; None stands for a sum over all ranks."""
        total = self.world * (self.world + 1) // 2
        whole = self._pattern(self.count * self.world)
        own_part = slice(self.rank * self.count, (self.rank + 1) * self.count)
        if self.name == "all-reduce":
            return self._unequal(None, self.received, whole * total)
        if self.name == "reduce-scatter":
            return self._unequal(None, self.received, whole[own_part] * total)
        if self.name == "broadcast":
            return self._unequal(0, self.received, whole)
        if self.name == "point-to-point":
            before = (self.rank - 1) % self.world
            return self._unequal(before, self.received, whole * (before + 1))
        # all-gather and all-to-all: one part from each rank.
        part = whole[: self.count] if self.name == "all-gather" else whole[own_part]
        sources: list[int | None] = []
        for rank in range(self.world):
            received = self.received[rank * self.count : (rank + 1) * self.count]
            sources += self._unequal(rank, received, part * (rank + 1))
        return sources

    def _unequal(self, source: int | None, received: Any, expected: Any) -> list[int | None]:
        import torch

        return [] if torch.equal(received, expected) else [source]


def train(report: Report, seconds: float, gpus: bool, run_dir: str, per_node: int) -> None:
    """Run a rank of the built-in entrypoint in a run directory of this node. It ends the process."""
    report(at="training")
    for name in (variables.SUPERVISED, variables.ONLY_SAVE, variables.WORKER, "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ[variables.RUN_DIR], os.environ[variables.ATTEMPT] = run_dir, "0"
    os.environ["LOCAL_WORLD_SIZE"] = str(min(per_node, int(os.environ["WORLD_SIZE"])))
    sys.argv = ["launcher.train"]
    runpy.run_module("launcher.train", run_name="__main__", alter_sys=True)


TESTS: Mapping[str, Callable[..., None]] = {
    "connect": connect,
    "collective": collective,
    "compute": compute,
    "train": train,
}
