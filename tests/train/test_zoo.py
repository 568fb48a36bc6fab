"""Memory runs out in the own code of each model of the zoo: the result is that of the run that knew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import HERE
from tests.train.zoo import MODELS


def rows_of(out: Path, *options: str, timeout: float) -> dict[str, list[dict[str, Any]]]:
    """The rows of `cells.py`, by model."""
    subprocess.run(
        [sys.executable, str(HERE / "cells.py"), str(out), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=timeout,
        check=False,  # it ends with 1 where a cell has problems: they are in the rows
    )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in MODELS}
    for row in json.loads(out.read_text()):
        found[row["model"]].append(row)
    return found


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return rows_of(tmp_path_factory.mktemp("zoo") / "rows.json", "--representative", timeout=580)


@pytest.mark.slow
@pytest.mark.timeout(600)  # of the first, for all of them: about a minute where nothing else runs
@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_ran_out_of_memory_ends_as_the_run_that_knew(
    model: str, few: dict[str, list[dict[str, Any]]]
) -> None:
    assert few[model], "no cell"
    assert not [(row["cell"], row["problems"]) for row in few[model] if row["problems"]]


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", MODELS)
def test_wherever_memory_runs_out_in_a_model_it_ends_as_the_run_that_knew(model: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.json", "--model", model, timeout=1100)[model]
    assert len(rows) >= 36
    assert not [(row["cell"], row["problems"]) for row in rows if row["problems"]]
