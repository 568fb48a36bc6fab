"""A run ends while its last state lies in shared memory: it becomes a checkpoint, or the end says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import handover_folder
from launcher.spec.verdict import EXIT_CODES
from launcher.supervise.process import processes_of
from tests.e2e.test_disk_full import small_disk as small_disk
from tests.e2e.test_handover import final, job, resumed, run
from tests.e2e.test_no_shared_folder import Pair
from tests.e2e.test_no_shared_folder import pair as pair
from tests.e2e.test_together import two_nodes as two_nodes
from tests.lab import Lab, events, metrics, verdicts, wait_for

pytestmark = pytest.mark.e2e

OOM = EXIT_CODES["gpu-oom"]
NEVER = {"lower": 0}


def same(lab: Lab, one: RunDir, other: RunDir) -> None:
    """The last checkpoints of two runs are equal bit for bit."""
    mine, theirs = (final(run, lab.folder / f"{run.id}.pt") for run in (one, other))
    assert len(mine) > 20 and mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def clean(run: RunDir) -> None:
    assert not handover_folder(run, 0).parent.exists(), "nothing stays in shared memory"
    assert not processes_of(run.path)
    assert not list(run.checkpoints.glob(".*")), "nothing half-written"


def resume(lab: Lab, run: RunDir) -> None:
    done = lab.cli("resume", run.id, "--follow", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr + lab.all_logs(run)
    clean(run)


def kept(run: RunDir) -> list[tuple[int, str]]:
    return [(event["step"], event["from"]) for event in events(run, "checkpoint") if "from" in event]


def why(lab: Lab, run: RunDir, word: str) -> str:
    """The line of `launcher why` that begins with the word."""
    lines = lab.cli("why", run.id).stdout.splitlines()
    [line] = [line for line in lines if line.startswith(f"{word} ")]
    return line.removeprefix(word).strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "place", "step", "saved"), [("ddp", "backward", 5, 4), ("fsdp", "evaluation", 6, 6)]
)
def test_a_run_that_may_not_step_down_keeps_its_last_step(
    lab: Lab, sharding: str, place: str, step: int, saved: int
) -> None:
    fields: dict[str, Any] = {
        "recipe": {"sharding": sharding, "precision": "fp32", "micro_batch_size": 16},
        "train": {"eval_every": 2},
        "retries": NEVER,
    }
    ended = run(lab, [0, 1, place, step], code=OOM, **fields)
    clean(ended)
    assert kept(ended) == [(saved, "shared-memory")]
    assert [one["failure"] for one in verdicts(ended)] == ["gpu-oom"]
    told = f"the state of step {saved} was written as a checkpoint"
    assert ended.read_state().then.endswith(told)
    assert why(lab, ended, "kept") == f"{told}; `launcher resume {ended.id}` continues from it"
    status = lab.status(ended)
    assert (status["state"], status["attempt"], status["checkpoint_step"]) == ("failed", 0, saved)
    assert f"writing the state of step {saved} as a checkpoint" in lab.cli("logs", ended.id).stdout

    resume(lab, ended)
    assert resumed(ended) == [(saved, "checkpoint")] and len(ended.attempts()) == 2
    assert [line["step"] for line in metrics(ended)] == list(range(1, 9)), "each step is recorded once"
    assert [line["step"] for line in metrics(ended) if "eval_loss" in line] == [2, 4, 6, 8]
    same(lab, ended, run(lab, **fields))


@pytest.mark.slow
def test_a_run_at_the_end_of_its_ladder_keeps_its_last_step(lab: Lab) -> None:
    recipe = {"sharding": "ddp", "precision": "fp32", "micro_batch_size": 4, "grad_sync": "each"}
    first = [0, 1, "backward", 3]
    ended = run(lab, first, [1, 0, "forward", 6], code=OOM, recipe=recipe)
    clean(ended)
    assert kept(ended) == [(5, "shared-memory")] and len(ended.attempts()) == 2
    then = ended.read_state().then
    assert "tried before: micro-batch 4 -> 2" in then and "step 5 was written as a checkpoint" in then
    resume(lab, ended)
    assert [one["failure"] for one in verdicts(ended)] == ["gpu-oom", "gpu-oom", "succeeded"]
    assert resumed(ended) == [(2, "shared-memory"), (5, "checkpoint")]
    same(lab, ended, run(lab, first, recipe=recipe))


@pytest.mark.slow
def test_a_handover_that_the_last_attempt_did_not_come_to_take_up_is_kept(lab: Lab) -> None:
    faults = [[0, 1, "backward", 5], [1, -1, "no model", 0]]
    ended = run(lab, *faults, code=EXIT_CODES["user-error"])
    clean(ended)
    assert [one["failure"] for one in verdicts(ended)] == ["gpu-oom", "user-error"]
    assert kept(ended) == []
    [failed] = events(ended, "checkpoint-failed")
    assert failed["step"] == 4 and "no model today" in failed["reason"]
    assert why(lab, ended, "lost") == "steps 1 to 4 are lost: ValueError: no model today"


@pytest.mark.slow
@pytest.mark.parametrize(("how", "failure"), [("cancelled", "cancelled"), ("preempted", "preempted")])
def test_memory_that_runs_out_while_a_run_is_stopped_costs_no_step(lab: Lab, how: str, failure: Any) -> None:
    ended = run(lab, [0, -1, f"{how} in time", 5], [0, 1, "backward", 5], code=EXIT_CODES[failure])
    clean(ended)
    assert [one["failure"] for one in verdicts(ended)] == [failure]
    assert kept(ended) == [(4, "shared-memory")]
    assert lab.status(ended)["state"] == {"cancelled": "cancelled", "preempted": "interrupted"}[how]
    assert why(lab, ended, "kept").startswith("the state of step 4 was written as a checkpoint")
    resume(lab, ended)
    assert resumed(ended) == [(4, "checkpoint")]
    same(lab, ended, run(lab))


@pytest.mark.slow
def test_a_second_cancel_ends_the_saving_at_once(lab: Lab) -> None:
    faults = [[0, -1, "cancelled in time", 5], [0, 1, "backward", 5], [0, -1, "save held", 0]]
    found = lab.submit(job(lab, *faults))
    wait_for((found.path / "saving").exists, "half a checkpoint")
    [half] = found.checkpoints.iterdir()
    assert half.name == ".step-00000004.partial"
    assert lab.cli("cancel", found.id).returncode == 0
    assert lab.wait(found)["state"] == "cancelled"
    wait_for(lambda: not processes_of(found.path), "end of every rank")
    clean(found)
    assert list(found.checkpoints.iterdir()) == []
    assert why(lab, found, "lost") == "steps 1 to 4 are lost: no time was left to save"


@pytest.mark.slow
def test_a_state_that_cannot_be_written_is_told_as_lost(lab: Lab) -> None:
    ended = run(lab, [0, -1, "unwritable", 5], [0, 1, "backward", 5], code=OOM, retries=NEVER)
    assert not processes_of(ended.path)
    [failed] = events(ended, "checkpoint-failed")
    assert (failed["step"], failed["from"]) == (4, "shared-memory") and "NotADirectory" in failed["reason"]
    assert why(lab, ended, "lost").startswith("steps 1 to 4 are lost: NotSavedError: checkpoint of step 4")
    assert "steps 1 to 4 are lost" in ended.read_state().then


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(lab: Lab, small_disk: Path) -> None:
    lab.environ["LAUNCHER_RUNS"] = str(small_disk / "runs")
    done = lab.cli(
        "run",
        str(
            lab.job(
                task="launcher.tasks.gpt:PydocGPT",
                args={"layers": 2, "dim": 128, "heads": 2, "context": 32},
                steps=6,
                train={"checkpoint_every": None},
                recipe={"sharding": "ddp", "precision": "fp32"},
                retries=NEVER,
                env={"TRAIN_MEMORY_FAIL": "rank=last,step=3,phase=backward"},
            )
        ),
    )
    ended = lab.newest()
    assert done.returncode == OOM and not processes_of(ended.path)
    assert list(ended.checkpoints.iterdir()) == []
    lost = why(lab, ended, "lost")
    assert lost.startswith("steps 1 to 2 are lost: NotSavedError: ") and "No space left on device" in lost


@pytest.mark.slow
def test_steps_that_could_not_be_handed_over_are_told_as_lost(lab: Lab) -> None:
    train = {"checkpoint_every": 1}
    ended = run(lab, [0, 1, "optimizer", 3], code=OOM, retries=NEVER, train=train)
    assert "lost " not in lab.cli("why", ended.id).stdout, "the checkpoint of step 2 has all that was done"
    ended = run(lab, [0, 1, "optimizer", 3], code=OOM, retries=NEVER)
    assert why(lab, ended, "lost") == (
        "steps 1 to 2 are lost: rank 1 was in the middle of the update of step 3"
    )


@pytest.mark.slow
def test_two_nodes_write_their_last_state_together(lab: Lab, two_nodes) -> None:
    job(lab)
    fields: dict[str, Any] = {
        "task": "faults:Faulty",
        "args": {"faults": [[0, 1, "forward", 5]]},
        "steps": 8,
        "batch": {"global": 32},
        "train": {"checkpoint_every": None, "lr": 1e-2},
        "recipe": {"sharding": "fsdp", "precision": "fp32", "micro_batch_size": 16},
        "retries": NEVER,
    }
    found, supervisors = two_nodes("", **fields)
    assert [one.wait(240) for one in supervisors] == [OOM, OOM], lab.all_logs(found)
    clean(found)
    assert not handover_folder(found, 1).parent.exists()
    assert kept(found) == [(4, "shared-memory")]
    _, supervisors = two_nodes("", **fields)
    assert [one.wait(240) for one in supervisors] == [0, 0], lab.all_logs(found)
    assert resumed(found) == [(4, "checkpoint")]


@pytest.mark.slow
def test_hosts_that_share_no_folder_write_a_part_each(pair: Any) -> None:
    made: Pair = pair("last")
    made.render([0, 1, "backward", 5], retries=NEVER)
    made.start()
    made.wait(OOM, OOM)
    for node in made.nodes:
        assert [path.name for path in node.checkpoints.iterdir()] == ["step-00000004"], made.said()
    assert kept(made.run) == [(4, "shared-memory")]
    made.start()
    made.wait(0, 0)
    assert resumed(made.run) == [(4, "checkpoint")]
