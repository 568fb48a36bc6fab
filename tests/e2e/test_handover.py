"""Out of memory, the same allocation, the next attempt: no optimizer step is lost, nobody hangs."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from launcher.rundir.layout import AttemptDir, RunDir
from launcher.rundir.shared_memory_folders import handover_folder
from launcher.spec.verdict import EXIT_CODES
from launcher.supervise.process import processes_of
from tests.e2e.test_together import two_nodes as two_nodes
from tests.lab import Lab, events, metrics, verdicts, wait_for

pytestmark = pytest.mark.e2e

STEPS = 8
BATCH = 32


def job(lab: Lab, *faults: list[Any], train: dict[str, Any] | None = None, **fields: Any) -> str:
    shutil.copy(Path(__file__).with_name("faults.py"), lab.folder / "faults.py")
    base = {
        "task": "faults:Faulty",
        "args": {"faults": list(faults)},
        "steps": STEPS,
        "batch": {"global": BATCH},
        "train": {"checkpoint_every": None, "lr": 1e-2, **(train or {})},
        "recipe": {"sharding": "ddp", "precision": "fp32", "micro_batch_size": 16},
    }
    return str(lab.job(**{**base, **fields}))


def run(lab: Lab, *faults: list[Any], code: int = 0, codes: tuple[int, ...] = (), **fields: Any) -> RunDir:
    done = lab.cli("run", job(lab, *faults, **fields), timeout=280)
    found = lab.newest()
    assert done.returncode in (codes or (code,)), done.stdout + done.stderr + lab.all_logs(found)
    assert not handover_folder(found, 0).parent.exists(), "nothing stays in shared memory"
    assert not processes_of(found.path)
    return found


def resumed(run: RunDir) -> list[tuple[int, str]]:
    return [(event["step"], event["from"]) for event in events(run, "resumed")]


def final(run: RunDir, into: Path) -> dict[str, torch.Tensor]:
    """All that the last checkpoint holds, each rank's own state included."""
    path = run.checkpoints / f"step-{STEPS:08d}"
    dcp_to_torch_save(path, into)
    whole = {"whole": torch.load(into, weights_only=False)}
    for rank in (0, 1):
        own = torch.load(path / f"rank-{rank:03d}.pt")
        whole[f"rank {rank}"] = [own["rng"]["torch"], own["buffers"]]
    return dict(_flat(whole))


def _flat(tree: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [(name, tree)]
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [pair for key, value in pairs for pair in _flat(value, f"{name}/{key}")]


@pytest.mark.slow
def test_every_phase_that_ends_an_attempt_costs_no_optimizer_step(lab: Lab) -> None:
    ours = run(
        lab,
        [0, 1, "checkpoint", 6],
        [1, 1, "backward", 7],
        [2, -1, "evaluation", 8],
        train={"eval_every": 2, "probe": "never", "checkpoint_every": 6},
        env={"TRAIN_MEMORY_BUDGET": "1GiB"},  # which gives the CPU a host, to save states from
    )
    assert [(one["failure"], one["phase"], one["step"]) for one in verdicts(ours)] == [
        ("gpu-oom", "checkpoint", 6),
        ("gpu-oom", "backward", 7),
        ("gpu-oom", "evaluation", 8),
        ("succeeded", None, None),
    ], lab.all_logs(ours)
    why_not = "sharding: ddp cannot be retried after a failure in backward"
    assert [one["reason"] for one in events(ours, "recovery-off")] == [why_not] * 4
    assert [one["why_not_in_process"] for one in events(ours, "downgrade")] == [None, why_not, None]
    assert resumed(ours) == [(6, "shared-memory"), (6, "checkpoint"), (8, "shared-memory")]
    assert "recvValue" not in lab.all_logs(ours), "a rank waits on the store of a rank that has left"
    # The model has BatchNorm: it gives up all else before its micro-batch.
    offload, smaller, _ = [event["reason"] for event in events(ours, "downgrade")]
    assert offload == "offload none -> cpu-optimizer" and smaller.startswith("micro-batch 16 -> 8")
    assert [event["step"] for event in events(ours, "handover")] == [6, 8]
    assert [event["step"] for event in events(ours, "checkpoint")] == [6, 8], "attempt 1 wrote that of step 6"
    assert [line["step"] for line in metrics(ours)] == list(range(1, STEPS + 1)), "each step once"
    assert [line["step"] for line in metrics(ours) if "eval_loss" in line] == [2, 4, 6, 8]

    # The same micro-batches in the same steps, but from checkpoints.
    theirs = run(
        lab,
        [0, 0, "forward", 5],
        [1, 0, "forward", 7],
        train={"eval_every": 2, "probe": "never", "checkpoint_every": 2},
        env={"TRAIN_MEMORY_BUDGET": "1GiB"},
    )
    assert resumed(theirs) == [(step, "checkpoint") for step in (4, 6)]
    mine, other = (final(one, lab.folder / f"{one.id}.pt") for one in (ours, theirs))
    assert len(mine) > 20 and mine.keys() == other.keys()
    assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


@pytest.mark.parametrize("phase", ["checkpoint", pytest.param("evaluation", marks=pytest.mark.slow)])
def test_a_checkpoint_that_was_due_when_memory_ran_out_is_written_by_the_next_attempt(
    lab: Lab, phase: str
) -> None:
    train = {"eval_every": 2, "checkpoint_every": 2, "keep_best": True, "keep_checkpoints": 3}
    found = run(
        lab,
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 1, "dim": 32, "heads": 2, "context": 1024},
        steps=5,
        batch={"global": 8},
        recipe={"sharding": "fsdp", "precision": "fp32"},
        train={**train, "probe": "never"},
        env={"TRAIN_MEMORY_FAIL": f"phase={phase},step=2,attempt=0"},
    )
    assert [(one["failure"], one["phase"]) for one in verdicts(found)] == [
        ("gpu-oom", phase),
        ("succeeded", None),
    ]
    assert resumed(found) == [(2, "shared-memory")]
    assert [event["step"] for event in events(found, "checkpoint")] == [2, 4, 5]
    recorded = {line["step"]: line["eval_loss"] for line in metrics(found) if "eval_loss" in line}
    for step in (2, 4, 5):  # keep_best compares these
        marker = json.loads((found.checkpoints / f"step-{step:08d}" / "complete.json").read_text())
        assert marker["eval_loss"] == recorded[step]


