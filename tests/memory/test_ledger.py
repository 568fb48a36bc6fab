"""The ledger: kept under concurrent writers, bounded in time, and what it makes of its entries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.memory.ledger import (
    Entry,
    Family,
    correction,
    default_folder,
    entries,
    is_useful,
    record,
    too_large,
)
from launcher.memory.measured import entry_of_run
from launcher.rundir.files import append_json, replace_json
from launcher.rundir.layout import RunDir
from launcher.spec.recipe import Recipe
from tests.bounded_work import in_bounded_work
from tests.train import runs

LLAMA = Family(task="launcher.tasks.llama:LanguageModel", gpu="NVIDIA A100-SXM4-80GB", torch="2.13")
GIB = 2**30


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "precision": "bf16-mixed",
            "optimizer": "adamw",
            "sharding": "fsdp",
            "micro_batch_size": 4,
            "grad_accum": 2,
            **fields,
        }
    )


def entry(measured: float = 11, predicted: float | None = 10, family: Family = LLAMA, **fields: Any) -> Entry:
    """Sizes in GiB; other fields are the recipe's."""
    return Entry(
        family=family,
        args={"shape": "7b", "context": 4096},
        recipe=recipe(**fields),
        ranks=8,
        ranks_per_node=8,
        measured={"first step": GIB, "steady state": int(measured * GIB)},
        predicted={} if predicted is None else {"steady state": int(predicted * GIB)},
    )


def test_what_was_recorded_comes_back_the_newest_last(tmp_path):
    first, second = entry(11), entry(12)
    written = [record(tmp_path / "ledger", one) for one in (first, second)]
    known = entries(tmp_path / "ledger", LLAMA)
    assert [one.measured for one in known] == [first.measured, second.measured]
    assert all(one.time for one in known)
    assert json.loads(written[0].read_text())["args"] == {"shape": "7b", "context": 4096}
    assert sorted(tmp_path.rglob("*.json")) == sorted(written), "nothing else is left"


def test_a_family_is_a_task_a_gpu_and_a_torch(tmp_path):
    record(tmp_path, entry())
    for other in ({"task": "x:Y"}, {"gpu": "cpu"}, {"torch": "2.14"}):
        assert entries(tmp_path, LLAMA.model_copy(update=other)) == ()
    assert len(entries(tmp_path, LLAMA)) == 1


def test_a_torn_or_foreign_file_hides_no_other(tmp_path):
    assert entries(tmp_path / "not there", LLAMA) == ()
    path = record(tmp_path, entry())
    text = path.read_text()
    for number, content in enumerate(["", text[: len(text) // 2], "[]", '{"family": 3}', "\x00\xff"]):
        (tmp_path / f"{LLAMA.prefix}{number}.json").write_text(content, encoding="latin-1")
    (tmp_path / f"{LLAMA.prefix}folder.json").mkdir()
    newer = json.loads(text)
    newer["recipe"]["a_field_of_tomorrow"] = 1
    replace_json(tmp_path / f"{LLAMA.prefix}newer.json", newer)
    other = {**json.loads(text), "family": {**LLAMA.model_dump(), "gpu": "cpu"}}
    replace_json(tmp_path / f"{LLAMA.prefix}other.json", other)
    assert len(entries(tmp_path, LLAMA)) == 1


@pytest.mark.slow
def test_ten_thousand_files_are_read_with_little_work(tmp_path):
    text = record(tmp_path, entry()).read_text()
    prefixes = [LLAMA.prefix] * 3_000 + [LLAMA.model_copy(update={"gpu": "cpu"}).prefix] * 7_000
    for number, prefix in enumerate(prefixes):
        (tmp_path / f"{prefix}{number:06d}.json").write_text(text)
    with in_bounded_work(500_000):
        known = entries(tmp_path, LLAMA)
    assert len(known) == 200


WRITER = """
import sys, pathlib
from launcher.memory.ledger import Entry, record
entry = Entry.model_validate_json(sys.argv[2])
for number in range(40):
    record(pathlib.Path(sys.argv[1]), entry.model_copy(update={"run": f"{sys.argv[3]}-{number}"}))
"""


def test_several_processes_write_at_once_and_a_reader_sees_whole_entries_only(tmp_path):
    folder, one = tmp_path / "ledger", entry()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder), one.model_dump_json(), name])
        for name in "abc"
    ]
    while any(writer.poll() is None for writer in writers):
        files = list(folder.glob("*.json"))
        assert len(entries(folder, LLAMA)) >= len(files), "each file is whole as soon as it is there"
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    seen = {found.run for found in entries(folder, LLAMA)}
    assert seen == {f"{name}-{number}" for name in "abc" for number in range(40)}
    assert not [path for path in folder.iterdir() if path.suffix != ".json"]


