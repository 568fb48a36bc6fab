"""Parts of the cluster are down: what is said, what goes on, and that nothing is submitted twice."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.rundir.find import latest_checkpoint
from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_CODES
from tests.lab import HELD, HELD_JOB, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import clean_up, started
from tests.slurm.lab import SlurmLab, job_id
from tests.slurm.shape import Shape

pytestmark = pytest.mark.e2e

ONE_RANK = {"nodes": 1, "ranks_per_node": 1}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One that may be broken."""
    yield from started(tmp_path_factory, Shape(nodes=1))


@pytest.fixture
def lab(tmp_path: Path, cluster: Cluster) -> Iterator[SlurmLab]:
    lab = SlurmLab(tmp_path, cluster)
    yield lab
    clean_up(lab)


def job(lab: SlurmLab, seconds: float = 1, code: int = 0) -> str:
    """A command that waits for the file `go`, or for so long."""
    lab.script(
        "import pathlib, sys, time\n"
        f"end = time.monotonic() + {seconds}\n"
        "while time.monotonic() < end and not pathlib.Path('go').exists(): time.sleep(0.05)\n"
        f"if {code}: raise ValueError('as it was asked to')\n",
        f"for-{seconds}-{code}.py",
    )
    return str(lab.job(command=f"python for-{seconds}-{code}.py", resources=ONE_RANK))


def jobs_of(lab: SlurmLab) -> list[str]:
    """Of this project folder, living or ended."""
    rows = [line.split("|") for line in lab.slurm("squeue", "-h", "-t", "all", "-o", "%A|%Z").splitlines()]
    return [number for number, folder in rows if folder.startswith(str(lab.folder))]


@pytest.mark.slow
def test_a_controller_that_is_down_at_submission_is_named_and_no_job_appears_later(lab: SlurmLab) -> None:
    written = job(lab)
    lab.cluster.stop_controller()
    try:
        done = lab.cli("submit", written, "-c", "lab.yaml")
    finally:
        lab.cluster.start_controller()
    assert done.returncode == 4, done.stdout + done.stderr
    assert "controller" in done.stderr.lower() and "Traceback" not in done.stderr
    assert done.stderr.count("trying for 20 s") == 1
    assert jobs_of(lab) == []
    assert all(run["state"] == "failed" for run in json.loads(lab.cli("list", "--json").stdout))


@pytest.mark.thorough
def test_a_cancel_without_the_controller_reaches_a_run_that_has_begun_and_is_not_kept_for_one_that_waits(
    lab: SlurmLab,
) -> None:
    lab.script(HELD, "held.py")
    running = lab.submit(str(lab.job(**HELD_JOB, recipe="auto", resources=ONE_RANK)))
    lab.profile(extra={"begin": "now+1hour"})
    waiting = lab.submit(job(lab))
    wait_for((running.path / "held").exists, "first step")
    lab.cluster.stop_controller()
    try:
        with ThreadPoolExecutor(1) as pool:  # Slurm's commands may take longer than the run has to stop
            cancelling = pool.submit(lab.cli, "cancel", running.id)
            wait_for(running.cancel.exists, "request")
            (running.path / "go").touch()
            asked = cancelling.result()
        refused = lab.cli("cancel", waiting.id)
        wait_for(lambda: running.read_state().state == "cancelled", "end of the run")
    finally:
        lab.cluster.start_controller()
    assert asked.returncode == 0 and "asked to write a checkpoint" in asked.stdout, asked.stderr
    assert "has begun, and stops anyway" in asked.stderr
    assert latest_checkpoint(running) == 1
    assert refused.returncode == 4 and "was not cancelled: cancel it again" in " ".join(
        refused.stderr.split()
    )
    assert not waiting.cancel.exists() and lab.status(waiting)["state"] == "submitted"
    assert "taken out of the queue" in lab.cli("cancel", waiting.id).stdout
    assert waiting.read_state().state == "cancelled"


