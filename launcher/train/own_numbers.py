"""Random numbers under tensor parallelism: the same on the ranks of a group, unless activations are cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from launcher.train.cut_adapter import dropouts_of, drops_parts
from launcher.train.optimizers.state import local
from launcher.train.seeds import derive_seed

LAST = (Shard(-1),)


class OwnNumbers:
    """Gives each rank random numbers of its own between a layer that cuts activations and the next one that
    adds them up: a dropout of attention weights must differ between heads, on whichever rank they are.

    The seed of a rank's own numbers comes from the common ones. A recomputation starts with the same common
    state, so it draws the same numbers.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._number, self._cuda = mesh.get_local_rank(), mesh.device_type == "cuda"
        self._common: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._own: tuple[torch.Tensor, torch.Tensor | None] | None = None
        "Of a rank that draws common numbers for a while."

    def begin(self, *_: object) -> None:
        if self._common is None:
            seed = int(torch.randint(2**62, ()))
            self._common = self._state()
            torch.manual_seed(derive_seed("tensor", seed, self._number))

    def end(self, *_: object) -> None:
        if self._common is None:
            return
        self._set(self._common)
        self._common = None

    def pause(self, *_: object) -> None:
        """Draw common numbers until `go_on`."""
        if self._common is not None:
            self._own = self._state()
            self._set(self._common)

    def go_on(self, *_: object) -> None:
        if self._own is not None:
            self._common = self._state()
            self._set(self._own)
            self._own = None

    def _state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.get_rng_state(), torch.cuda.get_rng_state() if self._cuda else None

    def _set(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        on_host, on_gpu = state
        torch.set_rng_state(on_host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)


def draw_own_numbers(model: nn.Module, styles: Mapping[nn.Module, ParallelStyle], mesh: DeviceMesh) -> None:
    """Let the model's ranks draw own numbers where `styles` cut activations. Its forward begins and ends with
    the common numbers. A model whose tensors have no values, which is traced, draws none."""
    if any(is_fake(local(parameter)) for parameter in model.parameters()):
        return
    numbers = OwnNumbers(mesh)
    for module, style in styles.items():
        if isinstance(style, ColwiseParallel) and style.use_local_output and style.output_layouts == LAST:
            module.register_forward_hook(numbers.begin)
        elif isinstance(style, RowwiseParallel) and style.input_layouts == LAST:
            module.register_forward_pre_hook(numbers.end)
        for dropout in dropouts_of(module):
            # Several layers have the same input, and an adapter may follow a layer that has cut activations.
            first, then = (
                (numbers.begin, numbers.end) if drops_parts(module) else (numbers.pause, numbers.go_on)
            )
            dropout.register_forward_pre_hook(first)
            dropout.register_forward_hook(then)
    model.register_forward_hook(numbers.end)
