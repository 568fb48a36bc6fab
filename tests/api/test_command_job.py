"""`launcher run -- COMMAND`: a job without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.api.command_job import job_of_command
from launcher.spec.errors import UsageError
from tests.lab import Lab


@pytest.fixture
def nodes(tmp_path: Path) -> str:
    file = tmp_path / "two.yaml"
    file.write_text(
        "name: two\nscheduler: slurm\nmax_nodes: 2\nnode: {gpu: {type: A100, count: 4, memory: 40GiB}}\n"
    )
    return str(file)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 1", "train"),
        ("python -u src/train.py", "train"),
        ("python3.11 -m package.main", "main"),
        ("python -X dev train.py", "train"),
        ("python -c pass", "python"),
        ("./run.sh", "run"),
        ("my-program", "my-program"),
    ],
)
def test_its_name(command: str, name: str) -> None:
    assert job_of_command(command.split(), "local", ["resources.gpus_per_node=0"])["name"] == name


@pytest.mark.parametrize(
    ("sets", "samples"),
    [
        ([], 4),
        (["resources.nodes=2"], 8),
        (["resources.gpus_per_node=2"], 2),
        (["resources.ranks_per_node=3"], 3),
        (["resources.gpus_per_node=0"], 1),
        (["batch.global=64"], 1),  # what --set says comes later
    ],
)
def test_a_command_that_does_not_ask_for_the_batch_needs_none(
    nodes: str, sets: list[str], samples: int
) -> None:
    assert job_of_command(["python", "train.py"], nodes, sets)["batch"] == {"global": samples}


@pytest.mark.parametrize("placeholder", ["{micro_batch_size}", "{grad_accum}", "--bs={global_batch}"])
def test_one_that_asks_for_it_says_how_large_it_is(placeholder: str) -> None:
    with pytest.raises(UsageError, match=r"--set batch\.global=64"):
        job_of_command(["python", "train.py", placeholder], "local")


@pytest.mark.e2e
def test_it_runs(lab: Lab) -> None:
    lab.script("import sys\nprint('got', sys.argv[1:])\n")
    fields = [*("--set", "batch.global=8"), *("--set", "resources.gpus_per_node=0")]
    done = lab.cli("run", *fields, "--", "python", "train.py", "--bs", "{micro_batch_size}", "--set", "x")
    assert done.returncode == 0, done.stderr
    assert "got ['--bs', '8', '--set', 'x']" in done.stdout
    wrong: list[tuple[Any, str]] = [
        (["run"], "give a job file, or a command after `--`"),
        (["run", "job.yaml", "--", "python"], "give a job file, or a command after `--`"),
        (["submit", "--"], "there is no command after `--`"),
    ]
    for arguments, said in wrong:
        done = lab.cli(*arguments)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
