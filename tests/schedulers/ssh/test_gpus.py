"""GPUs of a host: looked at before anything starts, taken by one run at a time, let go when it ends."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.rundir.layout import RunDir
from launcher.supervise.gpus import InstalledGpu, choose, short_of
from launcher.supervise.start import lock_path
from tests.lab import events, wait_for
from tests.schedulers.ssh.hosts import ROOT, Host, Laptop

GPU = {"type": "NVIDIA RTX A6000", "count": 8, "memory": "47.4GiB"}

# Takes as many GPUs as asked, says which, and keeps them until its stdin ends.
TAKE = """
import sys
from launcher.supervise.gpus import GpusError, claim
try:
    print("has", *claim(int(sys.argv[1]), {"run": sys.argv[2], "user": "alice"})[0], flush=True)
except GpusError as error:
    sys.exit(print(error, flush=True))
sys.stdin.read()
"""
SHOWS = """
import os, pathlib, time
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"], flush=True)
while not (pathlib.Path(os.environ["LAUNCHER_RUN_DIR"]) / "go").exists():
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        ((0, 1, 2, 3), 2, (0, 1)),
        ((1, 2, 3), 2, (2, 3)),
        ((1, 4, 6, 7), 2, (6, 7)),
        ((0, 3, 5), 2, (3, 5)),
        ((1, 2, 3, 4, 5, 6, 7), 4, (4, 5, 6, 7)),
        ((5,), 1, (5,)),
        ((), 1, None),
        ((0, 1), 3, None),
    ],
)
def test_neighbours_are_taken_where_there_are_some(
    free: tuple[int, ...], count: int, chosen: tuple[int, ...] | None
) -> None:
    assert choose(free, count) == chosen


def test_what_is_missing_is_said_with_whoever_has_it() -> None:
    gpus = [
        InstalledGpu(i, f"GPU-{i}", "A6000", 49140, 4, busy) for i, busy in enumerate(("", "bob", "", ""))
    ]
    assert short_of(gpus, 3) == ""
    assert short_of(gpus, 4) == "3 of 4 GPUs are free, the job needs 4 (GPU 1: bob)"
    assert short_of(gpus[:1], 2) == "there are 1 GPUs, the job needs 2"


class Machine:
    """A host's nvidia-smi, and processes that take GPUs."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.environ = {
            **os.environ,
            "PATH": f"{host.programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    def take(self, count: int, run: str = "a-run") -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", TAKE, str(count), run], env=self.environ, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        return process, process.stdout.readline().strip()


@pytest.fixture
def machine(laptop: Laptop) -> Machine:
    laptop.hosts[0].gpus(4)
    return Machine(laptop.hosts[0])


def test_a_gpu_is_free_again_however_its_owner_ends(machine: Machine) -> None:
    owner, said = machine.take(3, "first-run")
    assert said == "has 0 1 2"
    second, said = machine.take(2)
    assert said.startswith(
        "1 of 4 GPUs are free, the job needs 2 (GPU 0: taken by launcher's run first-run of"
    )
    second.wait()
    owner.kill()
    owner.wait()
    last, said = machine.take(4)
    assert said == "has 0 1 2 3"
    last.communicate()


def test_of_many_who_take_at_once_no_two_have_the_same(machine: Machine) -> None:
    with ThreadPoolExecutor(6) as pool:
        takers = list(pool.map(lambda _: machine.take(1), range(6)))
    had = sorted(said for _, said in takers if said.startswith("has"))
    assert had == ["has 0", "has 1", "has 2", "has 3"]
    assert sum("0 of 4 GPUs are free" in said for _, said in takers) == 2
    for process, _ in takers:
        process.communicate()


def test_whoever_computes_or_only_holds_memory_keeps_a_gpu_from_us(machine: Machine) -> None:
    machine.host.gpus(4, used=(4, 30000, 600, 4))
    machine.host.busy(0, pid=os.getpid())
    owner, said = machine.take(2)
    assert said == "has 2 3"
    owner.communicate()
    _, said = machine.take(3)
    assert f"GPU 0: python (process {os.getpid()} of {getpass.getuser()}, 20480 MiB)" in said
    assert "GPU 1: 30000 MiB in use by a process that is not visible here" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 127", "nvidia-smi: exit code 127"),
        (
            'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9',
            "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        ),
    ],
)
def test_an_nvidia_smi_that_fails_says_why(machine: Machine, text: str, said: str) -> None:
    (machine.host.programs / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    assert machine.take(1)[1] == said


def test_a_gpu_that_tells_nothing_of_its_memory_is_judged_by_its_processes(machine: Machine) -> None:
    gpus = machine.host.programs / "gpus"
    gpus.write_text(gpus.read_text().replace("49140, 4", "[N/A], [N/A]"))
    (machine.host.programs / "apps").write_text(f"{machine.host.uuid(1)}, 77, [Not Found], [N/A]\n")
    owner, said = machine.take(3)
    assert said == "has 0 2 3"
    owner.communicate()


@pytest.mark.slow
@pytest.mark.e2e
def test_of_two_submissions_the_second_is_told_who_has_the_gpus(laptop: Laptop) -> None:
    laptop.hosts[0].gpus(4)
    laptop.hosts[0].busy(0)
    laptop.profile("gpus.yaml", ["tensor01"], node={"gpu": GPU})
    laptop.script(SHOWS)
    job = str(laptop.job("job.yaml", command="python train.py", resources={"gpus_per_node": 2}))
    run = laptop.submit(job, "-c", "gpus.yaml")
    refused = laptop.said("submit", job, "-c", "gpus.yaml", code=4)
    assert "tensor01: 1 of 4 GPUs are free, the job needs 2" in refused
    assert f"GPU 2: taken by launcher's run {run.id} of {getpass.getuser()}" in refused
    assert len(list(laptop.runs.glob("[!.]*"))) == 1
    assert len(laptop.json("list")) == 1
    assert events(run, "submitted")[0]["gpus"] == {"tensor01": [2, 3]}
    there = laptop.on_disk(run)
    output = wait_for(lambda: list(there.path.glob("attempts/*/logs/*/rank-000.out")), "rank")[0]
    wait_for(lambda: "sees 2,3 PCI_BUS_ID" in output.read_text(), "what the rank sees")
    (there.path / "go").touch()
    assert laptop.wait(run)["state"] == "succeeded", laptop.all_logs(there)


def test_a_job_that_chooses_gpus_itself_is_refused(laptop: Laptop) -> None:
    laptop.profile("gpus.yaml", ["tensor01"], node={"gpu": GPU})
    job = laptop.job(command="true", resources={"gpus_per_node": 1}, env={"CUDA_VISIBLE_DEVICES": "3"})
    said = laptop.said("submit", str(job), "-c", "gpus.yaml", code=4)
    assert "job env CUDA_VISIBLE_DEVICES" in said and "resources.gpus_per_node" in said


def test_the_name_of_the_lock_that_a_host_knows_is_that_of_the_run_directory(tmp_path: Path) -> None:
    assert lock_path(tmp_path, 0) == RunDir(tmp_path).supervisor_lock
