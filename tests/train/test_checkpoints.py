"""What is in a checkpoint, when it counts, and what becomes of a save that fails: real ranks, real files."""

from __future__ import annotations

import io
import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner

from launcher.cli.main import app
from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import remove_handover
from launcher.spec import variables
from launcher.spec.events import CheckpointSaved
from launcher.spec.fire_drill import DRILLS
from launcher.spec.verdict import EXIT_STOPPED
from launcher.tasks.images import DigitClassifier
from launcher.train.checkpoints.checkpoints import Checkpoints
from launcher.train.checkpoints.disk_space import NoSpaceError, free_bytes, make_room
from launcher.train.checkpoints.export import ExportError, export
from launcher.train.checkpoints.folder import MARKER, complete_checkpoints
from launcher.train.checkpoints.rank_state import RankState, rank_file_name
from launcher.train.state_names import state_names
from launcher.train.task import TaskError
from tests.train.normed import Network
from tests.train.runs import error, job, losses, measure, prepare, recipe, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, Any]:
    return measure("saves.py", folder, ranks=2)


@pytest.mark.slow
def test_ranks_with_buffers_of_their_own_resume_bit_for_bit(measured: dict[str, Any]) -> None:
    for sharding, found in measured["resumes"].items():
        assert found["restored"] == 3
        assert len(found["ranks differ in"]) == 6, "else this test shows nothing"
        assert found["losses"][0] == found["losses"][1], sharding
        assert found["different"] == [[], []], (sharding, "parameters, states and buffers of both ranks")


