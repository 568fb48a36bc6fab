"""DTensor's own arithmetic, kept out of a trace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _utils, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

_OWN = (
    (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
    (_StridedShard, "local_shard_size_and_offset"),
    (DeviceMesh, "_concatenate"),
    (_utils, "_compute_local_shape_and_global_offset"),
)
"Private functions of torch 2.13. Without them a trace of some layouts fails, which the plan then says."


@contextmanager
def dtensors_of_real_values() -> Iterator[None]:
    """Run without a trace's modes what DTensor computes for itself: the shapes of whole tensors, and numbers
    of ranks, whose values it needs."""
    with ExitStack() as stack:
        for owner, name in _OWN:
            if (own := inspect.getattr_static(owner, name, None)) is not None:
                apart = _apart(getattr(owner, name))
                kept = staticmethod(apart) if isinstance(own, staticmethod) else apart
                stack.enter_context(patch.object(owner, name, kept))
        yield
    # DTensor's caches hold meshes. Those of the next trace are equal, but have other process groups.
    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run
