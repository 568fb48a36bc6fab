"""Runs on this machine share out its GPUs, and a sweep's runs take turns. nvidia-smi is pretended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Cancelled
from launcher.schedulers.local import LocalScheduler
from launcher.schedulers.lookup import cancel_all
from launcher.supervise.gpus import FOLDER
from launcher.supervise.sweep_queue import SweepQueue
from tests.lab import PATIENCE, Lab, wait_for
from tests.schedulers.ssh.hosts import NVIDIA_SMI

pytestmark = pytest.mark.e2e
SHOWS = """
import os, pathlib, time
run = pathlib.Path(os.environ["LAUNCHER_RUN_DIR"])
partial = run / ("partial-" + os.environ["RANK"])
partial.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
partial.rename(run / "sees")
while not (run / "go").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A machine with two GPUs."""
    lab = Lab(tmp_path)
    lab.script(SHOWS)
    programs = tmp_path / "programs"
    programs.mkdir()
    names = [f"GPU-{uuid.uuid4()}" for _ in range(2)]
    rows = [f"{index}, {name}, NVIDIA RTX A6000, 49140, 4\n" for index, name in enumerate(names)]
    (programs / "gpus").write_text("".join(rows))
    (programs / "apps").write_text("")
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    (programs / "nvidia-smi").chmod(0o755)
    lab.environ["PATH"] = f"{programs}:{lab.environ['PATH']}"
    lab.environ.pop("CUDA_VISIBLE_DEVICES", None)
    yield lab
    for name in names:
        (FOLDER / name).unlink(missing_ok=True)


def job(lab: Lab, gpus: int) -> str:
    resources = {"gpus_per_node": gpus, "ranks_per_node": max(gpus, 1)}
    return str(lab.job(command="python train.py", env={"N": "0"}, resources=resources, recipe={}))


def sees(run: RunDir) -> str | None:
    file = run.path / "sees"
    return file.read_text() if file.exists() else None


def test_two_submissions_have_a_gpu_each_and_a_third_waits_for_one(lab: Lab) -> None:
    file = job(lab, 1)
    first, second = lab.submit(file), lab.submit(file)
    wait_for(lambda: sees(first) and sees(second), "such a state")
    assert {sees(first), sees(second)} == {"0", "1"}
    third = lab.submit(file)
    wait_for(lambda: "waits for GPUs: 0 of 2 GPUs are free" in lab.status(third)["reason"], "such a state")
    assert first.id in lab.status(third)["reason"] and lab.status(third)["state"] == "submitted"
    supervisor = read_record(first.supervisor_lock)["pid"]
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: sees(third) is not None, "such a state")
    assert sees(third) == sees(first)
    fourth = lab.submit(file)
    wait_for(lambda: "waits for GPUs" in lab.status(fourth)["reason"], "such a state")
    assert lab.cli("cancel", fourth.id).stdout == f"{fourth.id}: taken out of the queue\n"
    assert lab.wait(fourth)["state"] == "cancelled" and sees(fourth) is None
    for run in (second, third):
        (run.path / "go").touch()
        assert lab.wait(run)["state"] == "succeeded"


def test_the_runs_of_a_sweep_take_turns_and_are_resumed_after_their_supervisors_died(lab: Lab) -> None:
    file = job(lab, 0)
    done = lab.cli("submit", file, "--sweep", "env.N=1,2,3", "--at-once", "2")
    assert done.returncode == 0, done.stderr
    sweep_id = done.stdout.rstrip().rpartition(" ")[2]
    runs = [RunDir(Path(row["path"])) for row in lab.json("sweep", "status", sweep_id)["runs"]]
    wait_for(lambda: sum(sees(run) is not None for run in runs) == 2, "such a state")
    (waiting,) = [run for run in runs if sees(run) is None]
    wait_for(lambda: "its turn in the sweep (--at-once 2)" in lab.status(waiting)["reason"], "such a state")
    assert "is submitted: waits for its turn" in lab.cli("why", waiting.id).stdout
    for run in runs:
        os.kill(read_record(run.supervisor_lock)["pid"], signal.SIGKILL)
    wait_for(lambda: {lab.status(run)["state"] for run in runs} == {"lost"}, "lost runs")
    for run in runs:
        (run.path / "go").touch()
    record = waiting.submitted.read_text()
    waiting.submitted.write_text("{")
    again = lab.cli("sweep", "resume", sweep_id)  # one that cannot go on does not stop the others
    assert again.returncode == 4 and again.stdout.count("goes on") == 2, again.stderr
    assert waiting.id in again.stderr
    waiting.submitted.write_text(record)
    assert lab.cli("resume", waiting.id, "--set", "tags=[again]").returncode == 0  # stays in the sweep
    assert [lab.wait(run, "succeeded", "failed")["state"] for run in runs] == ["succeeded"] * 3
    assert "env.N" in lab.cli("sweep", "compare", sweep_id).stdout
    assert "missing" not in lab.cli("status", sweep_id).stdout
    assert lab.cli("clean", runs[0].id, "-y").returncode == 0
    assert "missing: 1 of 3 runs" in lab.cli("status", sweep_id).stdout
    assert lab.cli("clean", sweep_id, "-y").returncode == 0
    assert not list((runs[0].path.parent / "sweeps").iterdir())


def test_cancelling_a_sweep_ends_the_running_and_the_waiting_runs(lab: Lab) -> None:
    done = lab.cli("submit", job(lab, 2), "--sweep", "env.N=1,2", "--at-once", "2")
    assert done.returncode == 0, done.stderr
    sweep_id = done.stdout.rstrip().rpartition(" ")[2]
    runs = [RunDir(Path(row["path"])) for row in lab.json("sweep", "status", sweep_id)["runs"]]
    wait_for(lambda: sees(runs[0]) == "0,1", "such a state")
    wait_for(lambda: "waits for GPUs" in lab.status(runs[1])["reason"], "such a state")
    queue = SweepQueue(runs[0].path.parent / "sweeps" / sweep_id / "queue", 9, 2)
    # Whoever waits for GPUs holds none of the two places. It looks twice a second, and takes one meanwhile.
    wait_for(queue.take_place, "free place")
    queue.close()
    alone = lab.submit(job(lab, 2))
    assert lab.json("sweep", "status")["sweep_id"] == sweep_id, "the newest sweep, not the newest run"
    said = lab.cli("sweep", "cancel").stdout
    assert lab.cli("cancel", alone.id).returncode == 0 and lab.wait(alone)["state"] == "cancelled"
    assert said.startswith(
        f"{sweep_id}: 1 taken out of the queue, 1 whose script is asked to stop by SIGTERM; "
    )
    ended = [lab.wait(run) for run in runs]
    assert [one["state"] for one in ended] == ["cancelled"] * 2
    assert ended[1]["reason"] == "cancelled by the user, before it started"


FAILS = "#!/bin/sh\n[ $1 = --query-gpu=name,memory.total ] && exec {0}.real $1\necho driver is gone; exit 9\n"


def test_a_run_waits_while_nvidia_smi_fails_instead_of_seeing_all_gpus(lab: Lab, tmp_path: Path) -> None:
    program = tmp_path / "programs" / "nvidia-smi"
    works = program.rename(f"{program}.real")
    program.write_text(FAILS.format(program))
    program.chmod(0o755)
    run = lab.submit(job(lab, 1))
    wait_for(
        lambda: lab.status(run)["reason"] == "waits for GPUs: nvidia-smi: driver is gone", "such a state"
    )
    assert sees(run) is None
    works.rename(program)
    wait_for(lambda: sees(run) == "0", "a GPU")
    (run.path / "go").touch()
    assert lab.wait(run)["state"] == "succeeded"


def test_a_run_whose_sweep_has_no_queue_fails_with_one_message(lab: Lab) -> None:
    (lab.folder / "runs").mkdir()
    (lab.folder / "runs" / "sweeps").touch()
    assert lab.cli("submit", job(lab, 0), "--sweep", "env.N=1").returncode == 0
    ended = lab.wait(run := lab.newest())
    assert (ended["state"], ended["failure"]) == ("failed", "node-failed")
    assert "the queue of the sweep" in ended["reason"] and "Not a directory" in ended["reason"]
    assert "Traceback" not in lab.all_logs(run)


def test_a_user_who_hides_the_gpus_keeps_them_hidden(lab: Lab) -> None:
    lab.environ["CUDA_VISIBLE_DEVICES"] = ""
    run = lab.submit(job(lab, 1))
    wait_for(lambda: sees(run) is not None, "such a state")
    assert sees(run) == ""
    (run.path / "go").touch()
    assert lab.wait(run)["state"] == "succeeded"


def submitting(lab: Lab, count: int) -> tuple[subprocess.Popen[str], str]:
    """A `submit` of a sweep that goes on, and the sweep's id."""
    values = ",".join(map(str, range(count)))
    command = [sys.executable, "-m", "launcher", "submit", job(lab, 0), "--sweep", f"env.N={values}"]
    process = subprocess.Popen(
        [*command, "--at-once", "1"],
        cwd=lab.folder, env=lab.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = wait_for(lambda: next((lab.folder / "runs").glob("e2e-sweep-*-00"), None), "a first run")
    return process, first.name.removesuffix("-00")


@pytest.mark.slow
def test_a_sweep_that_is_cancelled_while_it_is_submitted_starts_no_more_runs(lab: Lab) -> None:
    process, sweep_id = submitting(lab, 40)
    cancelled = lab.cli("cancel", sweep_id)  # the first run may be the only one
    assert cancelled.returncode == 0, cancelled.stderr
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4, out + err
    runs = [RunDir(path) for path in (lab.folder / "runs").glob("e2e-sweep-*")]
    told = f"was cancelled while it was submitted: {len(runs)} of 40 runs were submitted, and are cancelled"
    assert told in err.splitlines()[-1] and len(runs) < 40
    assert [lab.wait(run)["state"] for run in runs] == ["cancelled"] * len(runs)
    for run in runs:
        (run.path / "go").touch()
    assert lab.cli("sweep", "resume", sweep_id).stdout.count("goes on") == len(runs)
    assert [lab.wait(run)["state"] for run in runs] == ["succeeded"] * len(runs)


def test_a_submission_of_a_sweep_that_is_interrupted_names_it(lab: Lab) -> None:
    process, sweep_id = submitting(lab, 40)
    # A run that is starting when the signal comes is ended, so wait until the first one has started.
    wait_for((lab.folder / "runs" / f"{sweep_id}-01").exists, "a second run")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    count = len(list((lab.folder / "runs").glob("e2e-sweep-*")))
    assert process.returncode == 130 and count < 40
    last = err.splitlines()[-1]
    assert last.startswith(f"launcher: interrupted: {count} of 40 runs of {sweep_id} were submitted: ")
    assert all(f"`launcher sweep {verb} {sweep_id}`" in last for verb in ("status", "cancel", "resume"))
    said = lab.cli("sweep", "cancel", sweep_id)
    assert said.returncode == 0 and f"missing: {40 - count} of 40 runs" in said.stdout


@pytest.mark.slow
def test_a_run_that_ends_while_its_sweep_is_cancelled_keeps_no_other_from_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = lab.cli("submit", job(lab, 0), "--sweep", "env.N=1,2")
    sweep_id = done.stdout.rstrip().rpartition(" ")[2]
    runs = [RunDir(Path(row["path"])) for row in lab.json("sweep", "status", sweep_id)["runs"]]
    wait_for(lambda: all(sees(run) is not None for run in runs), "such a state")
    cancel = LocalScheduler.cancel

    def late(self: LocalScheduler, run: RunDir) -> None:
        if run == runs[1]:  # the first that is cancelled
            (run.path / "go").touch()
            assert lab.wait(run)["state"] == "succeeded"
        cancel(self, run)

    monkeypatch.setattr(LocalScheduler, "cancel", late)
    assert cancel_all(runs, sweep_id) == Cancelled(asked=1)
    assert [lab.wait(run)["state"] for run in runs] == ["cancelled", "succeeded"]
