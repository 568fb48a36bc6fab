"""Stop, resume, and every way to fail, with real ranks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from launcher.diagnosis.cause import clues_of_text
from launcher.planning.plan import Layout, Plan
from launcher.rundir.files import read_json, read_json_lines
from launcher.rundir.layout import RunDir
from launcher.spec import variables
from launcher.spec.events import (
    CheckpointFailed,
    CheckpointSaved,
    Downgrade,
    Probed,
    ProbeSkipped,
    RecoveryOff,
    Resumed,
    StateNotSaved,
)
from launcher.spec.recipe import Recipe
from launcher.spec.verdict import EXIT_OOM, EXIT_STOPPED, OutOfMemory
from launcher.train.adapters.adapter import CONFIG
from launcher.train.checkpoints.folder import BESIDE_WEIGHTS
from tests.train.runs import any_error, error, job, losses, prepare, recipe, start

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """FSDP with dropout, two ranks; rank 1 alone sees the request to stop in step 3 of 6."""
    args = {"dropout": 0.2, "fault": "stop", "call": 3}
    run = prepare(tmp_path_factory.mktemp("stopped") / "run", job(args=args, train={"eval_every": 2}))
    ended = start(run, recipe())
    assert ended.codes == {0: EXIT_STOPPED, 1: EXIT_STOPPED}, ended.output
    return run


@pytest.mark.slow
def test_a_stop_seen_by_one_rank_ends_all_after_the_same_step_with_a_checkpoint(stopped: RunDir) -> None:
    assert [path.name for path in stopped.checkpoints.iterdir()] == ["step-00000003"]
    assert list(losses(stopped)) == [1, 2, 3]
    assert [event.step for event in stopped.read_events() if isinstance(event, CheckpointSaved)] == [3]


def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(stopped: RunDir, tmp_path: Path) -> None:
    undisturbed = prepare(tmp_path / "undisturbed", job(args={"dropout": 0.2}, train={"eval_every": 2}))
    assert start(undisturbed, recipe()).codes == {0: 0, 1: 0}

    resumed = RunDir(shutil.copytree(stopped.path, tmp_path / "resumed"))
    torn = resumed.checkpoints / "step-00000005"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half a checkpoint")
    ended = start(resumed, recipe())
    assert ended.codes == {0: 0, 1: 0}, ended.output

    assert losses(resumed) == losses(undisturbed)
    assert [event.step for event in resumed.read_events() if isinstance(event, Resumed)] == [3]
    ours, theirs = (_tensors(run, 6, tmp_path / run.id) for run in (resumed, undisturbed))
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert all(torch.equal(a, b) for a, b in zip(_rng(resumed, 6), _rng(undisturbed, 6), strict=True))


@pytest.mark.slow
def test_the_state_of_a_task_is_in_its_checkpoints(tmp_path: Path) -> None:
    """A run that is stopped after step 3 and resumed, held against one that is not."""
    asked = {"task": "stateful:Keeping", "train": {"probe": "never"}}
    undisturbed = prepare(tmp_path / "undisturbed", job(**asked))
    assert start(undisturbed, recipe()).codes == {0: 0, 1: 0}
    run = prepare(tmp_path / "run", job(**asked, args={"fault": "stop", "call": 3}))
    assert start(run, recipe()).codes == {0: EXIT_STOPPED, 1: EXIT_STOPPED}
    ended = start(run, recipe())
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert losses(run) == losses(undisturbed)


def test_memory_that_runs_out_directly_after_an_update_does_not_repeat_the_update(tmp_path: Path) -> None:
    """The copies for the handover are of the step before, and the parameters are not."""
    alone = recipe("none", 8)
    asked = {"train": {"probe": "never", "checkpoint_every": None}}
    undisturbed = prepare(tmp_path / "undisturbed", job(**asked, task="stateful:Keeping"))
    assert start(undisturbed, alone, 1).codes == {0: 0}
    run = prepare(tmp_path / "run", job(**asked, task="stateful:Full"))
    ended = start(run, alone, 1, {variables.SUPERVISED: "1"})
    assert ended.codes == {0: EXIT_OOM}, ended.output
    ended = start(run, alone, 1)
    assert ended.codes == {0: 0}, ended.output
    ours, theirs = (_tensors(one, 6, tmp_path / one.id) for one in (run, undisturbed))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert losses(run) == losses(undisturbed)


@pytest.mark.slow
def test_attributes_that_no_checkpoint_holds_are_told_once_with_their_names(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(task="stateful:Forgetful", train={"probe": "never"}))
    ended = start(run, recipe("none", micro=8), ranks=1)
    assert ended.codes == {0: 0}, ended.output
    [told] = [event for event in run.read_events() if isinstance(event, StateNotSaved)]
    assert {"task.mean", "task.generator", "task.seen"} <= {*told.names}
    assert ended.output.count(told.reason) == 1


@pytest.mark.slow
def test_a_frozen_parameter_that_a_task_changes_under_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    """A checkpoint has the adapter alone. The task keeps the parameter: model() was called once."""
    pytest.importorskip("peft")
    fields = {"task": "stateful:Teaching", "steps": 3, "train": {"probe": "never"}}
    run = prepare(tmp_path / "run", job(**fields, adapter={"kind": "lora", "rank": 2}))
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 1}
    assert "teacher.weight is frozen, but was changed" in error(run.attempt(0), 0)["exception"]
    assert (run.checkpoints / BESIDE_WEIGHTS / CONFIG).exists()


@pytest.mark.slow
def test_a_state_that_no_file_can_hold_is_refused_at_the_start(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(task="stateful:Unsaved"))
    ended = start(run, recipe("none", micro=8), ranks=1)
    assert ended.codes == {0: 1}
    told = error(run.attempt(0), 0)
    assert (
        told["failure"] == "user-error"
        and "state()['generator'] is of type torch._C.Generator" in told["exception"]
    )


@pytest.mark.slow
def test_parts_of_weights_in_a_tasks_state_go_on_only_with_the_same_ranks_and_sharding(
    tmp_path: Path,
) -> None:
    run = prepare(tmp_path / "run", job(task="stateful:Averaging", train={"probe": "never"}))
    assert start(run, recipe("fsdp")).codes == {0: 0, 1: 0}
    prepare(run.path, job(task="stateful:Averaging", steps=8, train={"probe": "never"}))
    for other, ranks in ((recipe("none", micro=8), 1), (recipe("ddp"), 2)):
        codes = start(run, other, ranks).codes.values()
        assert 1 in codes and 0 not in codes  # a rank that is later is ended
        told = any_error(run.attempts()[-1])
        assert (
            "['means']['embedding.weight'] of what state() of Averaging returned" in told["exception"]
            and told["failure"] == "user-error"
        )
        assert "resume with those" in told["exception"]
    assert start(run, recipe("fsdp")).codes == {0: 0, 1: 0}


@pytest.mark.thorough
def test_a_run_goes_on_with_another_micro_batch_sharding_and_number_of_ranks(tmp_path: Path) -> None:
    quiet = job(train={"checkpoint_every": 3, "keep_checkpoints": 3})
    run = prepare(tmp_path / "run", quiet)
    assert start(run, recipe("fsdp", micro=4)).codes == {0: 0, 1: 0}
    undisturbed = losses(run, attempt=0)
    shutil.rmtree(run.checkpoints / "step-00000006")

    ended = start(run, recipe("none", micro=2, accumulation=4), ranks=1)
    assert ended.codes == {0: 0}, ended.output
    assert losses(run, attempt=1) == pytest.approx({step: undisturbed[step] for step in (4, 5, 6)}, rel=1e-5)
    shutil.rmtree(run.checkpoints / "step-00000006")

    assert start(run, recipe("ddp", micro=1, accumulation=4)).codes == {0: 0, 1: 0}
    assert losses(run, attempt=2) == pytest.approx({step: undisturbed[step] for step in (4, 5, 6)}, rel=1e-5)


def test_a_rank_out_of_memory_ends_at_once_and_says_so_with_a_snapshot(tmp_path: Path) -> None:
    asked = job(args={"fault": "allocate", "call": 2}, train={"probe": "never"})
    run = prepare(tmp_path / "run", asked)
    ended = start(run, recipe("ddp"), env={"TRAIN_MEMORY_BUDGET": "16MiB"})
    assert ended.codes[1] == EXIT_OOM
    failure = error(run.attempt(0), 1)
    assert (failure["failure"], failure["phase"], failure["step"]) == ("gpu-oom", "forward", 2)
    assert "Tried to allocate 32.00 MiB" in failure["exception"]
    assert "OutOfMemoryError" in ended.output
    _not_blamed(run, 0)

    memory = OutOfMemory.model_validate(failure["memory"])
    assert memory.snapshot == str(run.attempt(0).oom_snapshot(1))
    assert (memory.kind, memory.requested, memory.total) == ("gpu", 32 * 2**20, 16 * 2**20)
    assert memory.free is not None and 0 < memory.free < 16 * 2**20
    bucket, *rest = memory.largest
    assert (bucket.shape, bucket.name) == ((2928,), None), "all gradients, which DDP sends as one"
    assert {(one.bytes, one.shape, one.dtype) for one in rest} == {(64 * 16 * 4, (64, 16), "float32")}
    assert [one.name for one in rest] == [
        "embedding.weight", "head.weight", "exp_avg of embedding.weight", "exp_avg_sq of embedding.weight"
    ]  # fmt: skip

    assert run.attempt(0).oom_snapshot(0) is None
    content = read_json(Path(memory.snapshot))
    assert (content["phase"], content["step"], content["limit"]) == ("forward", 2, 16 * 2**20)
    sizes = [storage["bytes"] for storage in content["storages"]]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == content["bytes"]
    # The embedding and the head are of one shape; AdamW made two moments of each in the first step.
    alike = [s for s in content["storages"] if s["shape"] == [64, 16] and s["dtype"] == "float32"]
    counts = {(s["phase"], s["step"]): s["count"] for s in alike}
    assert counts["init", None] == 2 and counts["optimizer", 1] == 4
    assert [line["step"] for line in read_json_lines(run.attempt(0).memory(1))] == [1]


def test_memory_that_ran_out_in_the_probe_is_told_like_any_other(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(train={"probe": "always"}))
    ended = start(run, recipe("none", micro=8), ranks=1, env={"TRAIN_MEMORY_BUDGET": "56KiB"})
    assert ended.codes == {0: EXIT_OOM}, ended.output
    failure = error(run.attempt(0), 0)
    memory = OutOfMemory.model_validate(failure["memory"])
    assert failure["phase"] == "probe" and memory.requested and memory.total == 56 * 2**10
    assert {one.name for one in memory.largest} >= {"embedding.weight", "head.weight"}
    assert memory.snapshot == str(run.attempt(0).oom_snapshot(0))
    assert read_json(Path(memory.snapshot))["phase"] == "probe"
    for text in (failure["traceback"], ended.output):
        assert "ragged.py" in text and "current_recipe.py" not in text


@pytest.mark.slow
def test_a_probe_that_finds_something_smaller_leaves_no_snapshot(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(steps=1, train={"probe": "always"}))
    ended = start(run, recipe("none", micro=8), ranks=1, env={"TRAIN_MEMORY_BUDGET": "150KiB"})
    assert ended.codes == {0: 0}, ended.output
    *_, probe = [event for event in run.read_events() if isinstance(event, Probed)]
    assert probe.micro_batch_size < 8
    assert run.attempt(0).oom_snapshot(0) is None


@pytest.mark.slow
def test_a_job_that_forbids_downgrades_is_not_probed_and_fails(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(steps=1, retries={"lower": 0}, train={"probe": "always"}))
    ended = start(run, recipe("none", micro=8), ranks=1, env={"TRAIN_MEMORY_BUDGET": "150KiB"})
    assert ended.codes == {0: EXIT_OOM}, ended.output
    failure = error(run.attempt(0), 0)
    assert failure["phase"] in ("forward", "backward")
    assert failure["why_not_in_process"] == "a downgrade is forbidden (retries.lower: 0)"
    assert run.read_events() == []


@pytest.mark.slow
def test_with_batch_norm_the_probe_leaves_the_micro_batch_to_what_else_the_plan_has(tmp_path: Path) -> None:
    asked = job(task="normed:Normed", steps=1, train={"probe": "always"})
    run, chosen = prepare(tmp_path / "run", asked), recipe("none", micro=8)
    layout = Layout(nodes=1, ranks_per_node=1, gpus_per_node=0)
    ladder = (chosen.model_copy(update={"activations": "checkpoint"}),)
    run.plan.write_text(Plan(layout=layout, recipe=chosen, ladder=ladder, reason="").model_dump_json())
    ended = start(run, chosen, ranks=1, env={"TRAIN_MEMORY_FAIL": "phase=probe"})
    assert ended.codes == {0: EXIT_OOM}, ended.output
    assert error(run.attempt(0), 0)["phase"] == "probe"
    assert [event for event in run.read_events() if isinstance(event, Downgrade)] == []

    ended = start(run, ladder[0], ranks=1, env={"TRAIN_MEMORY_FAIL": "phase=probe"})
    assert ended.codes == {0: 0}, "now there is only the micro-batch"
    assert [event.micro_batch_size for event in run.read_events() if isinstance(event, Probed)] == [4]


@pytest.mark.slow
def test_a_full_memory_is_told_with_the_users_own_lines_and_why_no_step_was_repeated(tmp_path: Path) -> None:
    """Where it passes through launcher, and at the end of the rungs, where it is raised once more."""
    for name, chosen in {"ddp": recipe("ddp", 4), "one": recipe("none", 1, 8)}.items():
        run = prepare(tmp_path / name, job(steps=2))
        drill = {"TRAIN_MEMORY_FAIL": "step=2,phase=forward"}
        ended = start(run, chosen, ranks=2 if name == "ddp" else 1, env=drill)
        assert EXIT_OOM in ended.codes.values(), ended.output
        first = next(rank for rank, code in ended.codes.items() if code == EXIT_OOM)
        assert "ragged.py" in ended.output and "current_recipe.py" not in ended.output, ended.output
        assert "launcher/train/cpu_memory_budget.py" not in ended.output, ended.output
        why_not = {
            "ddp": "sharding: ddp cannot be retried after a failure in backward",
            "one": "nothing is left to give up without a restart",
        }
        assert error(run.attempt(0), first)["why_not_in_process"] == why_not[name]
        off = [event.reason for event in run.read_events() if isinstance(event, RecoveryOff)]
        assert off == ([why_not[name]] if name == "ddp" else [])


@pytest.mark.slow
def test_a_fire_drill_can_strike_a_save_and_one_that_never_struck_is_told(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(steps=2, train={"checkpoint_every": 1}))
    drills = {"TRAIN_MEMORY_FAIL": "step=1,phase=checkpoint,attempt=0;step=2,phase=evaluation,attempt=1"}
    ended = start(run, recipe("none", micro=8), ranks=1, env=drills)
    assert ended.codes == {0: EXIT_OOM}, ended.output
    failure = error(run.attempt(0), 0)
    assert (failure["phase"], failure["step"]) == ("checkpoint", 1) and "This is a drill" in failure[
        "exception"
    ]

    ended = start(run, recipe("none", micro=8), ranks=1, env=drills)
    assert ended.codes == {0: 0}
    assert "never took place: step=2,phase=evaluation,attempt=1" in ended.output


def test_the_line_about_a_repeated_step_is_no_reason_for_a_later_end(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(steps=2, train={"probe": "never"}))
    ended = start(run, recipe("none", 8), 1, {"TRAIN_MEMORY_FAIL": "step=2,phase=backward"})
    assert ended.codes == {0: 0}, ended.output
    assert "downgrade: micro-batch 8 -> 4" in ended.output
    assert clues_of_text(ended.output.encode().splitlines()) == []


@pytest.mark.slow
def test_the_demo_of_a_downgrade_runs_out_after_one_step_and_fits_in_halves(tmp_path: Path) -> None:
    shown = job(**YAML(typ="safe").load(EXAMPLES / "demo-oom.yaml"))
    run = prepare(tmp_path / "run", shown.model_copy(update={"steps": 3}))
    ended = start(run, recipe("ddp", micro=16), env=shown.env)
    assert EXIT_OOM in ended.codes.values(), ended.output
    assert list(losses(run)) == [1]

    ended = start(run, recipe("ddp", micro=8, accumulation=2), env=shown.env)
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert list(losses(run, attempt=1)) == [1, 2, 3]  # started by hand: nothing was handed over
    told = [(event.step, event.from_) for event in run.read_events() if isinstance(event, Resumed)]
    assert told == [(0, "nothing")]
    assert "no state of earlier steps is left" in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("fault", "exception"), [("raise", "KeyError: 'no such label'"), ("exit", "SystemExit: no such label")]
)
def test_an_exception_of_the_task_ends_the_run_and_is_blamed_on_its_rank(
    tmp_path: Path, sharding: str, fault: str, exception: str
) -> None:
    """Under FSDP the ranks meet first: it might have come of the zeros of a rank that ran out of memory."""
    run = prepare(tmp_path / "run", job(args={"fault": fault, "call": 3}, train={"probe": "always"}))
    ended = start(run, recipe(sharding, micro=2, accumulation=2))
    assert ended.codes[1] == 1
    failure = error(run.attempt(0), 1)
    assert (failure["failure"], failure["phase"], failure["step"]) == ("user-error", "forward", 2)
    assert failure["exception"] == exception
    assert "ragged.py" in failure["traceback"]
    _not_blamed(run, 0)


@pytest.mark.slow
def test_a_sample_that_cannot_be_read_is_the_users_error_of_the_first_step(tmp_path: Path) -> None:
    """It is asked for before, to compare a batch with its halves, where it is nobody's error."""
    run = prepare(tmp_path / "run", job(task="ragged:BrokenData", train={"probe": "never"}))
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 1}
    failure = error(run.attempt(0), 0)
    assert (failure["failure"], failure["phase"], failure["step"]) == ("user-error", "data", 1)
    assert re.fullmatch(
        r"SampleError: sample \d+ of data\(\"train\"\) raised KeyError: 'no such sample'",
        failure["exception"],
    )


