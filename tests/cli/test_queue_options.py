"""Options of Slurm for one submission, without a change of the profile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.render.test_arrives import slurm_reads


def render(folder: Path, *arguments: str, cluster: str = "slurm-a100") -> tuple[int, str, str]:
    job = folder / "job.yaml"
    job.write_text("name: j\ncommand: [true]\nbatch: {global: 8}\n")
    out = folder / "out"
    command = ["render", str(job), "-c", cluster, "-o", str(out), *arguments]
    done = subprocess.run([sys.executable, "-m", "launcher", *command], capture_output=True, text=True)
    script = out / "scripts" / "job.sbatch"
    return done.returncode, script.read_text() if script.exists() else "", done.stderr


def test_options_of_the_queue_win_over_the_profile_and_arrive_as_they_are_written(tmp_path: Path) -> None:
    options = {
        "partition": "a,b",
        "account": "my project",
        "qos": "high",
        "reservation": "R#1",
        "dependency": "afterok:12:13,singleton",
        "nodelist": "n[1-3,7]",
    }
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    code, script, errors = render(tmp_path, *given, "--set", "cluster.slurm.gres=[nvme:1]")
    assert code == 0, errors
    read = slurm_reads(script)
    assert {f"--{name}={value}" for name, value in options.items()} | {"--gres=nvme:1"} <= set(read)
    assert sum(option.startswith("--partition=") for option in read) == 1


def test_the_state_of_a_run_that_was_rendered_for_slurm_names_the_script_for_sbatch(tmp_path: Path) -> None:
    assert render(tmp_path)[0] == 0
    command = [sys.executable, "-m", "launcher", "status", str(tmp_path / "out"), "--json"]
    reason = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["reason"]
    assert f"`sbatch {tmp_path}/out/scripts/job.sbatch` starts it" in reason


@pytest.mark.parametrize(
    ("arguments", "cluster", "message"),
    [
        (["--qos", "high"], "local", "--qos high: local has scheduler: local, which has no options of slurm"),
        (
            ["-s", "cluster.runpod.budget=1"],
            "slurm-a100",
            "--set cluster.runpod.budget=1: slurm-a100 has scheduler: slurm, which has no options of runpod",
        ),
        (["--qos", ""], "slurm-a100", "the value of --qos is empty"),
        (
            ["-s", "cluster.slurm.qoss=x"],
            "slurm-a100",
            "--set cluster.slurm.qoss=x: slurm.qoss: unknown field",
        ),
        (["-s", "cluster.slurm.gres=[gpu:2]"], "slurm-a100", "asks for GPUs by resources.gpus_per_node"),
        (["-s", "cluster.slurm.srun_options=[x]"], "slurm-a100", "'x' is not a long option of srun"),
        (["-s", "cluster.node.cpu_bind=[a]"], "slurm-a100", "'a' is not a list of CPUs"),
        (
            ["-s", "cluster.node.cpu_bind=['1']", "-s", "cluster.node.numa_binding=node"],
            *("slurm-a100", "numa_binding and cpu_bind exclude each other"),
        ),
    ],
)
def test_what_is_wrong_with_them_is_said_in_one_line(
    tmp_path: Path, arguments: list[str], cluster: str, message: str
) -> None:
    code, script, errors = render(tmp_path, *arguments, cluster=cluster)
    assert code != 0 and not script
    assert message in errors and len(errors.splitlines()) == 1, errors
