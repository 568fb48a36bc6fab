"""A disk that is full or away: training goes on, or stops with a verdict; it never hangs."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from launcher.spec.verdict import EXIT_CODES
from launcher.supervise.supervisor import GONE_SECONDS
from tests.lab import Lab, events, metrics, verdicts, wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture
def small_disk(tmp_path: Path):
    """A real 2 MiB file system."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"mounting a small tmpfs needs root: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.slow
def test_a_script_that_fills_the_disk_with_its_log_still_ends_well(lab: Lab, small_disk: Path) -> None:
    lab.script(
        "import sys\n"
        "for n in range(60000):\n"
        "    print(f'line {n} ' + 'x' * 90)\n"
        "print('the end', file=sys.stderr)\n"
    )
    lab.environ["LAUNCHER_RUNS"] = str(small_disk / "runs")
    done = lab.cli("run", str(lab.job(command="python train.py")))
    assert done.returncode == 0, done.stderr
    run = lab.newest()
    assert verdicts(run)[0]["failure"] == "succeeded"
    assert lab.status(run)["state"] == "succeeded"


@pytest.mark.slow
def test_training_without_space_for_checkpoints_goes_on_and_ends_with_a_verdict(
    lab: Lab, small_disk: Path
) -> None:
    lab.environ["LAUNCHER_RUNS"] = str(small_disk / "runs")
    job = lab.job(
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 2, "dim": 128, "heads": 2, "context": 32},
        steps=6,
        train={"checkpoint_every": 2},
        recipe={"sharding": "fsdp", "precision": "fp32"},
    )
    done = lab.cli("run", str(job))
    run = lab.newest()
    assert [event["step"] for event in events(run, "checkpoint-failed")] == [2, 4]
    assert "iB are free in" in done.stdout and len(metrics(run)) == 6
    assert list(run.checkpoints.glob("*")) == []
    [verdict] = verdicts(run)
    assert done.returncode == EXIT_CODES["disk-full"] and verdict["phase"] == "checkpoint"
    assert "ran out of disk space in checkpoint of step 6" in verdict["reason"]
    assert "No space left on device: it takes " in verdict["exception"]


def test_a_crash_on_a_full_disk_is_neither_hidden_nor_blamed_on_the_start(lab: Lab, small_disk: Path) -> None:
    lab.script(
        "import contextlib, os\n"
        "path = os.environ['LAUNCHER_RUN_DIR'] + '/filler'\n"
        "with contextlib.suppress(OSError), open(path, 'wb', 0) as disk:\n"
        "    while True:\n"
        "        disk.write(bytes(4096))\n"
        "print('lost', flush=True)\n"
        "os.abort()\n"
    )
    lab.environ["LAUNCHER_RUNS"] = str(small_disk / "runs")
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    job = lab.job(command="python train.py", retries={"same": 0}, resources=resources)
    done = lab.cli("run", str(job))
    verdict = verdicts(lab.newest())[0]
    assert done.returncode == 19 and "SIGABRT" in verdict["reason"]
    assert "1 lines lost: No space left on device" in done.stdout, "the log does not just end"


@pytest.mark.slow
def test_a_run_whose_file_system_is_away_for_a_while_goes_on(lab: Lab, small_disk: Path) -> None:
    """Its directory is missing then, but was not deleted."""
    there = lab.folder / "there"
    there.mkdir()
    bind = ["mount", "--bind", str(small_disk), str(there)]
    subprocess.run(bind, check=True)
    lab.environ["LAUNCHER_RUNS"] = str(there / "runs")
    lab.script("import os, time\nwhile not os.path.exists('go'): time.sleep(0.1)\n")
    run = lab.submit(str(lab.job(command="python train.py")))
    wait_for(lambda: run.attempt(0).rank_log(0, 1, "out").exists(), "a rank")
    subprocess.run(["umount", "--lazy", str(there)], check=True)
    time.sleep(2 * GONE_SECONDS)
    subprocess.run(bind, check=True)
    (lab.folder / "go").touch()
    try:
        assert lab.wait(run)["state"] == "succeeded", lab.all_logs(run)
    finally:
        subprocess.run(["umount", "--lazy", str(there)], check=True)
