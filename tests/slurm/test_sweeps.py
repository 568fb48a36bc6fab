"""The runs of a sweep taken together, through the real CLI: looked at, cancelled, deleted."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial

import pytest

from launcher.rundir.layout import RunDir
from launcher.schedulers.login import Answer, LocalLogin, ask
from launcher.schedulers.slurm.records import RunCommands, look_up
from launcher.spec.verdict import EXIT_CODES
from tests.lab import wait_for
from tests.slurm.lab import SlurmLab, job_id
from tests.slurm.test_runs import slow, steps

pytestmark = pytest.mark.e2e


@pytest.fixture
def lab(slurm_lab: SlurmLab) -> SlurmLab:
    """Slurm's commands note how they are called."""
    called = slurm_lab.folder / "bin"
    called.mkdir()
    for name in ("scancel", "squeue"):
        script = called / name
        script.write_text(f'#!/bin/sh\necho {name} "$@" >>{called}/calls\nexec {shutil.which(name)} "$@"\n')
        script.chmod(0o755)
    slurm_lab.environ["PATH"] = f"{called}:{slurm_lab.environ['PATH']}"
    return slurm_lab


def calls(lab: SlurmLab, name: str) -> list[str]:
    """Of one of Slurm's commands since the last look."""
    file = lab.folder / "bin" / "calls"
    found = [line for line in file.read_text().splitlines() if line.startswith(name)] if file.exists() else []
    file.unlink(missing_ok=True)
    return found


def said(lab: SlurmLab, *arguments: str, code: int = 0) -> str:
    done = lab.cli(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def submitted(lab: SlurmLab, job: str, *options: str) -> tuple[str, list[RunDir]]:
    """The sweep's id, and its runs in order."""
    out = said(lab, "submit", job, "-c", "lab.yaml", *options)
    (sweep,) = (line.split()[-1] for line in out.splitlines() if line.startswith("all of them: "))
    runs = sorted((lab.folder / "runs").glob(f"{sweep}-*"))
    return sweep, [RunDir(path) for path in runs]


def test_a_sweep_is_looked_at_cancelled_and_deleted_as_a_whole(lab: SlurmLab) -> None:
    job = slow(lab, 0.2, steps=100000, train={"checkpoint_every": None, "lr": 1e-3})
    sweep, runs = submitted(lab, job, "--sweep", "seed=0,1,2,3", "--at-once", "2")
    array = job_id(runs[0]).partition("_")[0]
    wait_for(lambda: all(steps(run) > 2 for run in runs[:2]), "training of two runs")

    calls(lab, "squeue")
    shown = said(lab, "status", sweep)
    assert len(calls(lab, "squeue")) == 1
    assert f"{sweep}: 2 running, 2 submitted" in shown and all(run.id in shown for run in runs)
    assert "its array runs no more tasks at the same time" in shown
    told = said(lab, "logs", sweep, code=3)
    assert f"'{sweep}' is a sweep of 4 runs: name one of them, such as {sweep}-0" in told
    assert said(lab, "clean", sweep, "--yes", code=4).startswith(f"launcher: {sweep}-0 is still running")

    out = said(lab, "cancel", sweep)
    assert calls(lab, "scancel") == [f"scancel --state=PENDING {array}"]
    assert f"{sweep}: 2 taken out of the queue, 2 asked to write a checkpoint and stop" in out
    assert [lab.wait(run)["state"] for run in runs] == ["cancelled"] * 4
    assert [lab.status(run)["checkpoint_step"] is not None for run in runs] == [True, True, False, False]
    found = lab.json("status", sweep, code=EXIT_CODES["cancelled"])
    assert found["states"] == {"cancelled": 4} and [run["run_id"] for run in found["runs"]] == [
        run.id for run in runs
    ]
    assert f"{sweep}: none of its runs is running or waiting" in said(lab, "cancel", sweep, code=4)

    folder = lab.folder / "runs" / "sweeps" / sweep
    said(lab, "clean", runs[3].id, "--yes")
    assert sorted(path.name for path in folder.iterdir() if path.is_symlink()) == ["0", "1", "2"]
    assert "deleted 3 runs" in said(lab, "clean", sweep, "--yes")
    assert not folder.exists() and not any(run.path.exists() for run in runs)


@pytest.mark.slow
def test_a_second_cancel_ends_those_that_were_asked_before(lab: SlurmLab) -> None:
    """A program that ends slowly; one of the runs is asked alone, then all."""
    lab.script(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), os._exit(1)))\n"
        "print('at work', flush=True)\ntime.sleep(999)\n"
    )
    resources = {"nodes": 1, "ranks_per_node": 1}
    job = lab.job(command="python train.py", resources=resources, env={"WHO": "?"})
    sweep, runs = submitted(lab, str(job), "--sweep", "env.WHO=a,b,c", "--at-once", "2")
    array = job_id(runs[0]).partition("_")[0]
    lab.slurm("scontrol", "hold", f"{array}_2")  # also when one of the two has ended
    wait_for(lambda: all("at work" in lab.all_logs(run) for run in runs[:2]), "start of two runs")
    said(lab, "cancel", runs[1].id)
    calls(lab, "scancel")
    out = said(lab, "cancel", sweep)
    asked = calls(lab, "scancel")
    assert sorted(asked) in (
        [f"scancel --state=PENDING {array}", f"scancel {array}_[1]"],
        [f"scancel --state=PENDING {array}"],  # it has ended meanwhile
    )
    assert "1 taken out of the queue" in out
    states = Counter(lab.wait(run)["state"] for run in runs)
    assert states == {"cancelled": 3}


@pytest.mark.slow
def test_of_runs_that_wait_one_is_cancelled_alone_and_the_others_together(
    lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", lab.cluster.env()["SLURM_CONF"])
    lab.profile(extra={"begin": "now+1hour"})
    job = lab.job(command="true", resources={"nodes": 1, "ranks_per_node": 1}, env={"WHO": "?"})
    values = ",".join(map(str, range(12)))
    sweep, runs = submitted(lab, str(job), "--sweep", f"env.WHO={values}")
    told = said(lab, "status", f"{sweep}-0", code=3)
    assert "is the beginning of several runs: " in told and told.rstrip().endswith(" and 5 more")
    assert "taken out of the queue" in said(lab, "cancel", runs[5].id)
    assert f"{sweep}: 11 submitted, 1 cancelled" in said(lab, "status", sweep)
    assert f"{sweep}: 11 taken out of the queue;" in said(lab, "cancel", sweep[:-2])
    assert f"{sweep}: 12 cancelled" in said(lab, "status", sweep, code=EXIT_CODES["cancelled"])
    jobs, put = [job_id(run) for run in runs], partial(ask, LocalLogin())
    without: RunCommands = lambda asked: put(asked) | {"sacct": Answer(127, "", "")}  # noqa: E731
    for known in (look_up(put, jobs), look_up(without, jobs)):
        assert {getattr(known.get(job_id(run)), "state", "") for run in runs} == {"CANCELLED"}
    assert said(lab, "submit", str(job), "-c", "lab.yaml", "--at-once", "2", code=2).startswith(
        "launcher: --at-once and --samples need a sweep"
    )