def submit_in_background(lab: SlurmLab, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launcher", "submit", *arguments, "-c", "lab.yaml"],
        cwd=lab.folder, env=lab.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.thorough
def test_a_controller_that_comes_back_during_submission_gets_the_job_once(lab: SlurmLab) -> None:
    written = job(lab)
    lab.cluster.stop_controller()
    process = submit_in_background(lab, written)
    try:
        time.sleep(2)
    finally:
        lab.cluster.start_controller()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert jobs_of(lab) == [job_id(lab.newest())]
    assert lab.wait(lab.newest())["state"] == "succeeded"


@pytest.mark.slow
def test_a_controller_that_is_silent_is_asked_again_and_gets_the_job_once(lab: SlurmLab) -> None:
    """It takes requests, is silent for longer than sbatch waits, then does as told."""
    written = job(lab)
    lab.cluster.freeze_controller()
    process = submit_in_background(lab, written)
    try:
        assert process.stderr is not None
        said = next((line for line in process.stderr if "timed out" in line), "")
    finally:
        lab.cluster.thaw_controller()
    out, err = process.communicate(timeout=240)
    time.sleep(1)
    assert "trying for 20 s" in said
    assert process.returncode == 0, out + err
    assert jobs_of(lab) == [job_id(lab.newest())]
    assert lab.wait(lab.newest())["state"] == "succeeded"


@dataclass(frozen=True)
class SlowSbatch:
    """An sbatch that waits for the file `through` in the lab's folder before it asks Slurm."""

    lab: SlurmLab

    def submit(self, *arguments: str) -> subprocess.Popen[str]:
        """A `launcher submit` whose sbatch waits."""
        process = submit_in_background(self.lab, *arguments)
        wait_for((self.lab.folder / "waits").exists, "sbatch")
        return process

    def go_on(self) -> str:
        """Let the oldest sbatch ask Slurm; return its job when that has ended."""
        (self.lab.folder / "through").touch()
        job = wait_for((self.lab.folder / "late").read_text, "job of the late sbatch").strip()
        self.lab.accounted(job)
        return job


@pytest.fixture
def slow_sbatch(lab: SlurmLab) -> SlowSbatch:
    script, folder, real = lab.folder / "bin" / "sbatch", lab.folder, shutil.which("sbatch")
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *--test-only*) exec {real} "$@";; esac\n'
        f'mkdir {folder}/waits 2>/dev/null || exec {real} "$@"\n'
        f"until [ -e {folder}/through ]; do sleep 0.05; done\n"
        f'job=$({real} "$@") && echo "$job" >{folder}/new && mv {folder}/new {folder}/late && echo "$job"\n'
    )
    script.chmod(0o755)
    lab.environ["PATH"] = f"{script.parent}:{lab.environ['PATH']}"
    return SlowSbatch(lab)


@pytest.mark.slow
def test_a_job_that_slurm_gets_after_its_run_was_resumed_does_not_run_it_again(
    lab: SlurmLab, slow_sbatch: SlowSbatch
) -> None:
    process = slow_sbatch.submit(job(lab))
    process.kill()
    process.communicate()
    run = lab.newest()
    assert lab.cli("resume", run.id).returncode == 0
    resumed = job_id(run)
    assert lab.wait(run)["state"] == "succeeded"
    late = slow_sbatch.go_on()
    assert (
        f"job {resumed} has the run: nothing is left to do here"
        in (run.path / f"slurm-{late}.out").read_text()
    )
    assert len(run.attempts()) == 1 and job_id(run) == resumed
    assert lab.status(run)["state"] == "succeeded"


@pytest.mark.slow
def test_a_run_whose_submission_waits_for_slurm_is_submitted_and_can_be_cancelled(
    lab: SlurmLab, slow_sbatch: SlowSbatch
) -> None:
    process = slow_sbatch.submit(job(lab))
    run = lab.newest()
    status = lab.status(run)
    assert status["state"] == "submitted" and "Slurm has not answered yet" in status["reason"]
    refused = lab.cli("resume", run.id)
    assert refused.returncode == 4 and "is still in the queue" in refused.stderr, refused.stderr
    assert "taken out of the queue" in lab.cli("cancel", run.id).stdout
    slow_sbatch.go_on()
    process.communicate()
    assert lab.wait(run)["state"] == "cancelled" and not run.attempts()


