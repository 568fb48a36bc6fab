"""Every example can be planned on the cluster its first line names; each task trains on real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.planning.plan import make_plan
from launcher.render.shipped import clusters_dir
from launcher.spec.load import load_cluster, load_job
from launcher.train.task import load_task
from tests.train.runs import measure

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_a_task_that_exists_and_a_plan(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = re.match(r"# launcher (?:run|plan) examples/(\S+) -c (\S+)\n", path.read_text())
    if command is None:
        assert path.stem.startswith("demo")
    cluster = command[2] if command else "local"
    assert command is None or command[1] == path.name
    monkeypatch.chdir(path.parent)
    asked = load_job(path)
    plan = make_plan(asked, load_cluster(clusters_dir() / f"{cluster}.yaml"))
    if asked.task is None:
        assert asked.plan.params is not None
        return
    task = load_task(asked.task, asked.args, str(path.parent))
    assert plan.recipe.loss_chunks == 1 or task.uses_loss_chunks


@pytest.mark.slow
def test_a_task_trains_the_same_sharded_and_on_one_rank(tmp_path: Path) -> None:
    """BatchNorm sees each rank's samples only: its losses differ from those of one rank."""
    script = str(Path(__file__).parent / "sharded.py")
    alone, sharded = (measure(script, tmp_path / str(ranks), ranks) for ranks in (1, 2))
    assert len(alone) == 4
    for name, losses in sharded.items():
        assert losses == pytest.approx(alone[name], rel=1e-4 if "Language" in name else 0.2), name
