"""Checkpoints in the background from a GPU: pinned staging, and a resume. `make test-gpu` runs these."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.train.runs import job, losses, prepare, recipe, start

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_checkpoint_in_the_background_is_what_the_run_goes_on_from(tmp_path: Path, sharding: str) -> None:
    asked = job(
        args={"dim": 1024, "dropout": 0.2},
        train={"checkpoint_every": 3},
        resources={"gpus_per_node": 1},
    )
    run = prepare(tmp_path / "run", asked, gpus_per_node=1)
    ended = start(run, recipe(sharding, micro=8), ranks=1)
    assert ended.codes == {0: 0}, ended.output
    undisturbed = losses(run, attempt=0)
    shutil.rmtree(run.checkpoints / "step-00000006")
    assert start(run, recipe(sharding, micro=8), ranks=1).codes == {0: 0}
    # CUDA kernels that add atomically may differ in the last bits.
    assert losses(run, attempt=1) == pytest.approx({step: undisturbed[step] for step in (4, 5, 6)}, rel=1e-4)
