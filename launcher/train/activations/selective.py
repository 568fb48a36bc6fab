"""Selective recomputation: a block keeps the results that take long to compute again, and nothing else.

torch.utils.checkpoint's own contexts for this keep every result that a policy names, although no backward
pass may read it: the last matrix product of a transformer block, which is only added to the residual stream.
The contexts here drop what was kept after the block's last saved tensor, because the recomputation stops
there. They also drop two kinds of results that torch's contexts keep. One is a result that the model then
changes in place, such as with nn.ReLU(inplace=True): torch would raise an error. The other is the result of
attention with dropout: the recomputation would draw other random numbers than the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

from launcher.train.activations.saved_tensors import memory_of
from launcher.train.task import TaskError

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
        aten._grouped_mm.default,  # of the experts of a mixture
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
        "Number of results when autograd saved the last tensor."
        self._by_memory: dict[int, int] = {}

    def add(self, operator: Any, result: Any, *, keep: bool) -> None:
        if keep:
            for tensor in _tensors_of(result):
                self._by_memory[memory_of(tensor)] = len(self.results)
        self.results.append(_Kept(result) if keep else None)
        self.operators.append(operator)

    def drop_written(self, written: Iterable[torch.Tensor]) -> None:
        """Drop the results that share memory with tensors that were changed in place. Version counters
        do not show this: views that torch's own layers make, as in nn.GRUCell, have their own counters."""
        for tensor in written:
            if (number := self._by_memory.get(memory_of(tensor))) is not None:
                self.results[number] = None

    def drop_unread(self) -> None:
        """Drop the results that no backward pass reads."""
        self.results[self.needed :] = [None] * len(self.results[self.needed :])
        self._by_memory.clear()


class _Kept:
    """The result of one operator: a tensor, or a tuple with tensors."""

    def __init__(self, result: Any) -> None:
        self.result = tree_map_only(torch.Tensor, _detached, result)
        self._versions = self._present_versions()

    def has_changed(self) -> bool:
        """Return whether a tensor of the result has been changed in place."""
        return self._present_versions() != self._versions

    def _present_versions(self) -> list[int]:
        return [one._version for one in _tensors_of(self.result)]


def contexts(every: int = 1) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of one forward pass and of its recomputation, for torch.utils.checkpoint.

    `every`: keep one of this many matrix products.
    """
    cache = _Cache()
    return _keeping(cache, every), _Reusing(cache)


def compiled_contexts(every: int = 1) -> tuple[Any, Any]:
    """Return torch's own contexts with the same policy, for torch.compile, which supports no others.

    The partitioner of the compiled graph drops what no backward pass reads.
    """
    # torch 2.11 also calls the policy in the recomputation, where the count starts again.
    forward, again = _Choice(every), _Choice(every)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keeps = (again if context.is_recompute else forward).keeps(operator)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def _keeping(cache: _Cache, every: int) -> Iterator[None]:
    with _counting_saves(cache), _Keeping(cache, every):
        yield
    cache.drop_unread()


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
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:  # the block may catch it, in the recomputation, too
            if func in KEPT:
                self.cache.add(func, None, keep=False)
            raise
        if func in KEPT:
            self.cache.add(func, out, keep=self.choice.keeps(func) and not _draws(func, args, kwargs or {}))
        elif func._schema.is_mutable:
            self.cache.drop_written(written(func, args, kwargs or {}))
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
            raise TaskError(
                f"the recomputation of a block calls {func}, which its forward pass did not: the block "
                "depends on what has changed since. Use activations: keep or offload"
            )
        kept, cache.results[number] = cache.results[number], None
        if kept is None or kept.has_changed():  # in place, after the forward pass
            return func(*args, **(kwargs or {}))
        return kept.result


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator draws random numbers: attention with dropout. The recomputation must
    draw them, too, or later dropouts would get other numbers than in the forward pass."""
    return torch.Tag.nondeterministic_seeded in func.tags and any(
        argument.name == "dropout_p" and value != 0 for argument, value in _arguments(func, args, kwargs)
    )


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of an operator that the caller gave, and its value."""
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors_of(result: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(result) if isinstance(one, torch.Tensor))


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator changes in place."""
    for argument, value in _arguments(func, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors_of(value)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # The detached tensor shares the version counter of the result although autograd does not see it here.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
