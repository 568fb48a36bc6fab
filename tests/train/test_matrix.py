"""Every axis of the recipe with every other: the loss curves follow fp32 on one device."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.train.loss_curves import curves, distance
from tests.train.recipes import OPTIMIZER, PLAIN, REFERENCE, covering, recipe, tolerance


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    names = sorted(set(REFERENCE.values()))
    plain = [recipe(1, **PLAIN, optimizer=name) for name in names]
    return dict(zip(names, curves(plain, tmp_path_factory.mktemp("plain"), 1), strict=True))


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("together", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_each_value_of_a_recipe_trains_and_any_two_together(
    ranks: int, together: int, reference: dict[str, list[float]], tmp_path: Path
) -> None:
    recipes = covering(ranks, together)
    far = {}
    for one, curve in zip(recipes, curves(recipes, tmp_path, ranks), strict=True):
        if isinstance(curve, str):
            far[json.dumps(one)] = curve
            continue
        off = distance(curve, reference[REFERENCE[one["optimizer"]]])
        if not off <= tolerance(one):
            far[json.dumps(one)] = f"{off:.1e} off, {tolerance(one):.1e} allowed"
    assert not far, json.dumps(far, indent=1)


@pytest.mark.thorough
def test_eight_bit_states_stay_beside_32_bit_ones_for_200_steps(tmp_path: Path) -> None:
    """The mean loss of the last 20 of 200 steps, on real text: within 1 % of the 32-bit optimizer's."""
    names = [name for name in OPTIMIZER if not name.startswith("paged")]
    recipes = [recipe(1, **PLAIN, optimizer=name) for name in names]
    done = dict(zip(names, curves(recipes, tmp_path, 1, env={"STEPS": "200"}), strict=True))
    ends = {name: mean(curve[-20:]) for name, curve in done.items()}
    assert all(ends[name] < done[name][0] - 1.5 for name in names), ends
    for name in names:
        assert ends[name] == pytest.approx(ends[REFERENCE[name]], rel=0.01), ends
