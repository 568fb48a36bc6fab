"""Gradients in host memory: each leaves the GPU in the backward pass, for an optimizer on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch.distributed.tensor import DTensor

from launcher.memory.host import STAGED
from launcher.train.local_shards import local, sharded_like


class HostGradients:
    """The gradient of each parameter in host memory, summed over the micro-batches of a step.

    torch calls the hook when a parameter's gradient is complete for the micro-batch. The gradient is then
    copied to the host and freed on the GPU. Sums are formed in the order of plain accumulation and in the
    same type, so they are the same bit for bit.

    FSDP2 calls the hook after the reduction, on the stream of the reduction and with this rank's shard:
    torch.distributed.fsdp, foreach_reduce. The copy runs on that stream. A whole gradient has a stream of its
    own for the copy and is freed when the next one is complete, so the backward pass need not wait.

    A memory budget does not count allocations inside the context `host_side`.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], host_side: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._host_side = host_side
        # Kept from step to step: pages returned to the system must be faulted in again.
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._summed: set[torch.Tensor] = set()
        "Parameters that have a gradient in this step."
        self._copies = _Copies()
        self._last_whole: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        "The last whole gradient, and the event of its copy."
        for p in parameters:
            p.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def of(self, p: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of `p` in this step, sharded like `p`, or None if it has none."""
        self._copies.wait()
        return sharded_like(p, self._sums[p], p.shape) if p in self._summed else None

    def drop(self) -> None:
        """Drop all gradients, also from a backward pass that failed."""
        self._copies.wait()
        self._summed.clear()
        self._last_whole = None

    @torch.no_grad()
    def _take(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        gradient = local(p.grad)
        with self._host_side():
            if p not in self._sums:
                self._sums[p] = torch.empty(gradient.shape, dtype=gradient.dtype, device="cpu")
            store = self._sums[p].add_ if p in self._summed else self._sums[p].copy_
            copied = self._copies.start(gradient, store, whole=not isinstance(p, DTensor))
        self._summed.add(p)
        p.grad = None
        if not isinstance(p, DTensor):
            if self._last_whole is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._pass_ends)
            self._free_last()
            self._last_whole = gradient, copied

    def _pass_ends(self) -> None:
        self._free_last()
        self._last_whole = None

    def _free_last(self) -> None:
        """Let the computation wait for the last copy, so that later allocations may use the gradient's
        memory."""
        if self._last_whole is not None and (copied := self._last_whole[1]) is not None:
            torch.cuda.current_stream().wait_event(copied)


class _Copies:
    """Copies of gradients to the host. From a GPU they are under way while the backward pass continues: a
    thread waits for each and adds it up."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Future[object], int]] = deque()
        self._bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(
        self, gradient: torch.Tensor, store: Callable[[torch.Tensor], object], *, whole: bool
    ) -> torch.cuda.Event | None:
        """Call `store` with the gradient in host memory. Return the event after which the gradient has been
        read, or None if that is now.

        `whole`: copy on another stream than the current one, on which the computation continues.
        """
        if gradient.device.type != "cuda":
            store(gradient)
            return None
        while self._under_way and self._bytes + gradient.nbytes > STAGED:
            self._finish_oldest()
        staged = torch.empty_like(gradient, device="cpu", pin_memory=True)
        stream = current = torch.cuda.current_stream()
        if whole:
            stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(current)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            staged.copy_(gradient, non_blocking=True)
            copied.record()

        def add() -> None:
            copied.synchronize()
            store(staged)

        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="gradients")
        self._under_way.append((self._thread.submit(add), gradient.nbytes))
        self._bytes += gradient.nbytes
        return copied

    def wait(self) -> None:
        """Wait until every gradient is added up."""
        while self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        future, size = self._under_way.popleft()
        self._bytes -= size
        future.result()
