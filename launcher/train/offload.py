"""offload: cpu-optimizer and nvme-optimizer: states off the GPU, parameters and gradients on it."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.spec.base import format_bytes
from launcher.train.budget import Budget
from launcher.train.optimizers.state import local, sharded_like
from launcher.train.rank import SetupError

Groups = list[dict[str, Any]]
Make = Callable[[Groups, Collection[torch.Tensor]], torch.optim.Optimizer]
"(parameter groups, those with states in 32 bit) -> the recipe's own optimizer."
Keep = Callable[[torch.Tensor], torch.Tensor]
"A plain tensor of states -> the same values where they are to stay."


class HostOptimizer(torch.optim.Optimizer):
    """Runs another optimizer on the host, one parameter after the other.

    Every parameter has a twin in host memory, sharded alike. A step takes a gradient down, updates the twin
    and takes it up again: the arithmetic is the other optimizer's, and its states are saved as its own, so
    checkpoints with and without offload are the same. In host memory are the twins (as large as this rank's
    parameters), the states (unless `keep` puts them elsewhere) and one parameter's gradient at a time.

    All states exist from the beginning: what does not fit is known before the first step, not in it.
    `host_side` is a context in which a memory budget does not count.
    """

    def __init__(
        self,
        groups: Groups,
        wide: Collection[torch.Tensor],
        make: Make,
        keep: Keep,
        host_side: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(groups, {})
        self._keep, self._host_side = keep, host_side
        with host_side():
            twins = {p: _twin(p) for group in groups for p in group["params"]}
            on_host = [{**group, "params": [twins[p] for p in group["params"]]} for group in groups]
            self._inner = make(on_host, [twins[p] for p in wide if p in twins])
            for group, p, twin in self._pairs():
                self._begin(group, p, twin)
        self._follow_inner()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """`closure` is never called: torch.distributed.checkpoint passes None by name."""
        self._lead_inner()
        with self._host_side():
            for group, p, twin in self._pairs():
                if p.grad is None:
                    continue
                gradient = _on_host(local(twin))
                gradient.copy_(local(p.grad))
                self._step_alone(group, twin, gradient)
                local(p).copy_(local(twin), non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        self._lead_inner()
        return self._inner.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Who loads states has loaded parameters before: the twins follow them."""
        self._inner.load_state_dict(state_dict)
        with self._host_side():
            for _, p, twin in self._pairs():
                local(twin).copy_(local(p))
                self._put_away(twin)
        self._follow_inner()

    def _pairs(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """(the group of the twin, parameter, twin)"""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            for p, twin in zip(group["params"], inner["params"], strict=True):
                yield inner, p, twin

    @torch.no_grad()
    def _begin(self, group: dict[str, Any], p: torch.Tensor, twin: torch.Tensor) -> None:
        """Make the states of one parameter by a step that changes nothing, and which is not counted."""
        local(twin).copy_(local(p))
        self._step_alone({**group, "lr": 0.0}, twin, torch.zeros_like(local(twin)))
        if "step" in self._inner.state[twin]:
            self._inner.state[twin]["step"].zero_()
        self._put_away(twin)

    def _step_alone(self, group: dict[str, Any], twin: torch.Tensor, gradient: torch.Tensor) -> None:
        """One parameter at a time: new states are put away before the next ones are made, and of the
        gradients one needs host memory."""
        groups = self._inner.param_groups
        twin.grad = sharded_like(twin, gradient, twin.shape)
        self._inner.param_groups = [{**group, "params": [twin]}]
        try:
            self._inner.step()
        finally:
            self._inner.param_groups = groups
            twin.grad = None

    def _put_away(self, twin: torch.Tensor) -> None:
        state = self._inner.state[twin]
        for name, value in state.items():
            if value.ndim:
                state[name] = sharded_like(value, self._keep(local(value)), value.shape)

    def _lead_inner(self) -> None:
        """Today's learning rate is set here."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})

    def _follow_inner(self) -> None:
        """Show its settings and its states as those of the parameters on the device."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})
        for _, p, twin in self._pairs():
            self.state[p] = self._inner.state[twin]


def count_no_gradients(model: nn.Module, budget: Budget) -> None:
    """Do not count the gradients of FSDP's shards once they are reduced: on a GPU, `offload: cpu` moves them
    to host memory then."""

    def moved(p: torch.Tensor) -> None:
        budget.to_host(p.grad)

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(moved)  # type: ignore[no-untyped-call]


def in_host_memory(states: torch.Tensor) -> torch.Tensor:
    """`keep` of cpu-optimizer: the states are made where they stay."""
    return states


class ScratchFiles:
    """`keep` of nvme-optimizer: each tensor in a memory-mapped file, which has no name any more.

    The kernel frees an unlinked file when its process ends, however it ends. It holds parts of the files in
    its page cache and writes them back when it needs the memory: the states slow down other work before
    they fill the host, but a memory limit of a container counts those pages until they are written.
    Raises SetupError for a directory that cannot be used, and when it is full.
    """

    def __init__(self, folder: str | None, name: str) -> None:
        if folder is None:
            raise SetupError(
                "offload: nvme-optimizer needs train.nvme_dir: a directory on a local NVMe disk of each node"
            )
        self.folder, self.name, self.bytes = Path(folder), name, 0
        if not self.folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise SetupError(
                f"train.nvme_dir: {folder} is not a directory that this user can write to on node "
                f"{os.uname().nodename}; create it there, or choose offload: cpu-optimizer"
            )
        self._mapped: set[int] = set()
        # Of an attempt that was killed between the first and the last line that use a file's name.
        for left in self.folder.glob(f"{glob.escape(name)}-*"):
            left.unlink(missing_ok=True)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if states.numel() == 0 or states.data_ptr() in self._mapped:
            return states
        free = shutil.disk_usage(self.folder).free
        descriptor, path = tempfile.mkstemp(prefix=f"{self.name}-", dir=self.folder)
        try:
            # A hole in a file would be a SIGBUS in the middle of training when the disk is full.
            os.posix_fallocate(descriptor, 0, states.nbytes)
            mapped = torch.from_file(path, shared=True, size=states.numel(), dtype=states.dtype)
        except OSError as error:
            raise SetupError(
                f"train.nvme_dir: {self.folder} is too small for the optimizer's states: this rank has "
                f"written {format_bytes(self.bytes)}, the next {format_bytes(states.nbytes)} did not fit "
                f"into {format_bytes(free)} of free space ({error.strerror}); name a larger disk, shard "
                "over more ranks, or choose an 8-bit optimizer"
            ) from None
        finally:
            os.close(descriptor)
            Path(path).unlink()
        self.bytes += states.nbytes
        self._mapped.add(mapped.data_ptr())
        return mapped.view(states.shape).copy_(states)


def _twin(p: torch.Tensor) -> nn.Parameter:
    """On the host and sharded as `p`; without its values."""
    return nn.Parameter(sharded_like(p, _on_host(local(p)), p.shape))


def _on_host(like: torch.Tensor) -> torch.Tensor:
    """Contiguous host memory, pinned where there is a GPU to copy to; torch keeps pinned memory for reuse."""
    pinned = torch.cuda.is_available()
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
