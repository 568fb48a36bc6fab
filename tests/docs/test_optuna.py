"""The search with Optuna that docs/sweeps.md shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs import ROOT, files
from tests.lab import Lab

optuna = pytest.importorskip("optuna")


WITH_FAILURES = """
import os
import torch
from launcher.train import Task

class Flawed(Task):
    def model(self):
        try:
            os.close(os.open("failed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return torch.nn.Linear(4, 1)
        raise ValueError("the first run fails")
    def data(self, split):
        return torch.utils.data.TensorDataset(torch.ones(8, 4))
    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        return model(batch[0]).square().sum() * (float("nan") if self.calls == 3 else 1.0), len(batch[0])
"""


@pytest.mark.slow
def test_a_run_that_fails_and_a_loss_of_nan_do_not_end_the_search(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for name, content in files(ROOT / "docs" / "sweeps.md").items():
        shorter = content.replace("n_trials=12, n_jobs=2", "n_trials=2").replace("steps: 60", "steps: 5")
        shorter = shorter.replace("launcher.tasks.gpt:PydocGPT", "flawed:Flawed").replace("\nargs:", "\n# ")
        (tmp_path / name).write_text(shorter)
    (tmp_path / "flawed.py").write_text(WITH_FAILURES)
    done = subprocess.run(
        [sys.executable, "search.py"], cwd=tmp_path, env=lab.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    study = optuna.load_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="lr")
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"], done.stderr


def test_the_search_finds_the_best_of_its_runs(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for name, content in files(ROOT / "docs" / "sweeps.md").items():
        shorter = content.replace("n_trials=12", "n_trials=2").replace("steps: 60", "steps: 3")
        assert shorter != content
        (tmp_path / name).write_text(shorter)
    done = subprocess.run(
        [sys.executable, "search.py"], cwd=tmp_path, env=lab.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    study = optuna.load_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="lr")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2, done.stderr
    by_run = {row["run_id"]: row for row in lab.json("list")}
    for trial in study.trials:
        assert by_run[trial.user_attrs["run"]]["state"] == "succeeded"
    assert study.best_trial.user_attrs["run"] in done.stdout
