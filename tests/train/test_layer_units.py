"""With fsdp-layers a block's large layers are gathered one at a time, and the step is the same bit for bit.

test_savings.py shows that it needs less memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from launcher.train.sharding.layer_units import layer_units
from tests.train.runs import ALL_CASES, measure


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, {}), id="two ranks", marks=pytest.mark.slow),
        pytest.param((2, ALL_CASES), id="two ranks, all cases", marks=pytest.mark.thorough),
        pytest.param((4, ALL_CASES), id="four ranks", marks=pytest.mark.thorough),
    ],
)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ranks, env = request.param
    return measure("layer_units.py", tmp_path_factory.mktemp("units"), ranks, ranks, env)


def test_the_weights_after_two_steps_are_those_of_fsdp_bit_for_bit(measured: dict[str, Any]) -> None:
    for name, found in measured.items():
        assert found["equal"], name
        assert found["layers"]["losses"] == found["blocks"]["losses"], name
        assert found["layers"]["names"] == found["blocks"]["names"], name
        assert found["layers"]["units"] > found["blocks"]["units"], name


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2)
        self.gate = nn.Linear(8, 8)


def test_units_are_layers_that_are_large_and_always_called() -> None:
    block = nn.Module()
    block.attention = Attention()
    block.up, block.down, block.small = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 2)
    block.experts = nn.ModuleList([nn.Linear(8, 32), nn.Linear(8, 32)])
    block.tied, block.same = nn.Linear(8, 32), nn.Linear(8, 32)
    block.same.weight = block.tied.weight
    block.shared, block.twice = nn.Linear(8, 32), nn.Linear(8, 32)
    block.again = block.twice
    assert layer_units(block, {block.shared.weight}) == [block.up, block.down]
    assert layer_units(block.up, set()) == [], "the block is a unit already"
    block.gate_of_its_own = nn.Linear(8, 64)
    assert block.gate_of_its_own in layer_units(block, set())