@pytest.mark.slow
def test_zero1_hands_over_the_states_of_every_rank_and_ends_as_ddp_does(lab: Lab) -> None:
    faults = ([0, 1, "backward", 5], [1, 0, "forward", 7])
    ended = {}
    for sharding in ("zero1", "ddp"):
        recipe = {"sharding": sharding, "precision": "fp32", "optimizer": "lion", "micro_batch_size": 16}
        found = run(lab, *faults, recipe=recipe, train={"probe": "never"})
        assert [one["failure"] for one in verdicts(found)] == ["gpu-oom", "gpu-oom", "succeeded"]
        assert resumed(found) == [(4, "shared-memory"), (6, "shared-memory")]
        assert [line["step"] for line in metrics(found)] == list(range(1, STEPS + 1)), "each step once"
        why_not = f"sharding: {sharding} cannot be retried after a failure in backward"
        assert {one["reason"] for one in events(found, "recovery-off")} == {why_not}
        ended[sharding] = final(found, lab.folder / f"{found.id}.pt")
    ours, theirs = ended["zero1"], ended["ddp"]
    assert len(ours) > 20 and ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
def test_ranks_that_do_not_meet_again_after_a_failure_are_ended_within_seconds_and_lose_no_step(
    lab: Lab,
) -> None:
    """Under FSDP the rank that failed sends what it knows of; the other one sends more."""
    fsdp = {"sharding": "fsdp", "precision": "fp32", "micro_batch_size": 16}
    found = run(lab, [0, -1, "twice", 5], [0, 1, "forward", 5], recipe=fsdp)
    first, second = verdicts(found)
    assert (first["failure"], first["phase"], first["step"], first["rank"]) == ("gpu-oom", "forward", 5, 1)
    assert second["failure"] == "succeeded"
    [downgrade] = events(found, "downgrade")
    assert downgrade["changes"]["micro_batch_size"] == [16, 8]
    assert downgrade["why_not_in_process"].startswith("the ranks did not meet again")
    assert resumed(found) == [(4, "shared-memory")]
    assert [line["step"] for line in metrics(found)] == list(range(1, STEPS + 1))
    assert _seconds_from_step_to_end(found, 4) < 25, "not after collective_timeout"


@pytest.mark.thorough
def test_after_half_an_update_the_run_resumes_from_the_checkpoint(lab: Lab) -> None:
    oom = EXIT_CODES["gpu-oom"]
    first = run(lab, [0, 0, "optimizer", 1], [1, 1, "optimizer", 3], code=oom, train={"checkpoint_every": 1})
    assert "a smaller micro-batch does not help" in first.read_state().then
    assert lab.cli("resume", first.id, "--follow", timeout=280).returncode == oom
    skipped = [event["reason"] for event in events(first, "handover-skipped")]
    # The other rank may not have begun with its first update: then there is nothing to tell of.
    assert skipped[-1] == "rank 1 was in the middle of the update of step 3" and len(skipped) < 3
    assert lab.cli("resume", first.id, "--follow", timeout=280).returncode == 0, lab.all_logs(first)
    assert resumed(first) == [(2, "checkpoint")]
    # Rank 0 may have written the line of step 3 before the attempt ended: the later attempt's counts.
    assert sorted({line["step"] for line in metrics(first)}) == list(range(1, STEPS + 1))
    assert not handover_folder(first, 0).parent.exists()