def test_constants_stay_the_codes_and_what_training_changes_is_saved(
    measured: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    path = complete_checkpoints(folder / "fsdp/checkpoints")[3]
    first, second = (torch.load(path / rank_file_name(rank))["buffers"] for rank in (0, 1))
    assert "seen" in first and "scale" not in first
    assert not torch.equal(first["layers.0.1.running_mean"], second["layers.0.1.running_mean"])

    model, cpu = Network(16), torch.device("cpu")
    own = RankState(model, cpu)
    own.restore(path / rank_file_name(0), rng=False)  # as another number of ranks does
    assert torch.equal(model.seen, first["seen"])
    model.seen = torch.ones(5)  # replaced, and of another shape
    (tmp_path / "own.pt").write_bytes(own.pack())
    again = Network(16)
    RankState(again, cpu).restore(tmp_path / "own.pt", rng=False)
    assert torch.equal(again.seen, torch.ones(5))


def test_what_happens_after_a_save_in_the_background_does_not_leak_into_it(measured: dict[str, Any]) -> None:
    assert measured["in background"] == {"different": [[], [], [], []], "complete at once": False}


@pytest.mark.parametrize("where", ["foreground", "background"])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(
    measured: dict[str, Any], where: str
) -> None:
    first, second, third, fourth = measured["fails"][where]["outcomes"]
    assert first == [[None, None], ["step-00000001"]]
    why = "checkpoint of step 2 could not be written: rank 1: OSError: [Errno 27] File too large"
    assert second == [[why, why], ["step-00000001"]], "the half-written one is gone"
    assert third == [[None, None], ["step-00000001", "step-00000003"]]
    assert fourth == [[why.replace("step 2", "step 4")] * 2, third[1]], "torch.save hides it"


def test_an_older_checkpoint_makes_room_on_a_file_system_that_is_full_although_bytes_are_free(
    measured: dict[str, Any],
) -> None:
    found = measured["without inodes"]
    if found is None:
        pytest.skip("mounting a small tmpfs needs root")
    problems, kept = zip(*found["outcomes"], strict=True)
    assert "No space left on device" in problems[2] and problems[:2] + problems[3:] == (None,) * 4
    assert kept == ([1], [1, 2], [1, 2], [2, 4], [4, 5])


def test_the_last_save_gives_up_on_every_rank_with_the_reason(measured: dict[str, Any]) -> None:
    ours, theirs = measured["in the way"]
    assert ours == theirs and "NotADirectoryError" in ours


def test_a_save_of_shards_asks_for_as_much_space_as_it_takes(measured: dict[str, Any]) -> None:
    asked, taken = measured["asks for"]
    assert taken < asked < 1.1 * taken


def test_room_is_made_of_what_the_new_checkpoint_replaces_and_never_of_the_last_good_one(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}").mkdir()
        replace_json(tmp_path / f"step-{step:08d}" / MARKER, {"step": step})
    make_room(tmp_path, 1, keep=2, scarce=False)
    assert list(complete_checkpoints(tmp_path)) == [1, 2]
    for _ in range(2):
        with pytest.raises(NoSpaceError, match=r"No space left on device: it takes .*iB are free in "):
            make_room(tmp_path, 2 * free_bytes(tmp_path), keep=2, scarce=False)
        assert list(complete_checkpoints(tmp_path)) == [2]


def test_a_kill_during_a_save_in_the_background_leaves_the_last_good_one(tmp_path: Path) -> None:
    args = {"dim": 384, "dropout": 0.2, "fault": "kill", "call": 5}  # right after the save of step 4 began
    run = prepare(
        tmp_path / "run", job(args=args, steps=5, train={"checkpoint_every": 2, "async_checkpoints": True})
    )
    ended = start(run, recipe())
    assert list(losses(run)) == [1, 2, 3, 4], ended.output
    assert list(complete_checkpoints(run.checkpoints)) == [2]
    saved = [event.step for event in run.read_events() if isinstance(event, CheckpointSaved)]
    assert saved == [2], "an event is a complete checkpoint"

    ended = start(run, recipe())
    assert ended.codes == {0: 0, 1: 0}, ended.output
    before, after = losses(run, attempt=0), losses(run, attempt=1)
    assert [after[3], after[4]] == [before[3], before[4]]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize(
    ("fault", "drill"),
    [("raise", ""), pytest.param("", "rank=last,step=5,phase=backward", marks=pytest.mark.slow)],
    ids=["exception", "memory"],
)
def test_a_rank_that_fails_during_a_save_in_the_background_ends_when_it_is_complete(
    fault: str, drill: str, tmp_path: Path
) -> None:
    train = {"checkpoint_every": 2, "async_checkpoints": True}
    run = prepare(tmp_path / "run", job(args={"dim": 384, "fault": fault, "call": 5}, steps=6, train=train))
    env = {variables.SUPERVISED: "1", **({DRILLS: drill} if drill else {})}
    ended = start(run, recipe("ddp"), env=env)
    remove_handover(run, 0)
    assert 0 not in ended.codes.values() and list(losses(run)) == [1, 2, 3, 4], ended.output
    assert list(complete_checkpoints(run.checkpoints)) == [2, 4]
    saved = [event.step for event in run.read_events() if isinstance(event, CheckpointSaved)]
    assert saved == [2, 4]


def test_a_rank_says_that_it_waits_for_a_save() -> None:
    checkpoints, said = object.__new__(Checkpoints), []
    checkpoints._upload = (4, Future())
    assert checkpoints.complete(0.0, said.append) is None
    assert said == ["waiting up to 0 s for the checkpoint of step 4, which is still being written"]


@pytest.mark.slow
def test_a_stop_that_comes_during_a_save_waits_for_it_and_does_nothing_else(tmp_path: Path) -> None:
    args = {"dim": 256, "fault": "stop while saving", "call": 4}
    run = prepare(tmp_path / "run", job(args=args, train={"checkpoint_every": 2, "async_checkpoints": True}))
    ended = start(run, recipe())
    assert ended.codes == {0: EXIT_STOPPED, 1: EXIT_STOPPED}, ended.output
    assert list(losses(run)) == [1, 2, 3, 4], "no further step"
    saved = [event.step for event in run.read_events() if isinstance(event, CheckpointSaved)]
    assert saved == [2, 4], "and no second checkpoint"


def test_an_export_of_shards_loads_strictly_into_the_users_model(
    measured: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    checkpoint = complete_checkpoints(folder / "fsdp/checkpoints")[3]
    whole = torch.load(folder / "fsdp/whole.pt")
    [file] = export(checkpoint, tmp_path / "one")
    assert file.name == "model.safetensors" and file.stat().st_mode & 0o777 == 0o644
    assert _same(load_file(file), whole)
    model = Network(16)
    model.recent = torch.zeros_like(whole["recent"])  # training has made it longer
    model.load_state_dict(load_file(file), strict=True)
    assert model.head.weight is model.embedding.weight

    files = export(checkpoint, tmp_path / "many", torch.bfloat16, file_bytes=1500)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    parts = {file.name: load_file(file) for file in files}
    assert {name: key for key, part in parts.items() for name in part} == index["weight_map"]
    together = {name: value for part in parts.values() for name, value in part.items()}
    assert _same(together, {k: v.bfloat16() if v.is_floating_point() else v for k, v in whole.items()})
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in together.values())
    with pytest.raises(ExportError, match="many is not an empty directory"):
        export(checkpoint, tmp_path / "many")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many", "one"]


@pytest.mark.parametrize(
    ("sharding", "ranks"),
    [("fsdp", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("ddp", 2), ("hybrid", 4)))],
)
def test_the_loss_of_an_evaluation_is_that_of_the_exported_model(
    tmp_path: Path, sharding: str, ranks: int
) -> None:
    """BatchNorm's statistics differ between ranks, which keep their own for training."""
    task, fields = DigitClassifier([8]), {"args": {"channels": [8]}, "steps": 3, "train": {"eval_every": 3}}
    run = prepare(tmp_path / "run", job(task="launcher.tasks.images:DigitClassifier", **fields))
    ended = start(run, recipe(sharding, micro=8 // ranks), ranks, {"LOCAL_WORLD_SIZE": "2"})
    assert set(ended.codes.values()) == {0}, ended.output

    checkpoint = complete_checkpoints(run.checkpoints)[3]
    model = task.model()
    model.load_state_dict(load_file(export(checkpoint, tmp_path / "out")[0]))
    loss, samples = task.loss(model.eval(), task.data("eval").tensors)
    assert run.read_metrics()[-1]["eval_loss"] == pytest.approx(loss.item() / samples, rel=1e-5)

    files = [checkpoint / rank_file_name(rank) for rank in range(ranks)]
    of_ranks = [torch.load(file, weights_only=True)["buffers"] for file in files]
    means = {tuple(buffers["stages.0.norm.running_mean"].tolist()) for buffers in of_ranks}
    assert len(means) == (1 if sharding == "ddp" else ranks)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_export_leaves_out_the_parts_of_an_extra_state(tmp_path: Path) -> None:
    """They are under names that the model's state_dict() does not have."""
    model = nn.ModuleDict({"my_extra_state": Extra(2, 2)})
    model["my_extra_state"].extra = {"mean": torch.zeros(2), "seen": 3}
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    [file] = export(tmp_path / "checkpoint", tmp_path / "weights")
    assert load_file(file).keys() == {"my_extra_state.weight", "my_extra_state.bias"}


def test_a_parameter_may_have_a_name_that_ends_like_that_of_an_extra_state() -> None:
    model = Extra(2, 2)
    model.gate_extra_state = nn.Parameter(torch.ones(2))
    shared = RankState(model, torch.device("cpu")).shared(dict(model.state_dict()))
    assert shared.keys() == {"weight", "bias", "gate_extra_state"}


def test_export_says_what_is_missing(measured: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    run, empty = prepare(folder / "fsdp", job()), prepare(tmp_path / "empty", job())
    out = tmp_path / "out"

    def said(run: RunDir, *options: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["export", str(run.path), "--to", str(out), *options])
        return done.exit_code, done.output

    assert said(empty) == (4, "launcher: empty has no complete checkpoint of launcher's own entrypoint\n")
    assert said(run, "--step", "2") == (
        2,
        "launcher: fsdp has no complete checkpoint of step 2; there are 3\n",
    )
    assert said(run, "--dtype", "fp8") == (2, "launcher: --dtype fp8: it must be fp32 or bf16\n")
    assert not out.exists()
    code, text = said(run, "--dtype", "bf16")
    assert code == 0 and "wrote model.safetensors" in text and "of step 3 into" in text
    code, text = said(run)
    assert code == 4 and "is not an empty directory; give another one" in text


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_a_model_makes_in_its_forward_pass_is_registered_when_it_is_read(
    persistent: bool,
) -> None:
    def forward(model: nn.Module) -> None:
        if "cache" not in model._buffers:
            model.register_buffer("cache", torch.ones(2), persistent=persistent)

    trained, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    own = RankState(trained, torch.device("cpu"))
    forward(trained)
    RankState(fresh, torch.device("cpu")).load(
        torch.load(io.BytesIO(own.pack()), weights_only=True), rng=False
    )
    forward(fresh)
    assert torch.equal(fresh.get_buffer("cache"), torch.ones(2))
    assert ("cache" in fresh.state_dict()) == persistent


class Extra(nn.Linear):
    """A layer with an extra state."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_an_extra_state_that_no_checkpoint_can_hold_is_refused_before_training() -> None:
    model, cpu = nn.Sequential(nn.Linear(2, 2), Extra(2, 2)), torch.device("cpu")
    model[1].extra = {"mean": torch.zeros(2), "seen": {3}}
    RankState(model, cpu)
    model[1].extra["path"] = Path("here")
    with pytest.raises(
        TaskError, match=r"get_extra_state\(\) of 1 of the model .*\['path'\] is of type path"
    ):
        RankState(model, cpu)


def test_one_byte_that_has_changed_on_the_disk_is_noticed(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(steps=1, args={"dropout": 0.1}))
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 0}
    checkpoint = complete_checkpoints(run.checkpoints)[1]
    own = torch.load(checkpoint / "rank-000.pt", weights_only=True)
    kept = load_file(export(checkpoint, tmp_path / "whole")[0])["head.weight"]
    # In `.metadata`, a number that says where a shard lies; in the marker, the step.
    for file, content in (
        ("rank-000.pt", own["rng"]["torch"].numpy().tobytes()[:64]),
        ("__0_0.distcp", kept.contiguous().view(torch.uint8).numpy().tobytes()[:64]),
        (".metadata", b"\x10\x86"),
        ("complete.json", b"1,"),
    ):
        sound = (checkpoint / file).read_bytes()
        at = sound.index(content)
        (checkpoint / file).write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 1}
        told = error(run.attempts()[-1], 0)
        assert told["failure"] == "user-error" and f"{file} is damaged: restore" in told["exception"]
        if file == "__0_0.distcp":
            with pytest.raises(ExportError, match=r"model\.head\.weight in .* is damaged"):
                export(checkpoint, tmp_path / "damaged")
        if file == "complete.json":
            done = CliRunner().invoke(app, ["export", str(run.path), "--to", str(tmp_path / "damaged")])
            assert done.exit_code == 4 and "complete.json is damaged: restore" in done.output
        (checkpoint / file).write_bytes(sound)
    (checkpoint / "rank-000.pt").unlink()  # clusters delete old files of scratch disks
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 1}
    advice = f"If that stays so, restore the file, or delete {checkpoint} to go on"
    assert advice in error(run.attempts()[-1], 0)["exception"]
    (checkpoint / ".metadata").unlink()
    with pytest.raises(ExportError, match=advice):
        export(checkpoint, tmp_path / "without")


@pytest.mark.parametrize(
    ("file", "other"),
    [
        ("__1_0.distcp", "../step-00000001/__1_0.distcp"),
        ("rank-001.pt", "../step-00000001/rank-001.pt"),
        ("rank-001.pt", "rank-000.pt"),
        ("complete.json", "../step-00000001/complete.json"),
    ],
)
def test_a_sound_file_of_another_step_or_rank_is_refused(tmp_path: Path, file: str, other: str) -> None:
    fields = {"steps": 2, "args": {"dropout": 0.1}, "train": {"checkpoint_every": 1}}
    run = prepare(tmp_path / "run", job(**fields))
    assert not any(start(run, recipe()).codes.values())
    checkpoint = complete_checkpoints(run.checkpoints)[2]
    shutil.copy(checkpoint / other, checkpoint / file)
    assert any(start(run, recipe()).codes.values())
    errors = [error(run.attempts()[-1], rank) for rank in range(2)]
    refused = [told for told in errors if told.get("failure") == "user-error"]
    assert f"{file} is damaged, or a file of another step, rank or run" in refused[0]["exception"]
    if file == "__1_0.distcp":
        with pytest.raises(ExportError, match="a file of another step, rank or run"):
            export(checkpoint, tmp_path / "weights")


class Renaming(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **options)
        return {name.replace("weight", "kernel"): value for name, value in state.items()}


class OwnArguments(nn.Linear):
    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state)


def leave_out(module: nn.Module, name: str) -> None:
    def hook(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        del state[f"{prefix}{name}"]

    module.register_state_dict_post_hook(hook)


def test_a_model_whose_state_no_checkpoint_would_hold_is_refused_before_it_trains() -> None:
    """What it leaves out would begin anew in a resumed run, without a word."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert [*state_names(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    leave_out(model[0], "bias")
    with pytest.raises(TaskError, match=r"leaves out or renames 0\.bias: a resumed run would train"):
        state_names(model)
    model[0].bias.requires_grad_(False)  # model() makes it again
    assert [*state_names(model)] == ["0.weight", "1.weight", "1.bias"]
    model[1].weight = model[0].weight  # one name of two is enough
    leave_out(model[1], "weight")
    assert [*state_names(model)] == ["0.weight", "1.bias"]
    with pytest.raises(TaskError, match="leaves out or renames weight"):
        state_names(Renaming(2, 2))
    with pytest.raises(TaskError, match="has kernel, but the model has nothing of this name"):
        state_names(Renaming(2, 2).requires_grad_(False))
    with pytest.raises(TaskError, match="must take the arguments state_dict, strict and assign"):
        state_names(OwnArguments(2, 2))
