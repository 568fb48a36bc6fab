"""bitsandbytes' 8-bit optimizers on each rank's local shard.

bitsandbytes does not support DTensor: its optimizers fail on FSDP2's parameters. This module passes the local
shards to its kernels and keeps the states as DTensors, which torch.distributed.checkpoint saves and reshards.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import Any, Literal

import torch

from launcher.spec.optimizer_table import LEAST_EIGHT_BIT, LEAST_PAGED
from launcher.train.local_shards import local, sharded_like
from launcher.train.optimizers.quantization_blocks import scales_in_use, scales_sharded_like
from launcher.train.optimizers.state import OwnOptimizer, zeros_sharded_like
from launcher.train.rank import SetupError

Kernel = Literal["adam", "lion"]


class EightBit(OwnOptimizer):
    """Optimizer with blockwise 8-bit states: 2 x (1 + 4/256) bytes per parameter for "adam", half for "lion".

    States of vectors and of the parameters in `wide`, such as embeddings, stay in 32 bit. Vectors are a tiny
    part, and their blocks would tie the checkpoint to the number of ranks. The choice depends on the global
    size of a parameter, so it does not depend on the number of ranks.

    `paged` puts large states into CUDA managed memory, which moves to the host if the GPU runs out of memory.

    Raises: SetupError if bitsandbytes is missing.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        kernel: Kernel,
        *,
        lr: float,
        betas: tuple[float, float],
        wide: Collection[torch.Tensor] = (),
        paged: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})
        self._functional = bitsandbytes("the recipe's optimizer", "optimizer: adamw or lion")
        self._kernel = kernel
        self._wide = {id(p) for p in wide}
        self.paged = paged
        self._pages: dict[int, list[torch.Tensor]] = {}
        # The two tables from codes to values are constants: not saved, and shared by all parameters.
        self._maps: dict[bool, torch.Tensor] = {}

    def in_eight_bits(self, p: torch.Tensor) -> bool:
        """Return whether the states of `p` are 8-bit."""
        return p.ndim >= 2 and p.numel() >= LEAST_EIGHT_BIT and id(p) not in self._wide

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if self._pages:
            torch.cuda.synchronize()  # the kernels write managed memory that the host may read next

    def _begin(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32)
        for number in (1, 2) if self._kernel == "adam" else (1,):
            if not self.in_eight_bits(p):
                state[f"state{number}"] = zeros_sharded_like(p, torch.float32)
                continue
            state[f"state{number}"] = self._codes(p)
            state[f"absmax{number}"] = scales_sharded_like(p)

    def _codes(self, p: torch.Tensor) -> torch.Tensor:
        """Return zero codes. Together with zero scales they represent zeros."""
        shard = local(p)
        if not self.paged or shard.numel() < LEAST_PAGED:
            return zeros_sharded_like(p, torch.uint8)
        if shard.device.type != "cuda":
            raise SetupError("paged optimizer states are CUDA managed memory; choose optimizer: adamw-8bit")
        pages = self._functional.get_paged(*shard.shape, dtype=torch.uint8, device=shard.device)
        pages.zero_()
        self._pages.setdefault(id(p), []).append(pages)
        return sharded_like(p, torch.as_tensor(_OnGpu(pages), device=shard.device), p.shape)

    def _update(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        shard, gradient = local(p), local(p.grad).contiguous()  # type: ignore[arg-type]
        if not shard.numel():  # with fewer rows than ranks, some shards are empty
            return
        for pages in self._pages.get(id(p), ()):
            self._functional.prefetch_tensor(pages)
        # The kernels need contiguous memory: other shards are updated in a copy.
        whole = shard.contiguous()
        states = [local(state[name]) if name in state else None for name in ("state1", "state2")]
        beta1, beta2 = group["betas"]
        step, lr, decay = int(state["step"]), group["lr"], group["weight_decay"]
        if "absmax1" not in state:
            self._functional.optimizer_update_32bit(
                self._kernel, gradient, whole, states[0], beta1, group["eps"], step, lr,
                states[1], beta2, weight_decay=decay,
            )  # fmt: skip
        else:
            names = ("absmax1", "absmax2")
            scales = [scales_in_use(state[name], shard.numel()) if name in state else None for name in names]
            self._functional.optimizer_update_8bit_blockwise(
                self._kernel, gradient, whole, *states, beta1, beta2, 0.0, 0.0, group["eps"], step, lr,
                self._map(shard.device, signed=True), self._map(shard.device, signed=False), *scales,
                weight_decay=decay,
            )  # fmt: skip
        if whole is not shard:
            shard.copy_(whole)

    def _map(self, device: torch.device, *, signed: bool) -> torch.Tensor:
        if signed not in self._maps:
            self._maps[signed] = self._functional.create_dynamic_map(signed=signed).to(device)
        return self._maps[signed]


class _OnGpu:
    """Managed memory as a CUDA tensor: bitsandbytes returns it as a CPU tensor."""

    def __init__(self, pages: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pages.shape),
            "typestr": "|u1",
            "data": (pages.data_ptr(), False),
            "version": 3,
        }


def bitsandbytes(user: str, instead: str) -> Any:
    """Import bitsandbytes for `user`, which takes seconds. Raises SetupError if it is missing."""
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise SetupError(
            f"{user} needs bitsandbytes 0.50 or newer ({error}): "
            f'pip install "bitsandbytes>=0.50", or choose {instead}'
        ) from None