@pytest.mark.slow
def test_an_exception_in_the_probe_alone_skips_the_probe_and_ends_nothing(tmp_path: Path) -> None:
    """Of a parameter above 1 MiB a rank alone has its own rows, repeated: they are in no order."""
    asked = job(task="ordered:Ordered", train={"probe": "always"}, steps=3)
    run = prepare(tmp_path / "run", asked)
    ended = start(run, recipe("fsdp"))
    assert ended.codes == {0: 0, 1: 0}, ended.output
    [told] = [event.reason for event in run.read_events() if isinstance(event, ProbeSkipped)]
    assert "the task raised ValueError: the edges are not in order" in told
    assert ended.output.count(told) == 1 and list(losses(run)) == [1, 2, 3]


@pytest.mark.thorough
def test_a_full_disk_costs_checkpoints_until_the_last_one_which_ends_the_attempt(tmp_path: Path) -> None:
    args = {"dim": 64, "fault": "full disk", "call": 4}
    run = prepare(tmp_path / "run", job(args=args, train={"checkpoint_every": 2}))
    ended = start(run, recipe())
    assert 1 in ended.codes.values(), ended.output
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6], "the failed checkpoint of step 4 stopped nothing"
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"], "the last good one"
    [failed] = [event for event in run.read_events() if isinstance(event, CheckpointFailed)]
    assert failed.step == 4 and "rank 1: OSError: [Errno 27] File too large" in failed.reason
    assert f"{failed.reason}. Training continues" in ended.output
    # Both ranks learn it in the same moment; torchrun may end one of them before it has written.
    failure = error(run.attempt(0), 1) or error(run.attempt(0), 0)
    assert (failure["failure"], failure["phase"], failure["step"]) == ("user-error", "checkpoint", 6)
    assert failure["exception"].startswith("NotSavedError: checkpoint of step 6 could not be written")

    ended = start(run, recipe())
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert list(losses(run, attempt=1)) == [3, 4, 5, 6]


