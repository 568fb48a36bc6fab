"""The preparation of a day on a GPU: it is rehearsed on the CPU, with the same driver and the same work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
DAY, REPORT = (ROOT / "benchmarks" / name for name in ("gpu_day.py", "gpu_day_report.py"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_day import MARK, REHEARSED, Machine, Worker  # noqa: E402
from gpu_day_case import FILE, STAGES, Case, read, write  # noqa: E402
from gpu_day_report import compared, constants, memory_errors, newest, predicted_again  # noqa: E402

from launcher.planning import speed  # noqa: E402
from launcher.planning.hardware import gpu_type_of  # noqa: E402

WAITS = Case(stage=6, name="launcher doctor", work="doctor")
"A case that needs no training."


def run(script: Path, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, arguments)]
    environ = {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1800)


def rehearsed(folder: Path, *arguments: object) -> list[dict[str, Any]]:
    """The results of a rehearsal that measured everything it was asked for."""
    done = run(DAY, "--rehearsal", "--results", folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return newest(folder)


def test_a_rehearsal_measures_what_was_predicted_and_says_that_it_had_no_gpu(tmp_path: Path) -> None:
    from gpu_day_cases import rehearsal

    write([next(case for case in rehearsal() if "8 ranks" in case.name)], tmp_path / "cases.jsonl")
    [row] = rehearsed(tmp_path, 1)
    assert row["device"] == "cpu (rehearsal)" and row["status"] == "measured"
    assert row["measured"]["allocated"] == pytest.approx(row["predicted"]["allocated"], rel=1e-3)
    assert [one.name for one in compared(row, None) if one.differs] == []
    assert "0 of 1 cases left" in run(DAY, 1, "--rehearsal", "--results", tmp_path).stdout


def test_a_rehearsal_never_writes_into_the_results() -> None:
    done = run(DAY, 6, "--rehearsal", "--results", ROOT / "benchmarks" / "results")
    assert done.returncode == 2
    assert "a rehearsal does not write to benchmarks/results" in done.stderr


@pytest.mark.slow
def test_a_case_that_fails_or_takes_too_long_does_not_stop_the_next_one(tmp_path: Path) -> None:
    wrong = Case(stage=6, name="wrong", work="curve", asked={})
    endless = {"loop": "plain", "model": ENDLESS}
    slow = Case(stage=6, name="slow", work="speed", asked=endless, seconds=4)
    short = {"loop": "plain", "model": {**ENDLESS, "steps": 2}}
    right = Case(stage=6, name="right", work="speed", asked=short)
    write([slow, wrong, right], tmp_path / "cases.jsonl")
    done = run(DAY, 6, "--rehearsal", "--results", tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 1
    rows = {row["case"]: row for row in newest(tmp_path)}
    assert [rows[name]["status"] for name in ("slow", "wrong")] == ["timed out", "failed"]
    assert "KeyError: 'recipe'" in rows["wrong"]["output"]
    assert rows["right"]["status"] == "measured"
    assert left_over(tmp_path) == []


ENDLESS: dict[str, Any] = {
    "task": "launcher.tasks.gpt:PydocGPT",
    "args": {"layers": 1, "dim": 32, "heads": 2, "context": 32},
    "tokens": 32,
    "batch": 2,
    "steps": 10**9,
    "skip": 1,
}


def left_over(folder: Path) -> list[int]:
    """Processes of cases whose folder was in `folder`, and files of these."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get(MARK, "").startswith(str(folder)):
                found.append(one.pid)
    return found + [len(list(one.iterdir())) for one in folder.glob("gpu-day-case-*")]


def test_what_does_not_fit_into_the_time_is_left_for_the_next_command(tmp_path: Path) -> None:
    write([WAITS], tmp_path / "cases.jsonl")
    done = run(DAY, 6, "--rehearsal", "--results", tmp_path, "--seconds", 1)
    assert done.returncode == 0 and "1 cases are left for the next command" in done.stdout
    assert newest(tmp_path) == []


def test_a_process_that_shows_no_environment_yet_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "process_iter", list)
    worker = Worker(Machine(REHEARSED, 0, ""))
    worker.end()
    assert worker.process.returncode == -signal.SIGKILL and not worker.folder.exists()


