"""`offload: cpu-optimizer` and `nvme-optimizer`: the optimizer runs on the host."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.spec.quantities import format_bytes
from launcher.train.cpu_memory_budget import Budget, Unlimited
from launcher.train.local_shards import local, sharded_like
from launcher.train.optimizers.host_gradients import HostGradients
from launcher.train.optimizers.proxy_optimizer import Groups, Make, ProxyOptimizer
from launcher.train.optimizers.state import step_alone
from launcher.train.rank import SetupError
from launcher.train.undo.fingerprint import bits, row_sums

Keep = Callable[[torch.Tensor], torch.Tensor]
"A plain tensor of states -> the same values in the memory where they will stay."


class HostOptimizer(ProxyOptimizer):
    """An optimizer that runs another optimizer on the host, one parameter at a time.

    Every parameter has a proxy in host memory with the same sharding. A step updates the proxy and copies it
    back, so checkpoints with and without offload are the same. Host memory holds the proxies, which are as
    large as this rank's parameters, the states unless `keep` moves them, and the gradients. These are there
    since the backward pass if `gradients` collects them; without it, a step copies one at a time.

    Code of the task may change parameters between two steps, such as clamp a temperature: a step first copies
    what has changed to the proxies.

    All states are created at the start, so that states that do not fit fail before the first step.
    A memory budget does not count allocations inside the context `host_side`.
    """

    def __init__(
        self,
        groups: Groups,
        wide: Collection[torch.Tensor],
        make: Make,
        keep: Keep,
        host_side: Callable[[], AbstractContextManager[None]],
        gradients: HostGradients | None = None,
    ) -> None:
        self._keep, self._host_side, self.gradients = keep, host_side, gradients
        self._marks: list[torch.Tensor] | None = None
        "Small hashes of the parameters after the last step."
        with host_side():
            super().__init__(groups, wide, make, _twin)
            for group, p, proxy in self._pairs():
                self._begin(group, p, proxy)
        self.expose_inner()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters. `closure` is ignored; torch.distributed.checkpoint passes None by name."""
        self.update_inner()
        with self._host_side():
            self._follow_changes()
            for group, p, proxy in self._pairs():
                if (gradient := gradient_of(p, self)) is None:
                    continue
                if self.gradients is None:
                    gradient = _on_host(local(proxy)).copy_(local(gradient))
                self._step_alone(group, proxy, local(gradient))
                local(p).copy_(local(proxy), non_blocking=True)
            self._marks = _marks(p for _, p, _ in self._pairs())

    def _follow_changes(self) -> None:
        """Copy the parameters that have changed since the last step to their proxies."""
        before, now = self._marks, _marks(p for _, p, _ in self._pairs())
        for at, (_, p, proxy) in enumerate(self._pairs()):
            if before is None or not torch.equal(before[at], now[at]):
                local(proxy).copy_(local(p))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.gradients is not None:
            self.gradients.drop()

    def _loaded(self) -> None:
        with self._host_side():
            for _, p, proxy in self._pairs():
                local(proxy).copy_(local(p))
                self._keep_states(proxy)

    @torch.no_grad()
    def _begin(self, group: dict[str, Any], p: torch.Tensor, proxy: torch.Tensor) -> None:
        """Create the states of one parameter with a step that changes nothing and is not counted."""
        local(proxy).copy_(local(p))
        self._step_alone({**group, "lr": 0.0}, proxy, torch.zeros_like(local(proxy)))
        if "step" in self.inner.state[proxy]:
            self.inner.state[proxy]["step"].zero_()
        self._keep_states(proxy)

    def _step_alone(self, group: dict[str, Any], proxy: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one proxy only, so that the host holds one gradient and one set of new states at a time."""
        proxy.grad = sharded_like(proxy, gradient, proxy.shape)
        try:
            step_alone(self.inner, group, proxy)
        finally:
            proxy.grad = None

    def _keep_states(self, proxy: torch.Tensor) -> None:
        state = self.inner.state[proxy]
        for name, value in state.items():
            if value.ndim:
                state[name] = sharded_like(value, self._keep(local(value)), value.shape)


def _marks(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a small hash of each parameter's part on this rank, on the host."""
    marks = [row_sums(row_sums(bits(local(p)))) for p in parameters]
    return [*torch.split(torch.cat(marks).cpu(), [len(mark) for mark in marks])]


def gradient_of(p: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Return the gradient with which the optimizer will update `p`, on the GPU or on the host."""
    if isinstance(optimizer, HostOptimizer) and optimizer.gradients is not None:
        return optimizer.gradients.of(p)
    return p.grad


def copy_gradients_to_host(model: nn.Module, budget: Budget) -> None:
    """Copy each gradient of FSDP's shards after its reduction to memory that `budget` does not count.

    With `offload: cpu` FSDP2 does so on a GPU. A CPU that stands in for one has to do it here, because there
    a copy to the host does nothing.
    """
    if isinstance(budget, Unlimited):
        return
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(_HostCopy(budget))  # type: ignore[no-untyped-call]


class _HostCopy:
    """The hook of one parameter."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._copy: weakref.ref[torch.Tensor] | None = None

    def __call__(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        if self._copy is not None and self._copy() is p.grad:
            return  # FSDP2 has added to the copy
        with self._budget.host_side():
            p.grad = sharded_like(p, local(p.grad).clone(), p.shape)
        self._copy = weakref.ref(p.grad)


def in_host_memory(states: torch.Tensor) -> torch.Tensor:
    """Return `states` unchanged: `keep` of cpu-optimizer, whose states stay in host memory."""
    return states


class ScratchFiles:
    """`keep` of nvme-optimizer: moves each tensor into an unlinked, memory-mapped file.

    The kernel frees an unlinked file when its process ends, in any way. It keeps parts of the files in the
    page cache and writes them back when it needs the memory. The states therefore slow down other work before
    they fill the host, but a container's memory limit counts those pages until they are written.
    Raises SetupError if the directory is unusable or full.
    """

    def __init__(self, folder: str | None, name: str) -> None:
        if folder is None:
            raise SetupError(
                "offload: nvme-optimizer needs train.nvme_dir, a directory on a local NVMe disk of each node"
            )
        self.folder, self.name, self.bytes = Path(folder), name, 0
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise SetupError(
                f"train.nvme_dir: {folder} is not a directory that this user can write to on node "
                f"{os.uname().nodename} ({error.strerror}); create it there, or use offload: cpu-optimizer"
            ) from None
        self._mapped: set[int] = set()
        # Delete files of an attempt that was killed between creating and unlinking a file.
        for leftover in self.folder.glob(f"{glob.escape(name)}-*"):
            leftover.unlink(missing_ok=True)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if states.numel() == 0 or states.data_ptr() in self._mapped:
            return states
        free = shutil.disk_usage(self.folder).free
        try:
            with tempfile.NamedTemporaryFile(prefix=f"{self.name}-", dir=self.folder) as file:
                # Without this, a full disk would cause a SIGBUS in the middle of training.
                os.posix_fallocate(file.fileno(), 0, states.nbytes)
                mapped = torch.from_file(file.name, shared=True, size=states.numel(), dtype=states.dtype)
        except OSError as error:
            raise SetupError(
                f"train.nvme_dir: {self.folder} is too small for the optimizer's states: this rank has "
                f"written {format_bytes(self.bytes)}, and the next {format_bytes(states.nbytes)} do not fit "
                f"into {format_bytes(free)} of free space ({error.strerror}); use a larger disk, shard "
                "over more ranks, or use an 8-bit optimizer"
            ) from None
        self.bytes += states.nbytes
        self._mapped.add(mapped.data_ptr())
        return mapped.view(states.shape).copy_(states)


def _twin(p: torch.Tensor) -> nn.Parameter:
    """Return an uninitialised parameter on the host, sharded as `p`."""
    return nn.Parameter(sharded_like(p, _on_host(local(p)), p.shape))


def _on_host(like: torch.Tensor) -> torch.Tensor:
    """Return an empty contiguous tensor on the host, pinned if there is a GPU; torch reuses pinned memory."""
    pinned = torch.cuda.is_available()
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
