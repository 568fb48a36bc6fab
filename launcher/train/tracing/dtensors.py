"""DTensor's own arithmetic, kept out of a trace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

_SHAPES = "_propagate_tensor_meta_non_cached"
_OWN = (
    (ShardingPropagator, _SHAPES),
    (_StridedShard, "local_shard_size_and_offset"),
    (DeviceMesh, "_concatenate"),
    (_utils, "_compute_local_shape_and_global_offset"),
)
"Private functions of torch 2.13. Without them a trace of some layouts fails, and the plan reports that."


@contextmanager
def dtensors_of_real_values() -> Iterator[None]:
    """Run DTensor's own computations without a trace's modes: the shapes of whole tensors, and rank numbers,
    whose values it needs."""
    shapes = FakeTensorMode()  # torch makes one for each shape, and each reads the source of its callers
    with ExitStack() as stack:
        for owner, name in _OWN:
            if (original := inspect.getattr_static(owner, name, None)) is not None:
                replacement = _without_modes(
                    getattr(owner, name), shapes if name == _SHAPES else nullcontext()
                )
                patched = staticmethod(replacement) if isinstance(original, staticmethod) else replacement
                stack.enter_context(patch.object(owner, name, patched))
        yield
    _clear_caches()


def _clear_caches() -> None:
    """Clear DTensor's caches. They hold meshes; those of the next trace are equal, but have other groups.

    `torch.distributed.tensor.debug` has a function for this, but imports the compiler, which takes 0.6 s.
    """
    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    for owner, name in ((propagate, "cache_clear"), (torch._C, "_clear_DTensor_sharding_propagator_cache")):
        getattr(owner, name, lambda: None)()


def _without_modes(function: Callable[..., Any], mode: AbstractContextManager[Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), mode:
            return function(*args, **kwargs)

    return run
