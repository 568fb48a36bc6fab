"""An optimizer on the host: gradients leave the device in the backward pass, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.runs import measure


@pytest.mark.parametrize(
    ("ranks", "per_node"),
    [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2), pytest.param(4, 2, marks=pytest.mark.thorough)],
)
def test_clipping_and_accumulation_give_the_same_weights_bit_for_bit(
    tmp_path: Path, ranks: int, per_node: int
) -> None:
    measure("host_gradients.py", tmp_path, ranks=ranks, per_node=per_node)
    for rank in range(ranks):
        for name, found in json.loads((tmp_path / f"rank {rank}.json").read_text()).items():
            plain, moved = found["none"], found[name.split()[0]]
            assert {one["digest"] for one in found.values()} == {plain["digest"]}, name
            assert moved["steps"] == plain["steps"], name
            assert all(norm > 0.05 for _, _, norm, _ in moved["steps"]), name
            on_device, everywhere, trained = moved["gradients"]
            assert plain["gradients"][0] == plain["gradients"][1] == everywhere <= trained, name
            if name.endswith("zero1"):  # DDP's buckets stay
                assert on_device == everywhere
                continue
            assert on_device == 0, name
            # The optimizer's states have left as well.
            assert plain["peak"] - moved["peak"] > everywhere, name
