"""`launcher.slurm.Executor` on a real cluster: functions go there, and come back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import wait_for
from tests.slurm.lab import SlurmLab

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"

CALLS = """
import json, os, submitit, sys
from pathlib import Path
from submitit.core.utils import FailedJobError
from launcher.slurm import Executor

def on_rank():
    here = submitit.JobEnvironment()
    print("said by", here.global_rank)
    return here.global_rank, here.num_tasks, os.environ["WHO"]

def fails(word):
    raise ValueError(word)

executor = Executor("calls", cluster="lab.yaml", job={"env": {"WHO": "me"}})
executor.update_parameters(timeout_min=5, tasks_per_node=2, nodes=2, name="pair")
pair = executor.submit(on_rank)
executor.update_parameters(tasks_per_node=1, nodes=1, slurm_additional_parameters={"nice": "0"})
with executor.batch():
    jobs = [executor.submit(divmod, number, 3) for number in (7, 8)]
    jobs.append(executor.submit(fails, "no luck"))
powers = executor.map_array(pow, [2, 3], [3, 2])
told = {
    "pair": pair.results(), "said": [pair.task(rank).stdout() for rank in range(4)], "state": pair.state,
    "batch": [job.result() for job in jobs[:2]], "ids": [job.job_id for job in jobs],
    "error": str(jobs[2].exception()), "kind": type(jobs[2].exception()).__name__,
    "map": sorted(job.result() for job in submitit.helpers.as_completed(powers)),
}
Path("told.json").write_text(json.dumps(told))
"""

PREEMPTED = """
import sys, time
from pathlib import Path
from launcher.slurm import Executor
from submitit.helpers import DelayedSubmission

class Counts:
    def __init__(self, done=0):
        self.begun = self.done = done

    def __call__(self, last):
        print("from", self.begun, flush=True)
        while self.done < last:
            self.done += 1
            while self.done == 3 and self.begun == 0:
                Path("waits").touch()
                time.sleep(0.1)  # until it is asked to leave
        return self.begun, self.done

    def checkpoint(self, last):
        return DelayedSubmission(Counts(self.done), last)

def plain():
    if Path("plain").exists():
        return "anew"
    Path("plain").touch()
    time.sleep(300)

executor = Executor("calls", cluster="lab.yaml")
executor.update_parameters(timeout_min=5, signal_delay_s=30)
jobs = [executor.submit(Counts(), 5), executor.submit(plain)]
print(*(job.job_id for job in jobs), flush=True)
print(jobs[0].result(), repr(jobs[0].stdout()), jobs[1].result())
print(*(job.job_id for job in jobs), jobs[0].state)
"""


CANCELLED = """
import time
from pathlib import Path
from launcher.slurm import Executor

def sleeps():
    with open("begun", "a") as file:
        file.write("begun\\n")
    time.sleep(300)

executor = Executor("calls", cluster="lab.yaml")
executor.update_parameters(timeout_min=20)
jobs = [executor.submit(sleeps) for _ in range(3)]
while not Path("begun").exists() or Path("begun").read_text().count("begun") < 3:
    time.sleep(0.1)
for job in jobs:
    job.cancel()
print([type(job.exception()).__name__ for job in jobs])
while any(job.state in ("RUNNING", "COMPLETING") for job in jobs):
    time.sleep(0.5)
print([job.state.partition(" ")[0] for job in jobs])
print(Path("begun").read_text().count("begun"))
"""


def program(lab: SlurmLab, text: str) -> Path:
    file = lab.folder / "program.py"
    file.write_text(text)
    return file


def test_functions_go_to_the_cluster_and_their_results_come_back(slurm_lab: SlurmLab) -> None:
    slurm_lab.slurm(sys.executable, str(program(slurm_lab, CALLS)), timeout=200)
    told: dict[str, Any] = json.loads((slurm_lab.folder / "told.json").read_text())
    assert told["pair"] == [[rank, 4, "me"] for rank in range(4)]
    assert all(f"said by {rank}\n" in text for rank, text in enumerate(told["said"]))
    assert told["state"] in ("RUNNING", "COMPLETING", "COMPLETED")
    assert told["batch"] == [[2, 1], [2, 2]] and told["map"] == [8, 9]
    assert [one.partition("_")[2] for one in told["ids"]] == ["0", "1", "2"], "one array"
    assert told["kind"] == "FailedJobError" and "ValueError: no luck" in told["error"]
    runs = slurm_lab.cli("list", "--json").stdout
    assert runs.count('"name": "pair"') == 6, "and each is a run"


@pytest.mark.slow
def test_a_function_that_is_cancelled_while_it_runs_does_not_run_again(slurm_lab: SlurmLab) -> None:
    """Slurm's SIGTERM goes to the function as well, whose own handler takes it for a preemption."""
    said = slurm_lab.slurm(sys.executable, str(program(slurm_lab, CANCELLED)), timeout=200)
    assert "'CANCELLED', 'CANCELLED', 'CANCELLED'" in said and said.splitlines()[-1] == "3"


@pytest.mark.slow
@pytest.mark.parametrize("requeue", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_preempted_function_goes_on_from_its_checkpoint_and_another_begins_anew(
    slurm_lab: SlurmLab, requeue: bool
) -> None:
    """In the same job, or in another of the same run."""
    command = [sys.executable, str(program(slurm_lab, PREEMPTED))]
    process = subprocess.Popen(
        command, cwd=slurm_lab.folder, env=slurm_lab.on_the_cluster, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    ids = process.stdout.readline().split()
    for job in [] if requeue else ids:
        slurm_lab.slurm("scontrol", "update", f"JobId={job}", "Requeue=0")
    wait_for(lambda: all((slurm_lab.folder / name).exists() for name in ("waits", "plain")), "calls")
    slurm_lab.slurm("scancel", "--batch", "--signal=USR2", *ids)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert said.startswith("(3, 5) ") and "from 0\\n" in said and "from 3\\n" in said, said
    *_, anew, first, second, state = said.split()
    assert anew == "anew" and ([first, second] == ids) == requeue
    assert state in ("RUNNING", "COMPLETING", "COMPLETED"), "that of the job in which it went on"


@pytest.mark.slow
def test_the_lines_of_the_page_run(slurm_lab: SlurmLab) -> None:
    (slurm_lab.folder / "clusters").mkdir()
    profile = (slurm_lab.folder / "lab.yaml").read_text().replace("name: lab", "name: my-slurm")
    (slurm_lab.folder / "clusters" / "my-slurm.yaml").write_text(profile)
    lines = program(slurm_lab, PAGE.read_text().partition("```python\n")[2].partition("```")[0])
    assert slurm_lab.slurm(sys.executable, str(lines), timeout=240) == "42\n[2, 4, 6]"
