"""Going on from a checkpoint with another job than the one that wrote it: one real rank."""

from __future__ import annotations

import pickle
import shutil
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from launcher.rundir.files import read_json, replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.made_with import data_change, why_not_from, why_not_on
from launcher.spec.events import DataChanged
from launcher.spec.recipe import Recipe
from launcher.train.checkpoints.folder import LABEL, MARKER, METADATA_SUM, end_of_file, read_marker
from launcher.train.checkpoints.reader import read_metadata
from launcher.train.checkpoints.same_model import model_difference
from tests.train.runs import Ended, error, job, losses, prepare, recipe, start

WHOLE = recipe("none", micro=8)


def trained(path: Path, recipe: Recipe = WHOLE, begun: RunDir | None = None, **fields: Any) -> Ended:
    """Four steps of 8 of 40 samples, a checkpoint after two; or the last two, from that of `begun`."""
    train = {"checkpoint_every": 2, "keep_checkpoints": 9, **fields.pop("train", {})}
    run = prepare(path, job(**{"steps": 4, "train": train, **fields}))
    if begun is not None:
        shutil.copytree(begun.checkpoints / "step-00000002", run.checkpoints / "step-00000002")
    return start(run, recipe, ranks=1)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    path = tmp_path_factory.mktemp("begun") / "run"
    ended = trained(path)
    assert ended.codes == {0: 0}, ended.output
    return RunDir(path)


@pytest.mark.slow
def test_the_marker_says_what_the_training_was_made_with(begun: RunDir) -> None:
    marker = read_json(begun.checkpoints / "step-00000002" / "complete.json") or {}
    said = {name: marker[name] for name in ("optimizer", "precision", "batch", "samples", "seed")}
    assert said == {"optimizer": "adamw", "precision": "fp32", "batch": 8, "samples": 40, "seed": 0}


@pytest.mark.slow
def test_the_jobs_weight_decay_is_in_force_and_not_that_of_the_checkpoint(
    begun: RunDir, tmp_path: Path
) -> None:
    curves = {}
    for name, decay, offload in (
        ("as it was", 0.1, "none"),
        ("on", 5.0, "none"),
        ("host", 5.0, "cpu-optimizer"),
    ):
        train = {"weight_decay": decay, "lr": 0.05}
        ended = trained(tmp_path / name, recipe("none", micro=8, offload=offload), begun, train=train)
        assert ended.codes == {0: 0}, ended.output
        assert "data-changed" not in {event.kind for event in RunDir(tmp_path / name).read_events()}
        curves[name] = losses(RunDir(tmp_path / name))
    assert {curve[3] for curve in curves.values()} == {losses(begun)[3]}
    # A quarter of each matrix goes in the third step.
    assert curves["on"][4] != pytest.approx(curves["as it was"][4], rel=1e-3)
    assert curves["host"] == pytest.approx(curves["on"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "fields", "message"),
    [
        (
            {"optimizer": "lion"},
            {},
            "step-00000002 cannot be resumed from: its optimizer states are those of adamw",
        ),
        ({"embedding_states": "8-bit"}, {}, "continue with `--set recipe.embedding_states=32-bit`"),
        ({"optimizer": "adamw-8bit"}, {}, "continue with `--set recipe.optimizer=adamw`"),
        (
            {"micro_batch_size": 16},
            {"steps": None, "epochs": 2, "batch": {"global": 16}},
            "its steps took 8 samples each, batch.global is 16 now",
        ),
        (
            {},
            {"args": {"dim": 24}},
            "embedding.weight has the shape (64, 24) in the model, and (64, 16) in the checkpoint",
        ),
    ],
)
def test_what_cannot_go_on_is_the_users_error_with_what_to_set(
    changed: dict[str, Any], fields: dict[str, Any], message: str, begun: RunDir, tmp_path: Path
) -> None:
    ended = trained(tmp_path / "run", WHOLE.model_copy(update=changed), begun, **fields)
    assert ended.codes == {0: 1}, ended.output
    failure = error(RunDir(tmp_path / "run").attempt(0), 0)
    assert failure["failure"] == "user-error" and message in failure["exception"]
    assert failure["traceback"].count("\n") == 1, "a message, not a traceback"


