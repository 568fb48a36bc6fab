"""Refuses uses of a weight that FSDP does not see.

A change of a weight in `forward` would be lost: examples are a temperature that is clamped there and a
teacher that follows its student. What `forward` sees of a weight is a copy, which FSDP frees. A gradient that
reaches a shard, and not the gathered weight, would not be added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from launcher.train.activations.recomputation import WATCHED
from launcher.train.local_shards import groups_of
from launcher.train.task import TaskError
from launcher.train.undo.fingerprint import fingerprint
from launcher.train.undo.objects import MOST_DATA, content


def refuse_changes(unit: FSDPModule, name: str) -> None:
    """Let the forward pass of an FSDP unit raise TaskError if a gathered weight of it has changed, or was
    replaced.

    `name`: the prefix of the unit's names in the model.
    """
    assert isinstance(unit, nn.Module)
    gathered = _Gathered(unit, name)
    unit.register_forward_pre_hook(gathered.check_own, prepend=True)
    unit.register_forward_pre_hook(gathered.begins)
    unit.register_forward_hook(gathered.ends, prepend=True)  # FSDP's own frees the weights


def refuse_gradients_of_shards(model: nn.Module) -> None:
    """Let the backward pass raise TaskError if it computes a gradient of a shard.

    FSDP adds up over the ranks what reaches a gathered weight. A rank's shard, as in `weight.full_tensor()`
    in the loss, would get the gradient of this rank's samples alone.
    """
    for name, p in model.named_parameters():
        if isinstance(p, DTensor) and p.requires_grad:
            p.register_hook(partial(_refuse_gradient, name))  # type: ignore[no-untyped-call]


def _refuse_gradient(name: str, _: torch.Tensor) -> NoReturn:
    raise TaskError(
        f"the loss depends on {name} outside of the forward of its module, as in a penalty over "
        "full_tensor(), and FSDP would not add up the gradient over the ranks. Compute it in the forward of "
        "the module, use train.weight_decay, or sharding: ddp or zero1"
    )


_FORMS = ("sharded_param", "_sharded_post_forward_param", "_unsharded_param")
"What FSDP puts in the place of a parameter."


class _Gathered:
    """The gathered weights of a unit, and their versions when they were first seen.

    FSDP keeps the versions when it gathers again. Writes through `.data` do not change versions, so the first
    passes also compare the content.
    """

    def __init__(self, unit: nn.Module, name: str) -> None:
        self._unit: Any = unit
        self._name, self._passes = name, 0
        self._weights: list[tuple[str, torch.Tensor, int]] = []
        self._first_fingerprints: dict[str, torch.Tensor] = {}

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield each parameter of the unit as FSDP describes it, with its name in the model."""
        names = {module: name for name, module in self._unit.named_modules(prefix=self._name)}
        for group in groups_of(self._unit._get_fsdp_state()):
            for p in group.fsdp_params:
                yield f"{names[p._module_info.module]}.{p._module_info.param_name}".removeprefix("."), p

    def check_own(self, *_: object) -> None:
        """Raise TaskError for a weight that is not FSDP's, which would put its own in its place."""
        for group in groups_of(self._unit._get_fsdp_state()):
            for p in group.fsdp_params:
                place = p._module_info
                now = place.module._parameters.get(place.param_name)
                if not any(now is getattr(p, form, None) for form in _FORMS):
                    [name] = (name for name, one in self._named() if one is p)
                    raise TaskError(
                        f"{name} was replaced, as torch.func.functional_call does, but FSDP would compute "
                        "with the parameter of the model: change its values in loss() before the model is "
                        "called, or use sharding: ddp or zero1"
                    )

    @torch.no_grad()
    def begins(self, *_: object) -> None:
        """Look at the weights before a forward pass, when they are gathered."""
        if not self._weights:
            weights = ((name, p._unsharded_param) for name, p in self._named())
            self._weights = [(name, weight, weight._version) for name, weight in weights]
        self._check()
        if self._passes < WATCHED:
            self._first_fingerprints = dict(self._fingerprints())

    @torch.no_grad()
    def ends(self, *_: object) -> None:
        """Raise TaskError if the forward pass has changed or replaced a weight."""
        self.check_own()
        self._check()
        if self._passes < WATCHED:
            self._passes += 1
            for name, now in self._fingerprints():
                if name in self._first_fingerprints and not torch.equal(now, self._first_fingerprints[name]):
                    self._refuse(name)

    def _fingerprints(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and a fingerprint of each weight that can be read."""
        if torch._C._are_functorch_transforms_active():
            return  # results have no memory that could be read
        for name, weight, _ in self._weights:
            if weight.nbytes <= MOST_DATA and (plain := content(weight)) is not None and not is_fake(plain):
                yield name, fingerprint(plain)

    def _check(self) -> None:
        for name, weight, version in self._weights:
            if weight._version != version:
                self._refuse(name)

    def _refuse(self, name: str) -> None:
        raise TaskError(
            f"{name} was changed while FSDP had gathered it (in forward, or in loss() after the model was "
            "called): the change would be lost. Change it in loss() before the model is called, or use "
            "sharding: ddp or zero1"
        )
