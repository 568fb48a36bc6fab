"""What ranks leave behind while they train: metrics, memory, snapshots, trackers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.rundir.files import read_json, read_json_lines
from launcher.rundir.layout import RunDir
from launcher.spec.events import AllocationRetries, MemoryAlert, MemoryInFragments, MemorySnapshot
from launcher.spec.verdict import EXIT_STOPPED
from launcher.train.cpu_memory_budget import MemoryBudget
from launcher.train.metrics.alerts import Alerts
from launcher.train.metrics.memory import Reading
from launcher.train.metrics.notes import Notes
from launcher.train.metrics.snapshot import Snapshots
from launcher.train.metrics.trackers import check_trackers
from launcher.train.phase import Where
from launcher.train.rank import SetupError
from tests.train.runs import job, one_rank, prepare, recipe, start

ALERT = 128 * 2**10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two attempts: the first ends after step 5, the second goes on after the checkpoint of step 3."""
    asked = job(
        args={"fault": "stop", "call": 5},
        train={
            "probe": "never",
            "checkpoint_every": 3,
            "trackers": ["tensorboard", "wandb"],
            "memory_alert": "128KiB",
        },
        env={"TOKEN": "nobody-elses-business"},
    )
    run = prepare(tmp_path_factory.mktemp("metrics") / "run-7", asked)
    env = {"TRAIN_MEMORY_BUDGET": "4MiB", "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    first = start(run, recipe("ddp", micro=4), env=env)
    assert first.codes == {0: EXIT_STOPPED, 1: EXIT_STOPPED}, first.output
    assert "memory alert: the peak of step" in first.output
    shutil.rmtree(run.checkpoints / "step-00000005")
    second = start(run, recipe("ddp", micro=2, accumulation=2), env=env)
    assert second.codes == {0: 0, 1: 0}, second.output
    return run


def test_metrics_tell_the_speed_and_the_memory_of_rank_0(run: RunDir) -> None:
    lines = read_json_lines(run.metrics)
    assert [(line["attempt"], line["step"]) for line in lines] == [
        *((0, step) for step in (1, 2, 3, 4, 5)),
        *((1, step) for step in (4, 5, 6)),
    ]
    for line in lines:
        assert line["samples_per_second"] == pytest.approx(8 / line["seconds"], rel=0.01)
        assert 0 < line["memory_allocated"] < line["memory_peak"] < 4 * 2**20 < line["memory_rss"]
        assert "mfu" not in line and "tokens_per_second" not in line


def test_every_rank_writes_its_memory_after_every_step(run: RunDir) -> None:
    for rank in (0, 1):
        lines = read_json_lines(run.attempt(1).memory(rank))
        assert [line["step"] for line in lines] == [4, 5, 6]
        assert all(line["allocated"] < line["peak"] and line["rss"] > 2**20 for line in lines)
        assert all(line["cpu"] > 0 and "utilization" not in line for line in lines)


def test_every_rank_measures_the_categories_of_its_second_steps_peak(run: RunDir) -> None:
    for rank in (0, 1):
        first, second, third = read_json_lines(run.attempt(1).memory(rank))
        assert "parts" not in first and "parts" not in third
        parts = second["parts"]
        assert list(parts) == ["parameters", "optimizer states", "gradients", "activations and other"]
        assert sum(parts.values()) == second["peak"]
        assert parts["gradients"] == parts["parameters"], "DDP's buckets, in fp32 too"
        assert second["allocated"] == sum(parts.values()) - parts["activations and other"], "between steps"


@pytest.mark.parametrize(
    ("of", "accumulation", "optimizer", "sync"),
    [
        ("fsdp", 1, "adamw-bf16", "each"),
        ("fsdp", 2, "adamw", "each"),
        ("fsdp", 2, "adamw", "last"),
        ("none", 1, "adamw", "each"),
        ("zero1", 1, "adamw-bf16", "each"),
    ],
)
@pytest.mark.slow
def test_measured_categories_are_those_of_the_recipe(
    tmp_path: Path, of: str, accumulation: int, optimizer: str, sync: str
) -> None:
    asked = job(
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 2, "dim": 64, "heads": 2, "context": 32},
        steps=4,
        train={"probe": "never", "checkpoint_every": None, "eval_every": 2},
    )
    run = prepare(tmp_path / "run", asked)
    micro = (8 if of == "none" else 4) // accumulation
    ended = start(
        run,
        recipe(of, micro=micro, accumulation=accumulation, optimizer=optimizer, grad_sync=sync),
        ranks=1 if of == "none" else 2,
        env={"TRAIN_MEMORY_BUDGET": "64MiB"},
    )
    assert set(ended.codes.values()) == {0}, ended.output
    _, evaluated, measured, _ = read_json_lines(run.attempt(0).memory(0))
    assert "parts" not in evaluated, "its peak may be the evaluation's"
    parts = measured["parts"]
    assert sum(parts.values()) == measured["peak"]
    whole = 537_600  # bytes of the parameters in fp32
    assert parts["parameters"] == (whole // 2 if of == "fsdp" else whole)
    states = {"adamw": 2.0, "adamw-bf16": 1.0}[optimizer] * parts["parameters"]
    shards = 2 if of == "zero1" else 1
    assert parts["optimizer states"] == pytest.approx(states / shards, rel=0.05, abs=100)
    known = of == "zero1" or (accumulation > 1 and sync == "each")
    assert ("gradients" in parts) == known, "the peak is in the backward pass"


def test_a_peak_above_the_threshold_is_told_once_by_each_rank(run: RunDir) -> None:
    alerts = [event for event in run.read_events() if isinstance(event, MemoryAlert)]
    assert len({(alert.rank, alert.bytes, alert.step) for alert in alerts}) == len(alerts)
    for rank in (0, 1):
        peaks = {line["step"]: line["peak"] for line in read_json_lines(run.attempt(0).memory(rank))}
        step = min((step for step, peak in peaks.items() if peak > ALERT), default=None)
        [told, *others] = [alert for alert in alerts if alert.rank == rank]
        assert (told.step, told.bytes, told.threshold) == (step, peaks[step], ALERT)
        assert len(others) <= 1, "at most one more, of the second attempt"


def test_tensorboard_shows_each_step_once_over_both_attempts(run: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run.tensorboard)).Reload()
    shown = {event.step: event.value for event in board.Scalars("loss")}
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    # A later attempt wins.
    assert shown == pytest.approx({line["step"]: line["loss"] for line in read_json_lines(run.metrics)})
    assert "memory_peak" in board.Tags()["scalars"] and "attempt" not in board.Tags()["scalars"]


