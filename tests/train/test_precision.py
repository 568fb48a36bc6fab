"""What a precision rounds, and what it leaves exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from launcher.train.model import new_model
from launcher.train.precision import cast, rounded_buffers
from tests.train import traps
from tests.train.runs import job, losses, prepare, recipe, start


def test_no_sharding_rounds_what_a_model_computes_from_its_inputs(tmp_path: Path) -> None:
    first = {}
    for precision, sharding in (("fp32", "none"), ("bf16-mixed", "none"), ("bf16-mixed", "fsdp")):
        run = prepare(tmp_path / f"{precision}-{sharding}", job(task="times:Times", args={}, steps=1))
        ended = start(run, recipe(sharding, 8, precision=precision), ranks=1)
        assert ended.codes == {0: 0}, ended.output
        first[precision, sharding] = losses(run)[1]
    exact = first["fp32", "none"]
    assert first["bf16-mixed", "none"] == pytest.approx(exact, rel=0.01)
    assert first["bf16-mixed", "fsdp"] == pytest.approx(exact, rel=0.01), first


def test_weights_are_normalized_by_buffers_in_any_precision(tmp_path: Path) -> None:
    ran = {}
    for precision, sharding in (("fp32", "none"), ("bf16-mixed", "none"), ("bf16-mixed", "fsdp")):
        run = prepare(tmp_path / f"{precision}-{sharding}", job(task="spectral:Spectral", args={}, steps=3))
        ended = start(run, recipe(sharding, 8, precision=precision), ranks=1)
        assert ended.codes == {0: 0}, ended.output
        ran[precision, sharding] = [loss for _, loss in sorted(losses(run).items())]
    exact = ran.pop(("fp32", "none"))
    assert len(exact) == 3
    for found in ran.values():
        assert found == pytest.approx(exact, rel=0.02)


def test_a_run_says_which_buffers_bf16_rounds(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(task="times:Times", args={}, steps=1))
    ended = start(run, recipe("none", 8, precision="bf16"), ranks=1)
    assert ended.codes == {0: 0} and "precision: bf16 rounds the buffers offsets" in ended.output

    module = nn.Module()
    for name, values in {
        "mask": torch.full((3, 3), float("-inf")).triu(1),
        "counts": torch.arange(1000),
        "table": torch.arange(257.0, 260.0),
        "nothing": torch.tensor([float("nan"), 1.0]),
    }.items():
        module.register_buffer(name, values)
    assert rounded_buffers(module) == ["table"]


def test_bf16_leaves_complex_buffers_as_they_are() -> None:
    model = nn.Linear(2, 2)
    turns = torch.polar(torch.ones(3), torch.arange(3.0))  # of rotary embeddings
    model.register_buffer("turns", turns.clone())
    model.register_buffer("scale", torch.ones(2))
    model = cast(model, recipe(precision="bf16"))
    assert model.weight.dtype == model.scale.dtype == torch.bfloat16
    assert torch.equal(model.turns, turns)


def test_a_run_says_which_parameters_are_trained_in_bf16_although_the_recipe_says_fp32() -> None:
    class Short(traps.Trap):
        def model(self) -> nn.Module:
            return super().model().bfloat16()

    said: list[str] = []
    new_model(Short(), recipe(precision="bf16"), say=said.append)
    assert not said
    new_model(Short(), recipe(precision="bf16-mixed"), say=said.append)
    assert "is in bf16, and is trained in it with precision: bf16-mixed" in said[0]


def test_a_run_says_which_modules_do_not_stay_in_evaluation_mode() -> None:
    class Frozen(nn.Module):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    class Parts(traps.Trap):
        def model(self) -> nn.Module:
            whole = super().model()
            whole.backbone = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()).eval()
            whole.teacher = Frozen().eval()
            return whole

    class Pretrained(Parts):
        def model(self) -> nn.Module:
            return super().model().eval()

    said: list[str] = []
    assert new_model(Parts(), recipe(), say=said.append).backbone[1].training
    assert [text.partition(" of the model came in evaluation mode")[0] for text in said] == ["backbone"]
    assert new_model(Pretrained(), recipe(), say=said.append).training and len(said) == 1
