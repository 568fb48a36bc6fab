"""The shapes of models that compute with values while they are built."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

from launcher.train.on_meta import FEW, model_on_meta
from launcher.train.task import TaskError
from tests.train import traps


class Swin(traps.Normed):
    """Has a drop rate for each block, as stochastic depth has, and ties a weight that has values."""

    def model(self) -> nn.Module:
        rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in rates))
        model.place, model.again = nn.Parameter(torch.zeros(1, 9)), nn.Linear(9, 1)
        model.again.weight = model.place
        model.register_buffer("mask", torch.from_numpy(numpy.tril(numpy.ones((4, 4)))))
        model.table = nn.Parameter(torch.randn(FEW, 2), requires_grad=False)
        return model


def test_a_model_that_computes_with_values_while_it_is_built_has_shapes() -> None:
    model, real = model_on_meta(Swin()), Swin().model()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert rates(model) == rates(real) and len(rates(real)) == 4
    assert model.again.weight is model.place and not model.table.requires_grad
    assert shapes(model) == shapes(real)


def rates(model: nn.Module) -> list[float]:
    return [module.p for module in model.modules() if isinstance(module, nn.Dropout)]


def shapes(model: nn.Module) -> dict[str, object]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


@pytest.mark.parametrize("read", [lambda weight: weight.item(), lambda weight: 1 / 0])
def test_the_exception_of_a_model_that_reads_a_weight_is_that_on_the_meta_device(
    read: Callable[[torch.Tensor], object],
) -> None:
    class Reads(traps.Normed):
        def model(self) -> nn.Module:
            torch.linspace(0, 1, 2)[0].item()
            read(nn.Linear(1, 1).weight)
            raise AssertionError

    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        model_on_meta(Reads())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.LazyLinear(2), r"^weight, bias of the model has no shape yet"),
        (lambda: (nn.Linear(2, 2), None), r"^model\(\) of Unusable returned tuple, not nn.Module"),
    ],
)
def test_an_unusable_model_is_refused_as_in_a_run(model: Callable[[], nn.Module], message: str) -> None:
    class Unusable(traps.Normed):
        def model(self) -> nn.Module:
            return model()

    with pytest.raises(TaskError, match=message):
        model_on_meta(Unusable())
