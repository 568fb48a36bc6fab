"""A secret in an exception of the task reaches no file of the run."""

from __future__ import annotations

import json
from pathlib import Path

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
