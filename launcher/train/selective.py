"""Selective recomputation: a block keeps the results that take long to compute again, and nothing else.

torch.utils.checkpoint's own contexts for this keep every result that a policy names, although no backward
pass may read it: the last matrix product of a transformer block, which is only added to the residual stream.
The contexts here drop what was kept after the block's last saved tensor, because the recomputation stops
there. A result that the model then changes in place, such as with nn.ReLU(inplace=True), is not kept either:
torch's contexts would raise an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten
# FSDP calls the profiler. In a block that contains FSDP units it does so less often during recomputation, and
# torch's contexts would count these operators.
SAC_IGNORED_OPS.update(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }
)
MATRIX_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_mm.default,  # of precision: float8
    }
)
# Not bmm: in attention without a fused kernel its results are the scores, length x length for each head,
# which are the memory to be saved.
KEPT = MATRIX_PRODUCTS | {
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"Operators that take long to compute again."


class _Choice:
    """Which results of one forward pass are kept. `every`: 2 keeps the first, third ... matrix product."""

    def __init__(self, every: int) -> None:
        self.every, self.products = every, 0

    def keeps(self, operator: Any) -> bool:
        if operator in MATRIX_PRODUCTS:
            self.products += 1
            return (self.products - 1) % self.every == 0
        return operator in KEPT


class _Cache:
    """Results of the operators in KEPT in one forward pass of a block, in order; None if not kept."""

    def __init__(self) -> None:
        self.results: list[_Kept | None] = []
        self.operators: list[Any] = []
        self.needed = 0
        "Number of results that there were when autograd saved the last tensor."

    def drop_useless(self) -> None:
        """Drop the results that no backward pass reads, and those that were changed in place."""
        for number, kept in enumerate(self.results):
            if number >= self.needed or (kept is not None and kept.has_changed()):
                self.results[number] = None


class _Kept:
    """The result of one operator: a tensor, or a tuple with tensors."""

    def __init__(self, result: Any) -> None:
        self.result = tree_map_only(torch.Tensor, _detached, result)
        self._versions = self._present_versions()

    def has_changed(self) -> bool:
        """Return whether a tensor of the result was changed in place since."""
        return self._present_versions() != self._versions

    def _present_versions(self) -> list[int]:
        return [one._version for one in tree_leaves(self.result) if isinstance(one, torch.Tensor)]


def contexts(every: int = 1) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of one forward pass and of its recomputation, for torch.utils.checkpoint.

    `every`: keep one of this many matrix products.
    """
    cache = _Cache()
    return _keeping(cache, every), _Reusing(cache)


def compiled_contexts(every: int = 1) -> tuple[Any, Any]:
    """Return torch's own contexts with the same policy, for torch.compile, which knows no others.

    The partitioner of the compiled graph drops what no backward pass reads.
    """
    # torch 2.11 asks the policy in the recomputation as well, which counts from the start.
    forward, again = _Choice(every), _Choice(every)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = (again if context.is_recompute else forward).keeps(operator)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def _keeping(cache: _Cache, every: int) -> Iterator[None]:
    with _counting_saves(cache), _Keeping(cache, every):
        yield
    cache.drop_useless()


@contextmanager
def _counting_saves(cache: _Cache) -> Iterator[None]:
    """Note how many results there are whenever autograd saves a tensor, and call checkpoint's hooks."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def counted(tensor: torch.Tensor) -> Any:
        cache.needed = len(cache.results)
        return pack(tensor)

    with saved_tensors_hooks(counted, unpack):
        yield


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills the cache in the forward pass."""

    def __init__(self, cache: _Cache, every: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.choice = cache, _Choice(every)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in KEPT:
            self.cache.results.append(_Kept(out) if self.choice.keeps(func) else None)
            self.cache.operators.append(func)
        return out


class _Reusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces operators by their results in the recomputation."""

    def __init__(self, cache: _Cache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache, self.next = cache, 0

    def __enter__(self) -> Any:
        self.next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT:
            return func(*args, **(kwargs or {}))
        number, cache = self.next, self.cache
        self.next += 1
        if number >= len(cache.results) or cache.operators[number] is not func:
            raise RuntimeError(
                f"the recomputation of a block calls {func}, which its forward pass did not: the block is "
                "not deterministic, or depends on what has changed since"
            )
        kept, cache.results[number] = cache.results[number], None
        if kept is None or kept.has_changed():  # changed behind the block
            return func(*args, **(kwargs or {}))
        return kept.result


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # The detached tensor shares the version counter of the result although autograd does not see it here.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
