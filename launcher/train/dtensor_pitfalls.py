"""Refuses what torch silently gets wrong about a tensor of which each rank has a part (a DTensor)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from launcher.train.local_shards import parts
from launcher.train.mesh import SHARD
from launcher.train.task import TaskError

_READ = torch.ops.aten._local_scalar_dense.default


@contextmanager
def refused_pitfalls() -> Iterator[None]:
    """Raise TaskError if code reads a number from a part, as `weight.norm().item()` does, or assigns `.data`.

    torch returns a number of this rank's part alone, and forgets the new data.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    inside = _READ in handlers
    if not inside:
        handlers[_READ] = _read
        DTensor.data = property(torch.Tensor.data.__get__, _refuse_data)  # type: ignore[assignment,attr-defined]
    try:
        yield
    finally:
        if not inside:
            del handlers[_READ], DTensor.data


def check_whole(tensor: torch.Tensor, what: str) -> None:
    """Raise TaskError if this rank has only a part of the tensor. `what`: the message up to the tensor."""
    if isinstance(tensor, DTensor) and parts(tensor) > 1:
        raise TaskError(f"{what} of which each rank has a part. {_cure(tensor)}")


def _cure(tensor: DTensor) -> str:
    if SHARD in (tensor.device_mesh.mesh_dim_names or ()):
        return (
            "FSDP gathers a weight in the forward of its module: compute there what you need of it, or use "
            "sharding: ddp or zero1"
        )
    return "Compute it from whole(tensor) of launcher.train.tensor_parallel, or use tensor: 1"


def _read(_: object, args: Sequence[Any], __: Mapping[str, Any]) -> Any:
    tensor: DTensor = args[0]
    check_whole(tensor, "the task, or the model, reads a number, such as the norm of a weight, from a tensor")
    return _READ(tensor._local_tensor)


def _refuse_data(tensor: DTensor, _: torch.Tensor) -> NoReturn:
    raise TaskError(
        f"the task, or the model, assigns `.data` of a tensor of shape {tuple(tensor.shape)} of which each "
        "rank has a part. torch would not change it: write its values in place, as in "
        "`weight.data.copy_(values)`"
    )
