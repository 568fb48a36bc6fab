"""Submissions that are killed while RunPod's answer is on its way: nobody here knows their pods yet."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.cli.main import app
from launcher.rundir.find import runs_in
from launcher.rundir.layout import RunDir
from launcher.schedulers import registry
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.lookup import scheduler_of
from tests.lab import wait_for
from tests.schedulers.runpod.runs import Lab

SIGNALS = {"aaa": signal.SIGKILL, "bbb": signal.SIGHUP, "ccc": signal.SIGTERM}


def killed(lab: Lab) -> dict[str, RunDir]:
    """A run for each signal, by its job's name."""
    lab.sandbox.faults(slow_answer={"p": 1, "value": 15, "on": "POST /(v2/pods|graphql)$"})
    profile, found = lab.profile(), dict[str, RunDir]()
    for name, number in SIGNALS.items():
        job = {"name": name, "workdir": "code", "command": ["true"], "batch": {"global": 8}}
        (lab.folder / f"{name}.yaml").write_text(json.dumps({**job, "resources": {"gpus_per_node": 0}}))
        command = (sys.executable, "-m", "launcher", "submit", f"{name}.yaml", "-c", str(profile))
        process = subprocess.Popen(
            command, cwd=lab.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(lambda n=name: sent(lab, n), f"{name} asks for its pod")
        process.send_signal(number)
        assert process.wait(240) != 0
        (found[name],) = [run for run in runs_in() if run.id.startswith(name)]
    lab.sandbox.faults()
    return found


def sent(lab: Lab, name: str) -> bool:
    return any(f"launcher-{name}" in pod["name"] for pod in lab.sandbox.state()["live"])


def said(*verb: str) -> tuple[int, str]:
    """As a process of its own: what others have looked up is not known to it."""
    registry.opened.clear()
    done = CliRunner().invoke(app, verb)
    words = str(done.exception) if isinstance(done.exception, SchedulerError) else done.output
    return done.exit_code, words


@pytest.mark.slow
def test_each_is_known_by_itself_whatever_killed_its_submission(lab: Lab) -> None:
    runs = killed(lab)
    schedulers = {name: scheduler_of(run) for name, run in runs.items()}
    handles = {name: scheduler.handle(runs[name]) for name, scheduler in schedulers.items()}
    assert handles == {name: f"runpod:box:run/{run.id}" for name, run in runs.items()}
    for name in ("ccc", "aaa", "bbb"):  # as `launcher logs -f` asks, again and again
        assert {schedulers[name].status(runs[name]).run_id for _ in range(3)} == {runs[name].id}
        lab.until(runs[name], "running")
    assert said("cancel", runs["aaa"].id)[0] == 0
    lab.until(runs["aaa"], "cancelled")
    code, words = said("resume", runs["ccc"].id)
    assert code != 0 and f"{runs['ccc'].id} is still running" in words
    assert {name: lab.bill(run) for name, run in runs.items()} == {"aaa": 1, "bbb": 1, "ccc": 1}