def test_wandb_gets_both_attempts_as_one_run_over_launchers_own_step(run: RunDir) -> None:
    files = sorted((run.path / "wandb").glob("offline-run-*-run-7/*.wandb"))
    assert len(files) == 2
    for attempt, file in enumerate(files):
        history, about = [], None
        for record in wandb_records(file.read_bytes()):
            if record.HasField("history"):
                items = {item.key or item.nested_key[0]: item for item in record.history.item}
                history.append({name: json.loads(item.value_json) for name, item in items.items()})
            if record.HasField("run"):
                about = record.run
        ours = [line for line in read_json_lines(run.metrics) if line["attempt"] == attempt]
        assert [(h["step"], h["loss"]) for h in history] == [(o["step"], o["loss"]) for o in ours]
        assert about is not None
        assert (about.run_id, about.project) == ("run-7", "test")
        assert b"nobody-elses-business" not in file.read_bytes()


def wandb_records(data: bytes) -> Iterator[Any]:
    """W&B's file: a header of 7 bytes, then LevelDB's log format around protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, whole = 7, b""
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            yield Record.FromString(whole)
            whole = b""


def test_a_tracker_that_is_not_installed_is_refused_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_trackers(["tensorboard", "wandb"])
    # What a missing wandb looks like in a folder that holds its files.
    (tmp_path / "wandb_of_nobody").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in ("no_such_package", "wandb_of_nobody"):
        with pytest.raises(SetupError, match=rf"{package} not installed .*pip install '\.\[track\]' in it"):
            check_trackers([package])


def test_allocation_retries_are_told_once_with_what_helps() -> None:
    alerts = Alerts(0, 100, recipe(expandable_segments=False))
    assert alerts.of(Reading(rss=1, peak=100, num_alloc_retries=0), 1) == []
    [alert] = alerts.of(Reading(rss=1, peak=100, num_alloc_retries=3), 2)
    assert alert.event == AllocationRetries(rank=0, step=2, num_alloc_retries=3)
    assert "3 time(s) up to step 2" in alert.text and "recipe.expandable_segments: true" in alert.text
    assert alerts.of(Reading(rss=1, peak=100, num_alloc_retries=9), 3) == []


def test_a_snapshot_on_demand_shows_the_peak_of_the_next_step(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job())
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    where = Where("forward", 1)
    with MemoryBudget(2**20, where) as budget:
        rank = one_rank(run, number=3, world=4)
        snapshots = Snapshots(rank, budget, Notes(rank))

        def step(number: int, elements: int) -> None:
            where.step = number
            kept = torch.zeros(elements)
            (kept + 1).sum()
            del kept
            snapshots._looked = float("-inf")  # a second has passed
            snapshots.after_step(number)

        step(1, 1000)
        attempt.snapshot_request.write_text('{"time": "1", "rank": 2}')
        step(2, 1000)
        step(3, 1000)
        assert not attempt.memory(3).parent.exists(), "another rank was asked"
        attempt.snapshot_request.write_text('{"time": "2", "rank": null}')
        step(4, 1000)
        step(5, 3000)
        step(6, 1000)
    [path] = attempt.memory(3).parent.iterdir()
    assert path == attempt.snapshot(3, 5, "json") and path.name == "rank-003-step-5.json"
    [both, _sum] = read_json(path)["storages"]
    assert (both["bytes"], both["count"], both["shape"], both["step"]) == (2 * 3000 * 4, 2, [3000], 5)
    [event] = run.read_events()
    assert isinstance(event, MemorySnapshot) and (event.rank, event.path) == (3, str(path))


def test_an_allocator_that_fills_the_gpu_with_fragments_is_told_of_once():
    alerts = Alerts(0, None, recipe(), capacity=100)
    assert not alerts.of(Reading(rss=1, peak=75, reserved=94), 1), "the cache of a step is no waste"
    [alert] = alerts.of(Reading(rss=1, peak=70, reserved=94), 2)
    assert alert.event == MemoryInFragments(rank=0, step=2, reserved=94, bytes=70)
    assert not alerts.of(Reading(rss=1, peak=70, reserved=94), 3)
    assert not Alerts(0, None, recipe(), capacity=100).of(Reading(rss=1, peak=40, reserved=80), 1)
