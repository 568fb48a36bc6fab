"""fp16 with a loss scale: the gradient of fp32, and every rank leaves out the same steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher.rundir.files import read_json_lines, replace_json
from launcher.rundir.layout import RunDir
from launcher.train.checkpoints.folder import MARKER, read_marker
from launcher.train.scaler import GROWS_AFTER, LEAST, START, LossScaler
from tests.train.runs import job, losses, measure, prepare, recipe, start


def test_the_factor_halves_on_overflow_and_doubles_after_many_good_steps() -> None:
    scaler = LossScaler(enabled=True)
    assert not scaler.accepts(float("inf")) and not scaler.accepts(float("nan"))
    assert scaler.factor == START / 4
    assert all(scaler.accepts(1.0) for _ in range(GROWS_AFTER - 1))
    assert scaler.factor == START / 4
    assert scaler.accepts(1.0) and scaler.factor == START / 2


def test_a_training_that_has_diverged_ends_instead_of_leaving_out_every_step() -> None:
    scaler = LossScaler(enabled=True)
    while scaler.factor > LEAST:
        assert not scaler.accepts(float("nan"))
    with pytest.raises(FloatingPointError, match="has diverged, or the model needs the range of bf16-mixed"):
        scaler.accepts(float("nan"))


def test_without_a_scaler_the_loss_is_untouched_and_every_step_is_taken() -> None:
    scaler = LossScaler(enabled=False)
    assert scaler.factor == 1.0 and scaler.accepts(float("inf")) and scaler.state() is None


@pytest.mark.slow
def test_an_overflow_on_one_rank_is_left_out_on_all_and_else_the_gradient_is_that_of_fp32(
    tmp_path: Path,
) -> None:
    for sharding, found in measure("half_precision.py", tmp_path, ranks=2).items():
        assert found["after overflow"] == [[START / 2, True, False], [2.0**39, True, False]], sharding
        # fp16 has 11 bits of precision: 2^-11 = 0.05 % per operation, a few operations deep.
        assert 1e-5 < found["distance"] < 4e-3, sharding
        assert found["moves again"], sharding


@pytest.mark.thorough
def test_the_factor_goes_on_with_the_run(tmp_path: Path) -> None:
    half = recipe(precision="fp16-mixed", grad_scaler=True)
    run = prepare(tmp_path / "run", job(train={"checkpoint_every": 3}))
    ended = start(run, half)
    assert ended.codes == {0: 0, 1: 0}, ended.output
    undisturbed = losses(run, attempt=0)
    last = run.checkpoints / "step-00000006"
    assert json.loads((last / MARKER).read_text())["scaler"] == {"factor": START, "good_steps": 6}

    _back_to_step_3(run, factor=4.0, good_steps=1)
    assert start(run, half).codes == {0: 0, 1: 0}
    assert json.loads((last / MARKER).read_text())["scaler"] == {"factor": 4.0, "good_steps": 4}
    # A power of two changes no bit but in underflow, which this small model does not have.
    assert losses(run, attempt=1) == pytest.approx({step: undisturbed[step] for step in (4, 5, 6)}, rel=1e-4)

    _back_to_step_3(run, factor=2.0**40, good_steps=1)
    ended = start(run, half)
    assert "step 4 skipped: a gradient overflowed in fp16, the loss scale is now" in ended.output
    assert json.loads((last / MARKER).read_text())["scaler"] == {"factor": 2.0**37, "good_steps": 0}
    norms = [line["grad_norm"] for line in read_json_lines(run.metrics) if line["attempt"] == 2]
    assert norms == [None, None, None]


def _back_to_step_3(run: RunDir, **scaler: float) -> None:
    shutil.rmtree(run.checkpoints / "step-00000006")
    marker = run.checkpoints / "step-00000003" / MARKER
    replace_json(marker, {**read_marker(marker.parent), "scaler": scaler})
