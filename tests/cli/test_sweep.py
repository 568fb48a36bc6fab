"""What `launcher submit --sweep` takes: fields that nothing reads and equal values would make equal runs."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from launcher.api.sweep import checked_sweep, prepared_sweep
from launcher.api.sweep_values import Field
from tests.lab import Lab

PROFILE = {"name": "c", "scheduler": "slurm", "max_nodes": 4, "slurm": {}}
TASK = {"task": "launcher.tasks.gpt:PydocGPT", "args": {"layers": 1}, "steps": 9}


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("sweep"))
    YAML().dump(PROFILE, lab.folder / "c.yaml")
    return lab


@pytest.mark.parametrize(
    ("job", "sweep", "code", "said"),
    [
        ({"command": "python x.py"}, "seed=0,1", 2, "--sweep train.seed: nothing reads it in"),
        ({"command": "python x.py"}, "recipe.loss_chunks=1,2", 2, "(--sweep env.LOSS_CHUNKS=...)"),
        ({"command": "python x.py"}, "model=1,2", 2, "launcher: --sweep model=1: model: must be a mapping"),
        ({"command": "python x.py"}, "steps=1,2", 0, "no {steps}; it sees the values as $LAUNCHER_STEPS"),
        ({"command": "python x.py {steps}"}, "steps=1,2", 0, ""),
        ({"command": "python x.py", "env": {"SEED": "0"}}, "env.SEED=0,1", 0, ""),
        (TASK, "seed=0,1", 0, ""),
        (TASK, "lr=1e-3,0.001", 2, "--sweep: train.lr=1e-3 and train.lr=0.001 are the same value; list"),
        ({"command": "python x.py", "env": {"SEED": "0"}}, "env.SEED=0,00", 0, ""),
    ],
)  # fmt: skip
def test_no_two_runs_of_a_sweep_are_equal(
    lab: Lab, job: dict[str, object], sweep: str, code: int, said: str
) -> None:
    file = str(lab.job(**job))
    done = lab.cli("submit", file, "-c", "c.yaml", "--dry-run", "--sweep", sweep)
    assert done.returncode == code, done.stderr
    out = " ".join((done.stdout + done.stderr).split())
    assert said in out if said else "--sweep" not in out


def test_a_sweep_shows_the_warnings_of_every_run_and_whose_they_are(lab: Lab) -> None:
    (lab.folder / "x.py").write_text("")
    first, second, third = "python x.py {micro_batch_size}", "python x.py {checkpoint_dir}", "python x.py"
    file = lab.job(command=first, resources={"gpus_per_node": 0, "ranks_per_node": 1})
    swept = [Field("command", (first, second, third))]
    scheduler, sweep = prepared_sweep(file, "local", [], swept, at_once=None)
    notes = [warning.partition(": it ")[0] for warning in checked_sweep(sweep, scheduler)]
    assert f"command={second}, command={third}: the command does not use {{micro_batch_size}}" in notes
    assert sum("does not use {checkpoint_dir}" in note for note in notes) == 1, "once, of two runs"