def test_the_cases_of_the_day_are_ready_with_their_predictions() -> None:
    cases = list(read(FILE))
    assert {case.stage for case in cases} == set(STAGES)
    assert len({(case.stage, case.name) for case in cases}) == len(cases)
    steps = [case for case in cases if case.work == "step"]
    assert len(steps) >= 32
    assert all(case.predicted["allocated"] > 0 and case.predicted["reserved"] > 0 for case in steps)
    assert all(case.seconds < STAGES[case.stage].seconds for case in cases)
    caps = {case.asked["cap"] // 10**9 for case in steps if "cap" in case.asked}
    assert {25, 50, 84} <= caps, "24 GB, 47.4 GiB and 80 GB"


H200 = gpu_type_of("H200")


def speed_row(name: str, recipe: dict[str, Any], parts: dict[str, float], took: float) -> dict[str, Any]:
    complete = {"precision": "bf16-mixed", "compile": False, "offload": "none", "activations": "keep"}
    model = {"recipe": {**complete, "optimizer": "adamw", **recipe}}
    rest = {"exposed": 0.0, "offload": 0.0, "optimizer": 0.01}
    return {
        "case": name,
        "work": "speed",
        "status": "measured",
        "asked": {"loop": "launcher", "model": model},
        "predicted": {
            "on": {"H200": {"step_seconds": sum(parts.values()) + 0.01, "parts": {**rest, **parts}}}
        },
        "measured": {"step_seconds": took},
    }


def test_constants_are_found_again_from_steps_that_were_made_with_them() -> None:
    assert H200 is not None
    slower, thicker = 1.25, 1.6  # matrix products and memory traffic take so many times as long
    rows = [
        speed_row(
            f"{compute} {memory} {recipe}",
            recipe,
            {"compute": compute, "memory": memory},
            compute * slower * (0.9 if recipe.get("precision") == "float8" else 1.0)
            + memory * thicker * (0.5 if recipe.get("compile") else 1.0)
            + 0.01,
        )
        for compute, memory in ((0.4, 0.1), (0.2, 0.3))
        for recipe in ({}, {"compile": True}, {"precision": "float8"})
    ]
    found = {one["constant"]: float(one["measured"]) for one in constants(rows, H200)}
    assert found == {
        "REACHED['H200']": pytest.approx(speed.REACHED["H200"] / slower, rel=5e-3),
        "FLOAT8_GAIN": pytest.approx(speed.FLOAT8_GAIN / 0.9, rel=5e-3),
        "MEMORY_REACHED": pytest.approx(speed.MEMORY_REACHED / thicker, rel=5e-3),
        "COMPILED": pytest.approx(speed.COMPILED * 0.5, rel=5e-3),
    }


def step_row(reserved: int, *, fits: bool = True) -> dict[str, Any]:
    return {
        "case": "one",
        "device": "NVIDIA H200",
        "work": "step",
        "status": "measured",
        "asked": {"ranks": 1},
        "predicted": {"reserved": 110, "band": 0.06, "fits": True, "phases": {}},
        "measured": {"reserved": reserved, "fits": fits, "phases": {}},
    }


def test_a_value_outside_the_band_is_told_and_one_inside_is_not() -> None:
    far = {name: one.differs for row in (step_row(90),) for one in compared(row, H200) for name in [one.name]}
    assert far == {"reserved": True, "fits": False}
    assert not any(one.differs for one in compared(step_row(108), H200))
    assert {one.name for one in compared(step_row(108, fits=False), H200) if one.differs} == {"fits"}
    assert memory_errors([step_row(100)]) == {"one, NVIDIA H200": pytest.approx(0.1)}
    assert memory_errors([step_row(100, fits=False)]) == {}


def test_a_corrected_estimate_is_judged_by_the_same_measurements() -> None:
    now = Case(stage=1, name="one", work="step", asked={"ranks": 1}, predicted={"reserved": 100})
    [row] = predicted_again([step_row(100), {**step_row(100), "asked": {"ranks": 2}}], [now])
    assert row["predicted"] == {"reserved": 100} and row["measured"]["reserved"] == 100


def test_results_of_another_folder_are_taken_over_once(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    row = {**step_row(108), "stage": 1, "torch": "2", "python": "3", "code": "0", "seconds": 1.0}
    (there / "gpu-day-1.jsonl").write_text(json.dumps(row) + "\n")
    for number in (1, 0):
        done = run(REPORT, "--collect", there, "--results", here)
        assert done.returncode == 0, done.stderr
        assert f"{number} new results" in done.stdout
    assert "## NVIDIA H200" in done.stdout and "Differs by more than the band: 0 values." in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_whole_day_is_rehearsed(tmp_path: Path) -> None:
    began = time.monotonic()
    rows = rehearsed(tmp_path, "--seconds", 1700)
    assert {row["stage"] for row in rows} == set(STAGES)
    assert {row["status"] for row in rows} <= {"measured", "absent"}
    assert all(row["device"] == "cpu (rehearsal)" for row in rows)
    wrong = [(row["case"], str(one)) for row in rows for one in compared(row, None) if one.differs]
    assert wrong == []
    assert sum(row["seconds"] for row in rows) < time.monotonic() - began
    done = run(REPORT, "--results", tmp_path)
    assert "## cpu (rehearsal)" in done.stdout