@pytest.mark.slow
def test_a_rank_killed_while_it_hands_over_costs_the_steps_since_the_checkpoint(lab: Lab) -> None:
    """And in the next attempt two ranks fail at once, for different reasons: nothing hangs either."""
    found = run(
        lab,
        [0, 1, "backward", 4],
        [0, 0, "killed in the handover", 0],
        [1, 0, "error", 4],
        [1, 1, "backward", 4],
        codes=(0, EXIT_CODES["user-error"]),
        train={"checkpoint_every": 2},
    )
    first, second = verdicts(found)[:2]
    assert (first["failure"], first["rank"], first["step"]) == ("gpu-oom", 1, 4)
    assert resumed(found)[0] == (2, "checkpoint")
    assert (second["failure"], second["rank"]) in [("user-error", 0), ("gpu-oom", 1)]
    for attempt in found.attempts()[:2]:
        assert _seconds_from_failure_to_end(attempt) < 25


@pytest.mark.slow
def test_the_end_of_the_ladder_names_every_rung(lab: Lab) -> None:
    recipe = {"sharding": "ddp", "precision": "fp32", "micro_batch_size": 4, "grad_sync": "each"}
    found = run(lab, [-1, 1, "backward", 2], code=EXIT_CODES["gpu-oom"], recipe=recipe)
    assert [one["failure"] for one in verdicts(found)] == ["gpu-oom"] * 2
    assert resumed(found) == [(1, "shared-memory")]
    then = found.read_state().then
    assert "the micro-batch is 2 already, the least here is 2" in then
    assert "; tried before: micro-batch 4 -> 2, accumulation 4 -> 8" in then


@pytest.mark.slow
def test_a_job_fits_into_a_budget_only_after_it_falls_back_to_offload_cpu(lab: Lab) -> None:
    """Its peak is 11.2 MiB with micro-batch 2, and 4.6 MiB without shards, gradients and states."""
    found = run(
        lab,
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 4, "dim": 128, "heads": 2, "context": 32},
        steps=3,
        batch={"global": 4},
        recipe={"sharding": "fsdp", "precision": "fp32"},
        env={"TRAIN_MEMORY_BUDGET": "6MiB"},
    )
    assert [event["reason"] for event in events(found, "downgrade")][-1] == "offload none -> cpu"
    assert verdicts(found)[-1]["failure"] == "succeeded"
    peaks = [line["memory_peak"] for line in metrics(found)]
    assert max(peaks) < 5 * 2**20, "the first one, too: loading and the first step are in it"


@pytest.mark.thorough
def test_two_nodes_hand_over_each_in_its_own_memory_and_a_lost_one_costs_the_checkpoint(
    lab: Lab, two_nodes
) -> None:
    job(lab)
    faults = [[0, 1, "forward", 3], [1, 1, "node lost", 6]]
    fields = {
        "task": "faults:Faulty",
        "args": {"faults": faults},
        "steps": STEPS,
        "batch": {"global": BATCH},
        "train": {"checkpoint_every": 4, "lr": 1e-2},
        "recipe": {"sharding": "ddp", "precision": "fp32", "micro_batch_size": 16},
        "retries": {"same": 0},
    }
    found, supervisors = two_nodes("", **fields)
    assert [one.wait(240) for one in supervisors] == [EXIT_CODES["node-failed"], -9], lab.all_logs(found)
    first, second = verdicts(found)
    assert (first["failure"], first["rank"], first["node"]) == ("gpu-oom", 1, 1)
    assert second["failure"] == "node-failed"
    [given] = events(found, "handover")
    assert given["step"] == 2 and resumed(found) == [(2, "shared-memory")]
    wait_for(lambda: not processes_of(found.path), "end of every rank")
    wait_for(lambda: not handover_folder(found, 0).parent.exists(), "empty shared memory")

    _, supervisors = two_nodes("", **fields)
    assert [one.wait(240) for one in supervisors] == [0, 0], lab.all_logs(found)
    assert resumed(found) == [(2, "shared-memory"), (4, "checkpoint")]


def _seconds_from_step_to_end(found: RunDir, step: int) -> float:
    done = next(line["time"] for line in metrics(found) if line["step"] == step)
    ended = events(found, "ended")[0]["time"]
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(done)).total_seconds()


def _seconds_from_failure_to_end(attempt: AttemptDir) -> float:
    """From the first error file to the end of the last rank."""
    errors = [json.loads(file.read_text())["time"] for file in attempt.path.glob("errors/*.json")]
    exits = [json.loads(file.read_text())["time"] for file in attempt.path.glob("exits/*.json")]
    return max(exits) - min(errors)
