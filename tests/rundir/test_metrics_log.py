"""`launcher.log`: the steps of a program that is not launcher's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import launcher
from launcher.callbacks.names import numbers_of
from launcher.rundir import metrics_log
from launcher.rundir.layout import RunDir
from launcher.schedulers.rundir import status_of
from tests.lab import Lab, merged_steps


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("LAUNCHER_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("LAUNCHER_ATTEMPT", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(metrics_log, "_lines", None)
    monkeypatch.setattr(metrics_log, "_reported", set())
    return RunDir(tmp_path)


def test_a_line_is_what_the_readers_of_metrics_expect(run: RunDir) -> None:
    launcher.log(1, steps=10, loss=2.5, tokens=100)
    launcher.log(2, loss=float("nan"), tokens=100)
    first, second = run.read_metrics()
    assert (first["attempt"], first["step"], first["loss"], first["seconds"]) == (2, 1, 2.5, 0.0)
    assert second["loss"] is None and second["seconds"] > 0
    assert second["tokens_per_second"] == pytest.approx(100 / second["seconds"], rel=0.01)
    status = status_of(run, "", run.read_state())
    assert (status.step, status.steps) == (2, 10)


def test_training_and_evaluation_of_a_step_become_one_step(run: RunDir) -> None:
    launcher.log(1, loss=3.0)
    launcher.log(2, loss=2.0, tokens=10)
    launcher.log(2, eval_loss=2.5)
    lines = merged_steps(run.read_metrics())
    assert [line["step"] for line in lines] == [1, 2]
    assert (lines[1]["loss"], lines[1]["eval_loss"], lines[1]["tokens"]) == (2.0, 2.5, 10)


def test_one_rank_records_and_it_is_the_first_unless_another_is_named(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    launcher.log(1, loss=1.0)
    assert not run.metrics.exists()
    launcher.log(1, rank=3, loss=1.0)
    launcher.log(2, rank=None, loss=1.0)
    assert [line["step"] for line in run.read_metrics()] == [1, 2]


def test_what_cannot_be_recorded_is_told_once_and_ends_no_training(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        launcher.log(step, loss=0.5, eval_loss=None, attempt=1, note="low", huge=10**400)
        launcher.log(step, pair=torch.tensor([1.0, 2.0]), grad_norm=torch.tensor(2.0))
    launcher.log("first", loss=1.0)
    launcher.log(-1, loss=1.0)
    told = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("launcher.log: ").partition(":")[0] for line in told] == [
        "attempt is not recorded",
        "note is not recorded",
        "huge is not recorded",
        "pair is not recorded",
        "a step is not recorded",
        "a step is not recorded",
    ]
    lines = run.read_metrics()
    assert [(one["step"], one.get("loss"), one.get("grad_norm")) for one in lines] == [
        (1, 0.5, None),
        (1, None, 2.0),
        (2, 0.5, None),
        (2, None, 2.0),
    ]
    assert lines[0]["eval_loss"] is None and lines[0]["attempt"] == 2
    assert not {"note", "huge", "pair"} & set().union(*lines)


def test_a_secret_is_masked_in_the_name_of_a_metric_too(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_SECRETS", "KEY")
    monkeypatch.setenv("KEY", "hunter2-hunter2")
    launcher.log(1, **{"m_hunter2-hunter2": 1.0}, loss=2.0)
    line = run.read_metrics()[0]
    assert (line["m_***"], line["loss"]) == (1.0, 2.0) and "hunter2" not in run.metrics.read_text()


def test_a_full_disk_loses_the_line_and_not_the_training(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHER_RUN_DIR", "/nowhere")
    launcher.log(1, loss=1.0)
    launcher.log(2, loss=1.0)
    assert capsys.readouterr().err == "launcher.log: lines are lost: No such file or directory (step 1)\n"


def test_outside_a_run_nothing_happens_and_nothing_large_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom launcher import log\nlog(step=1, loss=0.5)\n"
        "assert not {'torch', 'pydantic', 'rich', 'jinja2'} & set(sys.modules), sorted(sys.modules)"
    )
    environ = {"PATH": "/usr/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, check=True)
    assert list(tmp_path.iterdir()) == []


def test_the_names_of_frameworks_become_launchers() -> None:
    theirs = {"train_loss": 1, "val/acc": 2, "learning_rate": 3, "epoch": 4, "eval_runtime": 5, "note": "x"}
    assert numbers_of(theirs) == {"loss": 1, "eval_acc": 2, "lr": 3}


SCRIPT = """
from launcher import log
for step in range(1, 6):
    log(step, steps=5, loss=1 / step, tokens=64)
"""


def test_status_report_and_compare_work_for_a_command(lab: Lab) -> None:
    lab.script(SCRIPT)
    done = lab.cli("run", str(lab.job(command="python train.py", recipe=None)), "-c", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4, 5], "of two ranks, rank 0 records"
    status = lab.status(run)
    assert (status["step"], status["steps"]) == (5, 5)
    assert lab.cli("report", run.id, "-o", "page.html").returncode == 0
    page = (lab.folder / "page.html").read_text()
    assert "<dt>tokens/s</dt>" in page and "<dd>5 of 5</dd>" in page
    told = lab.json("compare", run.id)
    assert told["runs"][0]["results"]["tokens"] == 320
