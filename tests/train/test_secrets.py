"""A secret in an exception of the task reaches no file of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.train.error_report import MAX_TEXT
from tests.train.runs import HERE, error, job, prepare, recipe, start

TASK = """
import json, os
from ragged import Ragged

class Leaky(Ragged):
    def loss(self, model, batch):
        token = os.environ["TOKEN"]
        try:
            raise RuntimeError(f"401 for {token}: " + json.dumps({"Authorization": token}))
        except RuntimeError:
            raise KeyError(token)
"""


@pytest.mark.slow
def test_the_error_file_of_a_rank_holds_no_secret_in_any_form(tmp_path: Path) -> None:
    token = 'first"half\\second\nthird-line'
    (tmp_path / "leaky.py").write_text(TASK)
    run = prepare(tmp_path / "run", job(task="leaky:Leaky"))
    about = {**json.loads(run.run.read_text()), "workdir": str(tmp_path)}
    run.run.write_text(json.dumps(about))
    env = {"LAUNCHER_SECRETS": "OTHER,TOKEN", "TOKEN": token, "PYTHONPATH": str(HERE)}
    start(run, recipe("none", accumulation=2), ranks=1, env=env)
    found = error(run.attempt(0), 0)
    assert found["exception"] == "KeyError: '***'"
    assert found["traceback"].count("***") == 3
    for path in run.path.rglob("*.json"):
        assert "second" not in path.read_text() and "third-line" not in path.read_text(), path


CUT = f"""
import os
from ragged import Ragged

token = os.environ.pop("TOKEN")

class Leaky(Ragged):
    def loss(self, model, batch):
        raise RuntimeError("x" * ({MAX_TEXT} - 20) + token)
"""


@pytest.mark.slow
def test_a_secret_is_masked_before_a_long_message_is_cut(tmp_path: Path) -> None:
    """Also one that the task has taken out of its environment."""
    (tmp_path / "leaky.py").write_text(CUT)
    run = prepare(tmp_path / "run", job(task="leaky:Leaky"))
    about = {**json.loads(run.run.read_text()), "workdir": str(tmp_path)}
    run.run.write_text(json.dumps(about))
    env = {"LAUNCHER_SECRETS": "TOKEN", "TOKEN": "hunter2-hunter2-hunter2", "PYTHONPATH": str(HERE)}
    start(run, recipe("none", accumulation=2), ranks=1, env=env)
    found = error(run.attempt(0), 0)
    assert found["exception"].endswith("x***") and "hunter2" not in json.dumps(found)
