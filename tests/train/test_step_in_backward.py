"""`optimizer_step: backward` computes the same as a step after the backward pass, and keeps no gradient."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.runs import measure


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.thorough)])
def test_the_weights_are_the_same_bit_for_bit(tmp_path: Path, ranks: int, per_node: int) -> None:
    measure("steps_in_backward.py", tmp_path, ranks=ranks, per_node=per_node)
    for rank in range(ranks):
        for name, found in json.loads((tmp_path / f"rank {rank}.json").read_text()).items():
            assert {one["digest"] for one in found.values()} == {found["after"]["digest"]}, name
            assert found["after"]["gradients"] >= 0 == found["backward"]["gradients"]
            for step, other in zip(found["after"]["steps"], found["backward"]["steps"], strict=True):
                assert step == pytest.approx(other, rel=1e-6), name