def test_the_factor_is_the_median_and_the_band_the_farthest_from_it():
    made = correction([entry(10.4), entry(11), entry(10.6)], recipe())
    assert made is not None
    assert made.factor == pytest.approx(1.06) and made.entries == 3 and made.differs == ()
    assert made.band == pytest.approx(11 / 10.6 - 1)


def test_one_entry_corrects_and_says_nothing_of_its_band():
    made = correction([entry(9)], recipe())
    assert made is not None and (made.factor, made.entries, made.band) == (pytest.approx(0.9), 1, None)


def test_without_a_prediction_beside_a_measurement_there_is_no_correction():
    assert correction([], recipe()) is None
    assert correction([entry(predicted=None)], recipe()) is None


def test_the_nearest_recipe_counts_whatever_the_micro_batch():
    known = [
        entry(20, optimizer="adamw-8bit"),
        entry(11, micro_batch_size=8, grad_accum=1),
        entry(30, precision="fp32"),
    ]
    made = correction(known, recipe())
    assert made is not None and (made.factor, made.entries, made.differs) == (pytest.approx(1.1), 1, ())
    far = correction([known[0], known[2]], recipe())
    assert far is not None and (far.entries, far.differs) == (2, ("optimizer", "precision"))


def test_of_many_like_entries_those_of_the_nearest_micro_batch_and_the_newest_are_taken():
    known = [entry(50)] * 20 + [entry(12)] * 9 + [entry(70, micro_batch_size=64)] * 20
    made = correction(known, recipe())
    assert made is not None and (made.factor, made.entries, made.band) == (pytest.approx(1.2), 9, 0)


# -- a run's own files


def finished(folder: Path, **plan: Any) -> RunDir:
    """A run of two ranks whose second attempt resumed after step 2 and whose third ran out of memory."""
    run = RunDir(folder)
    folder.mkdir()
    job = {"name": "x", "task": LLAMA.task, "args": {"shape": "7b"}, "batch": {"global": 64}, "steps": 9}
    gpu = {"type": LLAMA.gpu, "count": 2, "memory": 80 * GIB}
    about = {
        "id": run.id,
        "job": job,
        "cluster": {"name": "lab", "scheduler": "local", "node": {"gpu": gpu}},
        "nodes": 1,
        "gpus_per_node": 2,
        "ranks_per_node": 2,
        "versions": {"torch": "2.13.0+cu130"},
    }
    replace_json(run.run, about)
    replace_json(run.plan, {"recipe": recipe().model_dump(), **plan})
    failures = ("preempted", "succeeded", "gpu-oom")
    peaks = {
        0: [(1, 5, 6), (2, 9, 12)],
        1: [(3, 8, 9), (4, 10, 14), (5, 7, 14)],
        2: [(6, 40, 60), (7, 40, 60)],
    }
    for number, failure in enumerate(failures):
        attempt = run.attempt(number)
        attempt.memory(0).parent.mkdir(parents=True)
        replace_json(attempt.recipe, recipe(micro_batch_size=4 if number < 2 else 2).model_dump())
        replace_json(attempt.verdict, {"failure": failure, "reason": ""})
        for rank in (0, 1):
            lines = [
                {"step": step, "rss": 1, "peak": peak + rank, "reserved": held, "num_alloc_retries": rank}
                for step, peak, held in peaks[number]
            ]
            append_json(attempt.memory(rank), *lines)
        with open(attempt.memory(1), "a") as file:
            file.write('{"step": 99, "peak": 99')
    return run


def test_an_entry_is_made_of_the_newest_attempt_that_memory_did_not_end(tmp_path):
    estimate = {
        "peaks": [
            {"when": "first step", "allocated": 7},
            {"when": "steady state", "allocated": 9},
            {"when": "checkpoint", "allocated": 10},
        ]
    }
    made = entry_of_run(finished(tmp_path / "run-1", estimate=estimate), parameters=1000)
    assert made is not None
    assert made.family == LLAMA and made.args == {"shape": "7b"} and made.parameters == 1000
    assert (made.ranks, made.ranks_per_node, made.run) == (2, 2, "run-1")
    assert made.measured == {"resume": 9, "steady state": 11}, "of the rank with more"
    assert made.predicted == {"first step": 7, "steady state": 10}
    assert made.ratio == pytest.approx(1.1), "the first step was not seen"
    assert (made.reserved, made.retries) == (14, 1)