@pytest.mark.slow
@pytest.mark.parametrize("part", [".metadata", "rank-000.pt"])
def test_a_checkpoint_that_is_refused_is_the_users_error(part: str, begun: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(begun.checkpoints / "step-00000002", run.checkpoints / "step-00000002")
    file = run.checkpoints / "step-00000002" / part
    marker = read_marker(file.parent)
    if part == ".metadata":
        file.write_bytes(pickle.dumps(Fraction(1)))
        replace_json(file.parent / MARKER, {**marker, METADATA_SUM: zlib.crc32(file.read_bytes())})
    else:
        torch.save(Fraction(1), file)
        file.write_bytes(file.read_bytes() + end_of_file(marker[LABEL], part))
    ended = trained(run.path)
    assert ended.codes == {0: 1}, ended.output
    failure = error(run.attempt(0), 0)
    assert failure["failure"] == "user-error" and str(file) in failure["exception"]
    assert "fractions.Fraction" in failure["exception"] and failure["traceback"].startswith("launcher.train.")


@pytest.mark.slow
def test_other_data_is_said_and_the_training_goes_on(begun: RunDir, tmp_path: Path) -> None:
    ended = trained(tmp_path / "run", begun=begun, args={"samples": 41}, train={"seed": 1})
    assert ended.codes == {0: 0}, ended.output
    run = RunDir(tmp_path / "run")
    [event] = [event for event in run.read_events() if isinstance(event, DataChanged)]
    assert event.step == 2 and event.reason in ended.output
    assert event.reason.startswith(
        "the training data has 41 samples, it had 40 and train.seed is 1, it was 0: from here on the samples"
    )
    assert sorted(losses(run)) == [3, 4]


def test_fewer_steps_than_are_done_are_refused_with_what_to_set() -> None:
    told = why_not_from({"step": 12}, job(steps=9), WHOLE)
    assert told is not None and "`--set steps=21` for 9 more" in told
    assert why_not_from({"step": 12}, job(steps=12), WHOLE) is None
    marker = {"step": 12, "samples": 45}  # five steps of eight samples are an epoch
    told = why_not_from(marker, job(steps=None, epochs=2), WHOLE)
    assert told is not None and "3 are done or begun" in told and "`--set epochs=5` for 2 more" in told
    assert why_not_from(marker, job(steps=None, epochs=3), WHOLE) is None
    told = why_not_from(marker, job(steps=None, epochs=3), WHOLE, samples=24)
    assert told is not None and "4 are done or begun, it is 3 now" in told, "the data is smaller now"
    assert why_not_from(marker, job(steps=None, epochs=2), WHOLE, samples=80) is None


def test_fewer_steps_than_are_done_are_refused_before_a_host_that_has_the_checkpoint_is_asked(
    tmp_path: Path,
) -> None:
    """A copy of a run on another host has the folders of its checkpoints, without the files."""
    run = RunDir(tmp_path / "copy")
    (run.checkpoints / "step-00000012").mkdir(parents=True)
    told = why_not_on(run, job(steps=9), WHOLE)
    assert told is not None and told.startswith("step-00000012 cannot be resumed from: `steps` counts from")
    lion = WHOLE.model_copy(update={"optimizer": "lion"})
    assert why_not_on(run, job(steps=12), lion) is None, "that the host must say"


def test_markers_of_an_older_launcher_and_the_paged_twin_agree() -> None:
    lion = WHOLE.model_copy(update={"optimizer": "lion"})
    old = {"step": 2, "world": 1}
    assert why_not_from(old, job(steps=None, epochs=2), lion) is None
    assert data_change(old, job(), 40) is None
    eight = WHOLE.model_copy(update={"optimizer": "adamw-8bit"})
    assert why_not_from({"optimizer": "paged-adamw-8bit"}, job(), eight) is None
    assert why_not_from({"optimizer": "lion-8bit"}, job(), eight) is not None


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_checkpoint_of_another_model_is_told_from_one_of_this_model(tmp_path: Path) -> None:
    weights = {name: torch.ones(2, 3) for name in ("embedding", "head", "frozen", "buffer")}
    states = {name: {"step": torch.ones(()), "exp_avg": torch.ones(2, 3)} for name in ("embedding", "head")}
    save({"model": weights, "optimizer": {"state": states}}, checkpoint_id=tmp_path, no_dist=True)
    saved = read_metadata(tmp_path)

    def why(whole: bool = True, **changed: torch.Tensor | None) -> str | None:
        model = {name: tensor for name, tensor in (weights | changed).items() if tensor is not None}
        return model_difference(model, saved, whole=whole, reshaped=reshaped)

    reshaped: dict[str, list[int]] = {}
    assert why() is None and why(buffer=None) is None
    assert why(bias=torch.ones(3)) == "the model has bias, which the checkpoint lacks"
    assert why(frozen=torch.ones(3)) == "frozen has the shape (3,) in the model, and (2, 3) in the checkpoint"
    assert why(head=None) == "the checkpoint has head, which the model lacks"
    assert why(whole=False, head=None) is None, "another stage has it"
    reshaped = {"buffer": [0, 3]}
    assert why(buffer=torch.ones(0, 3)) is None, "it had grown when it was saved"
    assert why(buffer=torch.ones(0, 4)) is not None, "the model begins with another one now"
