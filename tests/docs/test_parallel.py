"""The figures of docs/parallel.md and benchmarks/results/parallel.md, which benchmarks/parallel.py writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BRAIN, REPORT, HUGE = "8.36B autoencoder, 8x A6000", "13.14B, 2x A5000", "405B, 128x H100"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/results/parallel.json").read_text())["rows"]
    return found


def of(rows: list[dict[str, Any]], model: str, recipe: str) -> dict[str, Any]:
    return next(row for row in rows if row["model"] == model and recipe in row["recipe"])


def test_the_autoencoder_is_five_times_as_fast_as_its_best_fsdp_recipe(rows: list[dict[str, Any]]) -> None:
    sharded, cut = of(rows, BRAIN, "FSDP"), of(rows, BRAIN, "tensor 8")
    assert sharded["fits"] and cut["fits"]
    assert cut["samples per second"] > 5 * sharded["samples per second"]
    # FSDP gathers the matrix; the group sends inputs and outputs of layers.
    assert sharded["time"]["exposed"] > 0.8 * sharded["step"]
    assert cut["time"]["tensor"] < 0.1 * sharded["time"]["communication"]


def test_layers_on_two_a5000_do_not_fit_and_the_step_in_backward_does(rows: list[dict[str, Any]]) -> None:
    split, sharded = of(rows, REPORT, "split by layers"), of(rows, REPORT, "step in backward")
    assert not split["fits"] and sharded["fits"]
    assert split["needed"] > 23.6 * 2**30 > sharded["needed"]


def test_405_billion_on_a_mesh_with_a_pipeline_and_without(rows: list[dict[str, Any]]) -> None:
    asked, ours = of(rows, HUGE, "tensor 8 x pipeline 4"), of(rows, HUGE, "FSDP and tensor 2")
    assert ours["fits"]
    assert asked["time"]["bubble"] > 0 and ours["time"]["bubble"] == 0


def test_the_pages_show_the_figures(rows: list[dict[str, Any]]) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from parallel import tables

    memory, seconds = tables(rows)
    assert memory in (ROOT / "docs/parallel.md").read_text(), "python benchmarks/parallel.py --save"
    assert seconds in (ROOT / "benchmarks/results/parallel.md").read_text()
