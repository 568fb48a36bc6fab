"""`schedule: zero-bubble`: the gradients of a stage's linear layers, computed after its backward pass.

The backward pass keeps the input and the output gradient of each linear layer of the blocks, and frees
everything else. Embedding, head, norms and biases get their gradients in the backward pass: the head
would otherwise keep the gradients of all logits.

stage_backward_input and stage_backward_weight of torch.distributed.pipelining are not used: they run each
node of the graph twice, and keep the whole graph with all its activations in between.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from launcher.train.local_shards import WAIT_APART, parameter_groups
from launcher.train.pipeline.cut import Chunk
from launcher.train.task import TaskError


class Waiting(NamedTuple):
    """A weight gradient that is still to be computed, for one use of a linear layer."""

    weight: torch.Tensor
    """The weight that the forward pass used. With FSDP it is the gathered one, whose memory may be freed by
    now."""
    input: torch.Tensor
    gradient: torch.Tensor
    "The gradient of the layer's output."


class LaterWeights:
    """The gradients of weights of one stage, micro-batch by micro-batch."""

    def __init__(self, chunk: Chunk, name: str) -> None:
        """Replace `forward` of the linear layers in the blocks of `chunk`, which FSDP has sharded by now.

        Raises TaskError if there are none. `name`: the function that returned the blocks.
        """
        self._chunk, self._units = chunk, _units(chunk)
        if not self._units:
            raise TaskError(
                "schedule: zero-bubble computes the gradients of nn.Linear layers later, but the blocks of "
                f"{name} have none that is trained and shares its weight with no other: use schedule: 1f1b"
            )
        self._micro_batches = deque[dict[nn.Module, list[Waiting]]]()
        for unit, layers in self._units.items():
            for layer in layers:
                layer.forward = partial(self._forward, unit, layer)  # type: ignore[method-assign]
        self.begins: Callable[[nn.Module], None] = lambda _: None
        """Called with each block or FSDP unit before its gradients are computed, and with the stage at the
        end."""

    @contextmanager
    def postponing(self) -> Iterator[None]:
        """Postpone the weight gradients of one micro-batch, whose backward pass runs inside."""
        self._micro_batches.append({unit: [] for unit in self._units})
        for unit in self._units:
            if isinstance(unit, FSDPModule):
                unit.set_requires_gradient_sync(False, recurse=False)
        yield

    def compute(self, *, reduce: bool) -> None:
        """Compute the postponed gradients of the oldest micro-batch. If `reduce`, FSDP reduces them over the
        ranks, one unit after the other."""
        by_unit = self._micro_batches.popleft()
        for unit in reversed(self._units):
            self.begins(unit)
            waiting = by_unit.pop(unit)
            # The oldest are computed first: autograd begins with the newest node.
            nodes = [_Gradient.apply(*waiting.pop()) for _ in range(len(waiting))]  # type: ignore[no-untyped-call]
            torch.autograd.backward(nodes, [torch.empty_like(node) for node in nodes])
            del nodes
            if isinstance(unit, FSDPModule):
                unit.set_requires_gradient_sync(reduce, recurse=False)
                for group in parameter_groups(unit):
                    if WAIT_APART:
                        _to_reduce_dtype(group, zeros=reduce)
                    group.post_backward()
        self.begins(self._chunk)
        if isinstance(self._chunk, FSDPModule):
            _end_backward(self._chunk)

    def _forward(self, unit: nn.Module, layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        # A weight that was computed, as by torch.func.functional_call, needs its gradient at once.
        waits = torch.is_grad_enabled() and input.requires_grad and weight.requires_grad and weight.is_leaf
        if not waits or torch._C._are_functorch_transforms_active():
            return functional.linear(input, weight, bias)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        use = _Use(weight)

        def leave() -> None:
            self._micro_batches[-1][unit].append(use.waiting())

        start = torch.empty(0, device=input.device, requires_grad=True)
        left = _Left.apply(start, leave)  # type: ignore[no-untyped-call]
        # Not the weight itself: autograd would call its hooks in the backward pass.
        result: torch.Tensor = _Linear.apply(input, weight.detach(), bias, left, use)  # type: ignore[no-untyped-call]
        return result


@dataclass
class _Use:
    """One use of a layer, and what its backward pass keeps."""

    weight: torch.Tensor
    left: tuple[torch.Tensor, torch.Tensor] | None = None
    "The input, and the gradient of the output."

    def waiting(self) -> Waiting:
        assert self.left is not None
        waiting, self.left = Waiting(self.weight, *self.left), None
        return waiting


def _units(chunk: Chunk) -> dict[nn.Module, list[nn.Linear]]:
    """Return each FSDP unit of a chunk, or without FSDP each block, with the layers of the blocks whose
    gradients can wait: trained, and without a weight that another module uses."""
    uses: Counter[torch.Tensor] = Counter(
        p for module in chunk.modules() for p in module.parameters(recurse=False)
    )
    blocks, sharded = set(chunk.blocks), isinstance(chunk, FSDPModule)
    by_unit: dict[nn.Module, list[nn.Linear]] = {}

    def visit(module: nn.Module, unit: nn.Module, *, inside: bool) -> None:
        inside |= module in blocks
        if isinstance(module, FSDPModule) or (not sharded and module in blocks):
            unit = module
        plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
        if inside and isinstance(module, nn.Linear) and plain:
            weight = module.weight
            if "weight" in module._parameters and weight.requires_grad and uses[weight] == 1:
                by_unit.setdefault(unit, []).append(module)
        for child in module.children():
            visit(child, unit, inside=inside)

    visit(chunk, chunk, inside=False)
    return by_unit


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass postpones the gradient of the weight, if `_Left` runs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        left: torch.Tensor,
        use: _Use,
    ) -> torch.Tensor:
        """`left`: the result of `_Left`."""
        ctx.use, ctx.bias_type = use, None if bias is None else bias.dtype
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        # Detached: it may be a view, which the model could not change in place.
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype)).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.use.left = x.detach(), gradient.detach()
        if torch.is_grad_enabled():
            # In a forward pass (torch.autograd.grad with create_graph) the result depends on the weight.
            weight = ctx.use.weight.to(x.dtype)
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = _rows(gradient).sum(0).to(ctx.bias_type)
        return gradient @ weight, None, of_bias, torch.empty(0, device=x.device), None


class _Left(torch.autograd.Function):
    """A node that autograd runs after the node of `_Linear` if a backward pass computes gradients of
    parameters. It does not run for the gradient of an activation alone (torch.autograd.grad in a block's
    forward)."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, leave: Callable[[], None]) -> torch.Tensor:
        ctx.leave = leave
        return start.detach()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        ctx.leave()
        return None, None


