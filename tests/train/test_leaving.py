"""The end of a training is an end: no rank waits for one that has gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import job, prepare, recipe, start


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(2))
def test_a_finished_training_ends_every_rank(tmp_path: Path, round_: int) -> None:
    """Once, in about fifty ends, DDP's and gloo's destructors waited for the other rank for ever."""
    run = prepare(tmp_path / "run", job(train={"checkpoint_every": None}))
    assert start(run, recipe("ddp", micro=1, accumulation=4)).codes == {0: 0, 1: 0}