@pytest.mark.slow
def test_a_recipe_that_this_machine_cannot_run_is_refused_with_one_that_can(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job())
    ended = start(run, recipe("none", micro=8, precision="float8"), ranks=1)
    failure = error(run.attempt(0), 0)
    assert ended.codes == {0: 1}
    assert failure["failure"] == "user-error"
    assert "float8 needs a GPU of compute capability 8.9; use bf16-mixed here" in failure["exception"]


def _tensors(run: RunDir, step: int, into: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    dcp_to_torch_save(run.checkpoints / f"step-{step:08d}", f"{into}.pt")
    return dict(_flat(torch.load(f"{into}.pt", weights_only=False)))


def _flat(tree: object, name: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(name, tree)]
    if isinstance(tree, dict):
        return [pair for key, value in tree.items() for pair in _flat(value, f"{name}/{key}")]
    return []


def _rng(run: RunDir, step: int) -> list[torch.Tensor]:
    path = run.checkpoints / f"step-{step:08d}"
    return [torch.load(path / f"rank-{rank:03d}.pt")["rng"]["torch"] for rank in (0, 1)]


def _not_blamed(run: RunDir, rank: int) -> None:
    """The other rank was ended by torchrun, or saw its peer vanish later and does not claim to know why."""
    other, root = error(run.attempt(0), rank), error(run.attempt(0), 1 - rank)
    assert not other or (other["failure"] is None and other["time"] > root["time"])


def test_weights_that_a_pass_changes_and_changes_back_are_restored_if_memory_runs_out_in_between(
    tmp_path: Path,
) -> None:
    found = {}
    for name, text in {"undisturbed": "", "out of memory": "step=3,phase=forward,allocation=3"}.items():
        asked = job(task="stateful:Halving", steps=5, train={"probe": "never", "lr": 1e-4})
        run = prepare(tmp_path / name, asked)
        environ = {"TRAIN_MEMORY_FAIL": text} if text else {}
        ended = start(run, recipe("none", micro=8), ranks=1, env=environ)
        assert ended.codes == {0: 0}, ended.output
        found[name] = losses(run)
    assert [event.phase for event in run.read_events() if isinstance(event, Downgrade)] == ["forward"]
    assert found["out of memory"] == pytest.approx(found["undisturbed"], rel=1e-4)


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        (1, recipe("none", micro=8)),
        (2, recipe("fsdp")),
        (1, recipe("none", micro=8, optimizer_step="backward", activations="checkpoint")),
    ],
)
def test_what_a_task_compiles_itself_runs_compiled(tmp_path: Path, ranks: int, chosen: Recipe) -> None:
    """After it has run under a dispatch mode, such as the probe's, torch never compiles a function."""
    run = prepare(tmp_path, job(task="stateful:Compiled", steps=3, train={"probe": "always"}))
    ended = start(run, chosen, ranks)
    assert set(ended.codes.values()) == {0}, ended.output


def test_memory_that_runs_out_in_the_step_that_unfreezes_a_layer_ends_the_attempt_as_out_of_memory(
    tmp_path: Path,
) -> None:
    """The missing collectives are not those of the earlier steps: larger gradients are reduced."""
    asked = job(task="traps:Thawing", steps=4, model={"batch_norm": True}, train={"probe": "never"})
    run = prepare(tmp_path / "run", asked)
    environ = {"TRAIN_MEMORY_FAIL": "rank=last,step=3,phase=backward"}
    ended = start(run, recipe(), env=environ)
    assert ended.codes[1] == EXIT_OOM, ended.output
    assert "frozen or unfrozen in this step" in error(run.attempt(0), 1)["why_not_in_process"]
