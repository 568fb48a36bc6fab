"""Slurm, systemd and others end a job by SIGTERM to every process of it: what is worth saving is saved."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_CODES
from tests.lab import HELD, HELD_JOB, Lab, events, supervisor_pid, verdicts, wait_for

pytestmark = pytest.mark.e2e


def processes(run: RunDir) -> list[psutil.Process]:
    supervisor = psutil.Process(supervisor_pid(run))
    return [supervisor, *supervisor.children(recursive=True)]


def terminate_all(run: RunDir, first: signal.Signals = signal.SIGTERM) -> list[psutil.Process]:
    """As `scancel` does; twice, as some sites do."""
    told = processes(run)
    for signum in (first, signal.SIGTERM):
        for process in told:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
    wait_for(lambda: events(run, "stopping"), "request to stop")
    return told


@pytest.mark.parametrize(
    ("ranks", "first", "failure"),
    [
        pytest.param(1, signal.SIGTERM, "preempted", marks=pytest.mark.slow),
        (2, signal.SIGUSR2, "time-limit"),
    ],
)
def test_a_task_finishes_its_step_and_saves_it(
    lab: Lab, ranks: int, first: signal.Signals, failure: str
) -> None:
    lab.script(HELD, "held.py")
    job = {**HELD_JOB, "train": {**HELD_JOB["train"], "workers": 2}}
    resources = {"gpus_per_node": 0, "ranks_per_node": ranks}
    run = lab.submit(str(lab.job(**job, resources=resources)))
    wait_for((run.path / "held").exists, "first step")
    told = terminate_all(run, first)
    (run.path / "go").touch()
    status = lab.wait(run)
    assert (status["state"], status["failure"], status["checkpoint_step"]) == ("interrupted", failure, 1)
    assert verdicts(run)[0]["reason"].endswith("a checkpoint was written"), lab.all_logs(run)
    assert not psutil.wait_procs(told, timeout=240)[1]


SCRIPT = """
import os, pathlib, signal, sys, time
run, rank = pathlib.Path(os.environ["LAUNCHER_RUN_DIR"]), os.environ["RANK"]
def asked(*_):
    with open(run / f"asked-{rank}", "a") as file:
        file.write("asked ")
    if rank == "1":
        sys.exit(143)
    while not (run / "go").exists():
        time.sleep(0.02)
    (run / "saved").touch()
    sys.exit(85)
signal.signal(signal.SIGTERM, asked)
(run / f"ready-{rank}").touch()
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_script_that_saves_is_told_once_and_has_its_time(lab: Lab, all_of_it: bool) -> None:
    """Also when another rank has ended already, of which torchrun would make a failure."""
    lab.script(SCRIPT)
    run = lab.submit(str(lab.job(command="python train.py", recipe="auto")))
    wait_for(lambda: all((run.path / f"ready-{rank}").exists() for rank in (0, 1)), "ranks")
    if all_of_it:
        terminate_all(run)
    else:
        os.kill(supervisor_pid(run), signal.SIGTERM)
    ended = run.attempts()[0].exit(1)
    code = json.loads(wait_for(ended.read_text, "end of rank 1"))["exit_code"]
    assert code in (143, -signal.SIGTERM), "a second SIGTERM may find it without its handler already"
    wait_for(lambda: events(run, "stopping"), "request to stop")
    (run.path / "go").touch()
    status = lab.wait(run)
    assert (status["state"], status["failure"]) == ("interrupted", "preempted"), lab.all_logs(run)
    assert (run.path / "saved").exists()
    asked = (run.path / "asked-0").read_text().split()
    assert len(asked) <= (2 if all_of_it else 1)  # it was sent two
    assert json.loads(run.attempts()[0].exit(0).read_text())["exit_code"] == 85


@pytest.mark.slow
@pytest.mark.parametrize("saves", [True, False])
def test_what_does_not_end_in_its_time_is_killed_and_says_so(lab: Lab, saves: bool) -> None:
    lab.script("import os, signal, time, pathlib\n"
               "saved = pathlib.Path(os.environ['LAUNCHER_CHECKPOINT_DIR'], 'model.pt')\n"
               f"if {saves}:\n"
               "    saved.parent.mkdir(parents=True, exist_ok=True)\n"
               "    saved.touch()\n"
               "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
               "pathlib.Path(os.environ['LAUNCHER_RUN_DIR'], 'ready').touch()\n"
               "time.sleep(600)\n")  # fmt: skip
    one = {"gpus_per_node": 0, "ranks_per_node": 1}
    run = lab.submit(str(lab.job(command="python train.py", recipe="auto", resources=one, stop_timeout=1)))
    wait_for((run.path / "ready").exists, "rank")
    terminate_all(run)
    status = lab.wait(run)
    assert (status["state"], status["failure"]) == ("interrupted", "preempted")
    assert json.loads(run.attempts()[0].exit(0).read_text())["exit_code"] == -signal.SIGKILL
    assert ("in_vain" in events(run, "ended")[0]) != saves


def test_usr2_to_a_supervisor_is_no_time_limit_if_a_batch_script_tells_of_those(lab: Lab) -> None:
    """A person sent it: `scancel --signal=USR2`. Slurm announces the time limit to the batch script alone."""
    lab.script("import pathlib, time\npathlib.Path('up').touch()\ntime.sleep(300)\n")
    job = lab.job(command="python train.py", resources={"gpus_per_node": 0, "ranks_per_node": 1})
    assert lab.cli("render", str(job), "-c", "local", "--out", "runs/one").returncode == 0
    run = RunDir(lab.folder / "runs" / "one")
    command = [sys.executable, "-m", "launcher.supervise", str(run.path)]
    supervisor = subprocess.Popen([*command, "--stop-file", str(run.path / "told")], env=lab.environ)
    wait_for((lab.folder / "up").exists, "the rank")
    supervisor.send_signal(signal.SIGUSR2)
    (stopping,) = wait_for(lambda: events(run, "stopping"), "request to stop")
    (run.path / "told").write_text("preempted\n")
    assert stopping["reason"] == "preempted" and supervisor.wait(240) == EXIT_CODES["preempted"]