def test_a_prediction_for_another_recipe_is_left_out(tmp_path):
    plan = {"recipe": recipe(micro_batch_size=8).model_dump(), "estimate": {"peaks": []}}
    made = entry_of_run(finished(tmp_path / "run-1", **plan))
    assert made is not None and (made.predicted, made.ratio) == ({}, None)


def test_what_ran_out_is_in_it_unless_it_was_a_fire_drill(tmp_path):
    run = finished(tmp_path / "run-1")
    run.event("attempt", attempt=2, recipe=recipe().model_dump())
    run.event("ended", attempt=2, failure="gpu-oom", reason="")
    run.event("downgrade", changes={"micro_batch_size": [4, 2]})
    made = entry_of_run(run)
    assert made is not None and made.ran_out == (recipe(),)
    about = run.read_about().as_json()
    about["job"]["env"] = {"TRAIN_MEMORY_FAIL": "step=2,phase=forward"}
    replace_json(run.run, about)
    made = entry_of_run(run)
    assert made is not None and made.ran_out == ()


def test_a_run_that_tells_nothing_gives_no_entry(tmp_path):
    assert entry_of_run(RunDir(tmp_path)) is None
    run = finished(tmp_path / "run-1")
    about = run.read_about().as_json()
    for broken in (
        {},
        {"job": 3},
        {**about, "versions": None},
        {**about, "nodes": "one"},
        {**about, "cluster": {}},
    ):
        replace_json(run.run, broken)
        assert entry_of_run(run) is None
    replace_json(run.run, {**about, "job": {"name": "x", "command": ["true"], "batch": {"global": 1}}})
    assert entry_of_run(run) is None


@pytest.mark.slow
def test_real_ranks_leave_what_an_entry_needs(tmp_path):
    run = runs.prepare(
        tmp_path / "runs" / "run-1",
        runs.job(steps=2),
        cluster={"name": "local", "scheduler": "local"},
        nodes=1,
        gpus_per_node=0,
        ranks_per_node=1,
        versions={"torch": "2.13.0+cpu"},
    )
    ended = runs.start(run, runs.recipe("none", micro=8), ranks=1, env={"TRAIN_MEMORY_BUDGET": "4MiB"})
    assert ended.codes == {0: 0}, ended.output
    made = entry_of_run(run)
    assert made is not None and made.family == Family(task="ragged:Ragged", gpu="cpu", torch="2.13")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert made.measured.keys() == {"first step", "steady state"}
    assert list(made.measured.values()) == [line["memory_peak"] for line in lines]
    assert made.reserved is None
    folder = default_folder(run.path.parent)
    assert folder == tmp_path / "ledger"
    record(folder, made)
    assert entries(folder, made.family)[0].measured == made.measured


def test_what_ran_out_of_memory_is_known_to_be_too_large_on_the_same_devices_only():
    fits, failed = recipe(micro_batch_size=2, grad_accum=4), recipe()
    known = [
        entry(micro_batch_size=2, grad_accum=4).model_copy(
            update={"ran_out": (failed,), "capacity": 80 * GIB}
        )
    ]
    larger = recipe(micro_batch_size=8, grad_accum=1)
    assert too_large(known, failed, 8, 80 * GIB) == too_large(known, larger, 8, 80 * GIB) == (known[0],)
    assert too_large(known, fits, 8, 80 * GIB) == ()
    assert too_large(known, recipe(activations="checkpoint"), 8, 80 * GIB) == ()
    for ranks, capacity in ((16, 80 * GIB), (8, 94 * GIB), (8, None)):
        assert too_large(known, failed, ranks, capacity) == ()


def test_each_run_counts_once_and_one_that_held_the_recipe_contradicts_all_before():
    def ran(run: str, *out: Recipe, size: int = 2) -> Entry:
        made = entry(predicted=None, micro_batch_size=size, grad_accum=8 // size)
        return made.model_copy(update={"ran_out": out, "capacity": GIB, "run": run})

    def runs_against(known: list[Entry], size: int) -> list[str]:
        asked = recipe(micro_batch_size=size, grad_accum=8 // size)
        return [one.run for one in too_large(known, asked, 8, GIB)]

    failed = [ran("a", recipe()), ran("b", recipe()), ran("b", recipe())]
    assert runs_against(failed, 4) == ["b", "a"]
    held = ran("c", size=4)
    assert is_useful(held, failed) and not is_useful(held, [*failed, held])
    assert not is_useful(ran("d"), failed), "it ran with what was known to fit"
    assert not is_useful(held.model_copy(update={"args": {}}), failed), "of another model"
    assert runs_against([*failed, held], 4) == [] and runs_against([*failed, held], 8) == []
    assert runs_against([*failed, held, ran("e", recipe())], 4) == ["e"]
