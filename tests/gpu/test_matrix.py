"""Every axis of the recipe with every other on one CUDA device, float8 and paged states included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.loss_curves import curves, distance
from tests.train.recipes import PLAIN, REFERENCE, covering, recipe, tolerance

pytestmark = pytest.mark.gpu

# Kernels on a GPU add up in another order each time they are compiled or chosen.
ANOTHER_ORDER = 1e-3


def test_any_two_values_of_a_recipe_train_together(tmp_path: Path) -> None:
    names = sorted(set(REFERENCE.values()))
    plain = [recipe(1, **PLAIN, optimizer=name) for name in names]
    chosen = covering(1, gpu=True)
    done = curves(plain + chosen, tmp_path, 1, gpus_per_node=1)
    reference = dict(zip(names, done, strict=False))
    far = {}
    for one, curve in zip(chosen, done[len(plain) :], strict=True):
        if isinstance(curve, str):
            far[json.dumps(one)] = curve
            continue
        off = distance(curve, reference[REFERENCE[one["optimizer"]]])
        if not off <= tolerance(one) + ANOTHER_ORDER:
            far[json.dumps(one)] = f"{off:.1e} off, {tolerance(one) + ANOTHER_ORDER:.1e} allowed"
    assert not far, json.dumps(far, indent=1)