@pytest.mark.slow
def test_a_sweep_is_cancelled_also_while_a_killed_submission_still_asks_for_its_jobs(
    lab: SlurmLab, slow_sbatch: SlowSbatch
) -> None:
    process = slow_sbatch.submit(job(lab), "--sweep", "env.WHO=a,b")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    sweep = lab.newest().read_about().sweep
    assert sweep is not None
    assert f"interrupted: {sweep.id} may have been submitted: " in err
    cancelled = lab.cli("cancel", sweep.id)
    assert cancelled.returncode == 0 and "2 taken out of the queue" in cancelled.stdout, cancelled.stderr
    slow_sbatch.go_on()
    runs = [RunDir(path) for path in (lab.folder / "runs").glob(f"{sweep.id}-*")]
    assert [len(run.attempts()) for run in runs] == [0, 0]
    assert lab.json("status", sweep.id, code=EXIT_CODES["cancelled"])["states"] == {"cancelled": 2}


@pytest.mark.slow
def test_commands_of_slurm_without_a_cluster_are_no_slurm(lab: SlurmLab) -> None:
    del lab.environ["SLURM_CONF"]
    done = lab.cli("submit", job(lab), "-c", "lab.yaml")
    assert done.returncode == 4
    assert "there is no Slurm on this host: submit on a host that has it" in done.stderr


@pytest.mark.thorough
def test_status_without_the_controller_tells_what_the_run_says_of_itself(lab: SlurmLab) -> None:
    run = lab.submit(job(lab, 100))
    lab.wait(run, "running")
    lab.cluster.stop_controller()
    try:
        done = lab.cli("status", run.id)
        listed = lab.cli("list")
        cancel = lab.cli("status", run.id, "--json")
    finally:
        lab.cluster.start_controller()
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "running" in said and "controller" in said.lower(), said
    assert "Traceback" not in said + listed.stderr
    assert listed.returncode == 0 and "running" in listed.stdout
    assert json.loads(cancel.stdout)["state"] == "running"
    (lab.folder / "go").touch()
    assert lab.wait(run)["state"] == "succeeded"


@pytest.mark.thorough
def test_without_accounting_daemon_a_run_is_submitted_followed_and_judged(lab: SlurmLab) -> None:
    lab.cluster.stop_accounting()
    try:
        done = lab.cli("run", job(lab, code=1), "-c", "lab.yaml")
        run = lab.newest()
        status = lab.status(run)
        listed = lab.cli("list")
    finally:
        lab.cluster.start_accounting()
    assert done.returncode == EXIT_CODES["user-error"], done.stdout + done.stderr
    assert (status["state"], status["failure"]) == ("failed", "user-error")
    assert listed.returncode == 0 and "Traceback" not in done.stderr + listed.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that keeps no accounts."""
    yield from started(tmp_path_factory, Shape(nodes=1, gpus_per_node=0, accounting=False))


@pytest.fixture
def plain_lab(tmp_path: Path, plain: Cluster) -> Iterator[SlurmLab]:
    lab = SlurmLab(tmp_path, plain)
    yield lab
    clean_up(lab)


@pytest.mark.slow
def test_on_a_cluster_without_accounting_every_verb_works(plain_lab: SlurmLab) -> None:
    lab = plain_lab
    good, endless = lab.submit(job(lab)), lab.submit(job(lab, 1000))
    lab.profile(extra={"begin": "now+1hour"})
    waiting = lab.submit(job(lab))
    lab.profile()
    assert "taken out of the queue" in lab.cli("cancel", waiting.id).stdout
    assert waiting.read_state().state == "cancelled", "kept, since Slurm will forget it"
    lab.wait(endless, "running")
    assert lab.cli("cancel", endless.id).returncode == 0
    assert lab.wait(endless)["state"] == "cancelled"
    assert lab.wait(good)["state"] == "succeeded"
    bad = lab.cli("run", job(lab, code=1), "-c", "lab.yaml")
    assert bad.returncode == EXIT_CODES["user-error"], bad.stdout + bad.stderr
    assert "user-error" in lab.cli("why").stdout
    states = {run["state"] for run in json.loads(lab.cli("list", "--json").stdout)}
    assert states == {"succeeded", "cancelled", "failed"}