class _Gradient(torch.autograd.Function):
    """A node whose backward pass computes the gradient of a weight. Autograd then adds it up and calls the
    weight's hooks."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gradient)
        ctx.type = weight.dtype
        return torch.empty(0, device=x.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        x, gradient = ctx.saved_tensors
        return (_rows(gradient).t() @ _rows(x)).to(ctx.type), None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _to_reduce_dtype(group: Any, *, zeros: bool) -> None:
    """Convert the gradients of a unit to the type in which FSDP2 reduces them. Gradients of norms and biases
    have had it since the backward pass, or were reduced with an earlier micro-batch. In the latter case, use
    zeros if `zeros` and if FSDP2 does so for parameters that a rank did not use."""
    for p in group.fsdp_params:
        p.accumulate_unsharded_grad_if_needed()
        p.to_accumulated_grad_if_needed()
        whole = p._unsharded_param
        absent = whole.requires_grad and whole.grad is None and p.unsharded_accumulated_grad is None
        if zeros and absent and getattr(group, "reduce_scatter_unused_params", False):
            p.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=p.reduce_dtype)


def _end_backward(root: FSDPModule) -> None:
    """Let FSDP2 end a backward pass: it waits for reductions and frees their buffers."""
    state: Any = root._get_fsdp_state()
    for module in root.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                # Otherwise it would run the end of the unit's pass again, and reduce zeros.
                group._training_state = type(group._training_state).POST_BACKWARD
    if hasattr(state._state_ctx, "manual_backward_finalization_active"):  # since torch 2.15
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()
