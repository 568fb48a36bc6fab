"""A scheduler of another package, as docs/schedulers.md has it: installed, and every verb used."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rundir.layout import RunDir
from tests.lab import HELD, HELD_JOB, Lab, wait_for

PAGE = (Path(__file__).parents[2] / "docs" / "schedulers.md").read_text()


def block(language: str) -> str:
    """The first code block of a language on the page."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def spool(lab: Lab) -> Iterator[Lab]:
    """A project of a user who has installed the package of the page, with a profile for its scheduler."""
    site = lab.folder / "site"
    (info := site / "spool_queue-1.0.dist-info").mkdir(parents=True)
    (site / "spool_queue.py").write_text(block("python"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spool-queue\nVersion: 1.0\n")
    _, name, entry = block("toml").splitlines()[0], *block("toml").splitlines()[1].split(" = ")
    (info / "entry_points.txt").write_text(f"[launcher.schedulers]\n{name} = {entry.strip(chr(34))}\n")
    (lab.folder / "queue").mkdir()
    profile = block("yaml").replace("/var/spool/training", str(lab.folder / "queue"))
    profile = profile.replace("nice: 10", "nice: 1")
    (lab.folder / "workstation.yaml").write_text(profile + f"paths: {{python: {sys.executable}}}\n")
    lab.environ["PYTHONPATH"] = str(site)
    lab.script(HELD, "held.py")
    lab.job(**HELD_JOB, name="held", resources={"gpus_per_node": 0, "ranks_per_node": 1})
    yield lab
    for left in lab.folder.glob("runs/*/spool.pid"):  # of a failed test: its queue would go on
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(left.read_text()), signal.SIGKILL)


def submit(lab: Lab, *more: str) -> RunDir:
    return RunDir(Path(lab.json("submit", "job.yaml", "-c", "workstation.yaml", *more)["directory"]))


@pytest.mark.e2e
def test_every_verb_works_with_a_scheduler_of_another_package(spool: Lab) -> None:
    on = ("job.yaml", "-c", "workstation.yaml")
    assert "ok (spool)" in spool.cli("clusters", "validate", "workstation.yaml").stdout
    assert "nothing is rented on workstation" in spool.cli("submit", *on, "--budget", "1").stderr
    assert "spool of workstation takes no sweeps" in spool.cli("submit", *on, "--sweep", "seed=1,2").stderr
    gpt = ("--set", "task=launcher.tasks.gpt:PydocGPT")
    assert spool.json("plan", *on, *gpt)["cluster"] == "workstation"
    assert "local_ranks" in spool.cli("render", *on).stdout
    shown = spool.cli("submit", "job.yaml", "-c", "workstation.yaml", "--dry-run")
    assert "flock" in shown.stdout and "-n1" in shown.stdout and not (spool.folder / "runs").exists()
    first = submit(spool, "--set", "steps=2")
    wait_for((first.path / "held").exists, "the first step")
    second = submit(spool)
    third = submit(spool)
    assert spool.status(second)["state"] == "submitted", "the first one has the queue"
    assert [one["state"] for one in spool.json("list")] == ["submitted", "submitted", "running"]
    assert spool.cli("cancel", third.id).returncode == 0
    assert spool.status(third)["reason"] == "taken out of the queue"
    (first.path / "go").touch()
    assert spool.wait(first)["state"] == "succeeded"
    assert "step 2/2" in spool.cli("logs", first.id).stdout
    assert "no running ranks" in spool.cli("snapshot", first.id).stderr
    assert spool.cli("report", first.id).returncode == 0 and (first.path / "report.html").exists()
    assert spool.cli("export", first.id, "--to", "weights").returncode == 0
    assert list((spool.folder / "weights").glob("*.safetensors"))

    wait_for((second.path / "held").exists, "the second run")
    assert spool.cli("cancel", second.id).returncode == 0
    (second.path / "go").touch()
    cancelled = spool.wait(second)
    assert cancelled["state"] == "cancelled"
    again = spool.json("resume", second.id, "--set", f"steps={cancelled['checkpoint_step'] + 1}")
    assert again["handle"] == f"spool:{second.id}"
    assert spool.wait(second)["state"] == "succeeded"
    assert "taken out of the queue" in spool.cli("why", third.id).stdout
    assert second.id in spool.cli("compare", first.id, second.id).stdout
    followed = spool.cli("run", *on, *gpt, "--set", "steps=1")
    assert followed.returncode == 0 and "step 1/1" in followed.stdout
    deleted = spool.json("clean", first.id, third.id, "--yes")["deleted"]
    assert sorted(deleted) == sorted([first.id, third.id]) and not first.path.exists()


@pytest.mark.slow
@pytest.mark.e2e
def test_its_runs_are_shown_when_a_supervisor_or_the_package_itself_is_gone(spool: Lab) -> None:
    run = submit(spool)
    wait_for((run.path / "held").exists, "the first step")
    os.kill(json.loads(run.supervisor_lock.read_text())["pid"], signal.SIGKILL)
    assert spool.wait(run, "lost")["reason"] == "the supervisor was killed"
    del spool.environ["PYTHONPATH"]
    [shown] = spool.json("list")
    assert shown["state"] == "damaged" and "there is no scheduler 'spool' here" in shown["reason"]
    said = spool.cli("submit", "job.yaml", "-c", "workstation.yaml")
    assert said.returncode == 2 and "workstation.yaml:2" in said.stderr and "spool" in said.stderr


def test_a_wrong_section_is_an_error_with_its_line(spool: Lab) -> None:
    profile = spool.folder / "workstation.yaml"
    profile.write_text(profile.read_text().replace("nice: 1}", "nice: low, cpus: 2}"))
    said = spool.cli("clusters", "validate", "workstation.yaml")
    assert said.returncode == 2
    assert re.search(r"workstation.yaml:3:? .*spool.nice", said.stdout)
    assert "spool.cpus: unknown field; known here: folder, nice" in said.stdout
    profile.write_text("name: workstation\nscheduler: spool\n")
    said = spool.cli("submit", "job.yaml", "-c", "workstation.yaml")
    assert said.returncode == 2
    assert "workstation.yaml:2: scheduler: spool needs a `spool:` section with folder" in said.stderr
