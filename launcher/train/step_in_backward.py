"""`optimizer_step: backward`: each parameter is updated as soon as its gradient is complete.

A step that has started cannot be undone. After a failure in its backward pass, the state belongs to no step,
and training continues from the last complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.train.activations.saved_tensors import memory_of
from launcher.train.local_shards import local
from launcher.train.optimizers.gradient_norm import norm_of, share_of_square
from launcher.train.optimizers.state import make_states, step_alone
from launcher.train.task import TaskError
from launcher.train.tensor.replicated_gradients import Copies

WATCHED = 2
"First steps whose backward pass is watched."
READ_LATE = (
    "is updated before the backward pass reads it for the last time, because the model also uses it where it "
    "gets no gradient, as through detach() or while requires_grad is False: set optimizer_step: after"
)
CHANGED = (
    "a tensor that the backward pass needs was changed in place. Either the model changes it ({error}), or "
    f"it is a weight that {READ_LATE}"
)
Update = Callable[[dict[str, Any], torch.Tensor], None]
"(parameter group, parameter with its gradient) -> None."


class StepInBackward:
    """Updates parameters in the backward pass and drops each gradient. All optimizer states are created at
    the start.

    torch calls the hook when a gradient is complete; FSDP2 calls it after the reduction, on the stream of the
    reduction and with this rank's shard: torch.distributed.fsdp, foreach_reduce. FSDP reduces after each use
    of a unit, so a unit that the model uses twice is refused: its first gradient is only a part.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        copies: Copies,
        ranks: int,
        *,
        watched: bool = True,
    ) -> None:
        """`watched`: the first steps look for weights that are read after their update. Compiled code would
        not run compiled in these steps."""
        make_states(optimizer)
        self.optimizer, self._copies, self._ranks = optimizer, copies, ranks
        self._names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._used = set[torch.Tensor]()
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}
        self._update: Update | None = None
        self._watched = WATCHED if watched else 0
        "Number of coming steps that look for such weights."
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(self._complete)

    @contextmanager
    def updating(self, factor: float) -> Iterator[Norms]:
        """Multiply each gradient by `factor` and update its parameter, in the backward pass of this block.

        Raises TaskError from the backward pass if it reads a weight that has been updated.
        """
        norms = Norms(self._ranks)

        def update(group: dict[str, Any], p: torch.Tensor) -> None:
            assert p.grad is not None
            self._copies.average({self._names[p]: p.grad})
            gradient = local(p.grad)
            gradient.mul_(factor)
            norms.add(p, gradient)
            step_alone(self.optimizer, group, p)
            # Some kernels write without autograd's knowledge. Then a later use of the old value raises.
            torch.autograd.graph.increment_version(p)

        watching = _NoUpdatedWeight(self._names, self._used) if self._watched else nullcontext()
        self._watched = max(0, self._watched - 1)
        try:
            with self.with_update(update), watching:
                yield norms
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error) or not self._used:
                raise
            raise TaskError(CHANGED.format(error=str(error).partition(";")[0])) from error

    @contextmanager
    def with_update(self, update: Update) -> Iterator[None]:
        """Call `update` for each parameter in the backward pass of this block.

        Raises TaskError from the backward pass if a parameter gets a second gradient.
        """
        self._used.clear()
        # Loading a checkpoint replaces the groups.
        self._groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        self._update = update
        try:
            yield
        finally:
            self._update = None

    @torch.no_grad()
    def _complete(self, p: torch.Tensor) -> None:
        if self._update is None or p in self._used:
            raise TaskError(
                f"{self._names[p]} gets its gradient in parts, but optimizer_step: backward uses it at once. "
                "Either its FSDP unit is used more than once in a step (leave the module out of the task's "
                "blocks() or outer_units()), or the task runs a backward pass of its own, or checkpoints "
                "with use_reentrant=True: change that, or set optimizer_step: after"
            )
        self._used.add(p)
        self._update(self._groups[p], p)
        p.grad = None


class _NoUpdatedWeight(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises TaskError if a recomputation reads a weight that has been updated in this backward pass.

    Other readers read what they saved, whose versions autograd compares.
    """

    def __init__(self, names: Mapping[torch.Tensor, str], updated: set[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._updated = names, updated
        self._by_storage: dict[int, str] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what the task compiles itself run compiled, now and later."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled():  # only a recomputation records a graph
            if len(self._by_storage) != len(self._updated):
                self._by_storage = {memory_of(p): self._names[p] for p in self._updated}
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and (name := self._by_storage.get(memory_of(tensor))):
                    raise TaskError(f"{name} {READ_LATE}")
        return func(*args, **(kwargs or {}))


class Norms:
    """The gradients of one backward pass on this rank, after they are gone. `ranks`: of the whole job."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._norms: dict[torch.Tensor, torch.Tensor] = {}

    def add(self, p: torch.Tensor, gradient: torch.Tensor) -> None:
        self._norms[p] = norm_of(gradient)

    def __contains__(self, p: torch.Tensor) -> bool:
        """Return whether the parameter had a gradient."""
        return p in self._norms

    @property
    def squared(self) -> torch.Tensor | float:
        """This rank's share of the squared norm. The shares of all ranks add up to the squared norm of the
        whole gradient."""
        if not self._norms:
            return 0.0
        # On a GPU, the norms are from the stream of the reduction, for which FSDP waits at the pass's end.
        return share_of_square(self._norms, self._ranks)
