"""`launcher snapshot` and a running job."""

from __future__ import annotations

import json

import pytest

from tests.lab import Lab, events, metrics, wait_for

pytestmark = pytest.mark.e2e

# Its steps leave the processor to the commands that the test runs beside them.
PACED = """
import time
from launcher.tasks.gpt import PydocGPT

class Paced(PydocGPT):
    def loss(self, model, batch):
        time.sleep(0.1)
        return super().loss(model, batch)
"""


def test_a_running_job_writes_the_snapshot_that_was_asked_for_and_goes_on(lab: Lab) -> None:
    lab.script(PACED, "paced.py")
    job = lab.job(
        task="paced:Paced",
        args={"layers": 1, "dim": 32, "heads": 2, "context": 32},
        steps=100000,
        train={"checkpoint_every": None},
        env={"TRAIN_MEMORY_BUDGET": "64MiB"},
    )
    run = lab.submit(str(job))
    wait_for(lambda: len(metrics(run)) > 3, "some steps")

    done = lab.cli("snapshot", run.id, "--rank", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(run.attempt(0).memory(1).parent)
    [event] = wait_for(lambda: events(run, "memory-snapshot"), "snapshot")
    path = run.attempt(0).snapshot(1, event["step"], "json")
    content = json.loads(path.read_text())
    assert {"forward", "backward", "init"} & {storage["phase"] for storage in content["storages"]}
    assert sum(storage["bytes"] for storage in content["storages"]) == content["bytes"] < 64 * 2**20

    steps = metrics(run)[-1]["step"]
    wait_for(lambda: metrics(run)[-1]["step"] > steps + 3, "more steps")
    assert metrics(run)[-1]["tokens_per_second"] > 0
    assert not list(path.parent.glob("rank-000-step-*")), "rank 0 was not asked"
    lab.cli("cancel", run.id)
    lab.wait(run)
    refused = lab.cli("snapshot", run.id)
    assert refused.returncode == 4 and "no running ranks to ask; its state is cancelled" in refused.stderr


@pytest.mark.slow
def test_where_nothing_counts_memory_a_snapshot_is_refused_with_the_reason(lab: Lab) -> None:
    job = lab.job(
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 1, "dim": 32, "heads": 2, "context": 32},
        steps=100000,
        train={"checkpoint_every": None},
    )
    run = lab.submit(str(job))
    wait_for(lambda: run.attempt(0).memory(1).exists(), "a step")
    for arguments in ((), ("--rank", "1", "--json")):
        done = lab.cli("snapshot", run.id, *arguments)
        assert done.returncode == 4 and "TRAIN_MEMORY_BUDGET" in done.stderr, done.stdout + done.stderr
        assert not done.stdout and not run.attempt(0).snapshot_request.exists()
    lab.cli("cancel", run.id)
    lab.wait(run)
