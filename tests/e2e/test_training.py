"""The built-in entrypoint under supervision: every way to fail, and going on."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from launcher.spec.verdict import EXIT_CODES
from launcher.supervise.process import processes_of
from tests.lab import Lab, events, metrics, supervisor_pid, verdicts, wait_for

pytestmark = pytest.mark.e2e

STEPS = 12
CPU = {"gpus_per_node": 0, "ranks_per_node": 2}


def job(lab: Lab, **fields: Any):
    base = {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 1, "dim": 32, "heads": 2, "context": 32},
        "steps": STEPS,
        "train": {"checkpoint_every": 4, "lr": 1e-3},
        "recipe": {"sharding": "fsdp", "precision": "fp32"},
    }
    return lab.job(**{**base, **fields})


def final_losses(run) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}


@pytest.mark.slow
def test_a_run_succeeds_and_its_directory_is_readable(lab: Lab) -> None:
    done = lab.cli("run", str(job(lab)))
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    assert sorted(final_losses(run)) == list(range(1, STEPS + 1)) or sorted(final_losses(run)) == list(
        range(STEPS)
    )
    assert [event.kind for event in run.read_events()][:2] == ["submitted", "starting"]
    assert run.read_events()[-1].kind == "finished"
    status = lab.status(run)
    assert (status["state"], status["checkpoint_step"]) == ("succeeded", STEPS)


@pytest.mark.thorough
def test_memory_running_out_costs_an_attempt_and_no_optimizer_step(lab: Lab) -> None:
    undisturbed = lab.cli("run", str(job(lab)))
    assert undisturbed.returncode == 0, undisturbed.stderr
    reference = final_losses(lab.newest())
    model = {"layers": 1, "dim": 64, "heads": 2, "context": 64}
    # Without a probe the first micro-batch under FSDP cannot be repeated in the same processes.
    fields = {"env": {"TRAIN_MEMORY_BUDGET": "4MiB"}, "train": {"probe": "never", "checkpoint_every": 4}}
    done = lab.cli("run", str(job(lab, args=model, batch={"global": 32}, **fields)))
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    failures = [verdict["failure"] for verdict in verdicts(run)]
    assert failures[-1] == "succeeded" and set(failures[:-1]) == {"gpu-oom"} and len(failures) >= 2
    assert verdicts(run)[0]["phase"] in ("forward", "backward")
    assert sorted(final_losses(run)) == sorted(reference), "the same optimizer steps, each once in the end"
    for event in events(run, "attempt"):
        assert event["recipe"]["micro_batch_size"] * event["recipe"]["grad_accum"] == 16
    assert "gpu-oom" in lab.cli("why").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", ["rank", *(pytest.param(who, marks=pytest.mark.thorough) for who in ("worker", "starter"))]
)
def test_a_killed_process_costs_a_restart_from_the_last_checkpoint(lab: Lab, victim: str) -> None:
    train = {"checkpoint_every": 4, "lr": 1e-3, "workers": 2}
    run = lab.submit(str(job(lab, steps=60, retries={"same": 3}, train=train)))
    wait_for(lambda: events(run, "checkpoint"), "a checkpoint")
    os.kill(_pid(run, victim), signal.SIGKILL)
    assert lab.wait(run)["state"] == "succeeded", lab.all_logs(run)
    first = verdicts(run)[0]
    assert first["failure"] == "unknown" and "SIGKILL" in first["reason"]
    if victim == "worker":
        assert (first["rank"], first["node"]) == (1, 0)
    assert [verdict["failure"] for verdict in verdicts(run)][-1] == "succeeded"
    assert events(run, "resumed"), "the second attempt went on from a checkpoint"
    assert max(final_losses(run)) in (59, 60)


def _pid(run, victim: str) -> int:
    """Of a rank, of the worker that watches rank 1, or of the process that starts the workers."""
    (starter,) = psutil.Process(supervisor_pid(run)).children()
    worker = max(starter.children(), key=lambda child: child.pid)
    (rank,) = worker.children()
    return {"starter": starter, "worker": worker, "rank": rank}[victim].pid


FIRST_FAILS = """
import os
from launcher.tasks.gpt import PydocGPT

class FirstFails(PydocGPT):
    def loss(self, model, batch):
        if os.environ["RANK"] == "0" and os.path.exists(os.environ["LAUNCHER_RUN_DIR"] + "/metrics.jsonl"):
            raise LookupError("word 7")
        return super().loss(model, batch)
"""


@pytest.mark.slow
def test_a_first_rank_that_fails_and_takes_the_store_with_it_leaves_no_stack_of_the_store(lab: Lab) -> None:
    lab.script(FIRST_FAILS, "first.py")
    run = lab.submit(str(job(lab, task="first:FirstFails")))
    assert lab.wait(run)["failure"] == "user-error"
    (verdict,) = verdicts(run)
    assert (verdict["rank"], verdict["exception"]) == (0, "LookupError: word 7")
    printed = run.attempt(0).rank_log(0, 1, "err").read_text()
    assert "TCPStore" not in printed and "recvValue" not in printed, printed


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_orphan_a_true_state_and_a_run_that_goes_on(lab: Lab) -> None:
    run = lab.submit(str(job(lab, steps=60)))
    wait_for(lambda: events(run, "checkpoint"), "a checkpoint")
    os.kill(supervisor_pid(run), signal.SIGKILL)
    wait_for(lambda: not processes_of(run.path), "end of every rank")
    status = lab.status(run)
    assert status["state"] == "lost" and status["checkpoint_step"]
    assert "lost" in lab.cli("list").stdout and "resume" in lab.cli("why").stdout
    done = lab.cli("resume", run.id, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert events(run, "resumed")[0]["step"] >= status["checkpoint_step"]
    assert lab.status(run)["state"] == "succeeded"


@pytest.mark.slow  # test_everywhere.py cancels and resumes too
def test_cancel_writes_a_checkpoint_and_resume_goes_on_from_it(lab: Lab) -> None:
    run = lab.submit(str(job(lab, steps=100000, train={"checkpoint_every": None})))
    wait_for(lambda: len(metrics(run)) > 3, "some steps")
    answer = lab.json("cancel", run.id)
    assert "asked to write a checkpoint and stop" in answer["message"] and "cancelled" in answer
    status = lab.wait(run)
    assert status["state"] == "cancelled" and "a checkpoint was written" in status["reason"]
    assert status["checkpoint_step"] >= 3
    assert lab.cli("status", run.id).returncode == EXIT_CODES["cancelled"]
    assert lab.cli("resume", run.id).returncode == 0
    wait_for(lambda: events(run, "resumed"), "resumption")
    assert events(run, "resumed")[0]["step"] == status["checkpoint_step"]
    again = lab.cli("resume", run.id)
    assert again.returncode == 4 and "still running" in again.stderr
    assert lab.cli("clean", run.id, "--yes").returncode == 4, "a living run is not deleted"
    lab.cli("cancel", run.id)
    lab.wait(run)
    assert lab.cli("clean", run.id, "--yes").returncode == 0 and not run.path.exists()


@pytest.mark.slow
def test_a_time_limit_signal_writes_a_checkpoint(lab: Lab) -> None:
    run = lab.submit(str(job(lab, steps=100000, train={"checkpoint_every": None})))
    wait_for(lambda: len(metrics(run)) > 3, "some steps")
    os.kill(supervisor_pid(run), signal.SIGUSR2)
    status = lab.wait(run)
    assert (status["state"], status["failure"]) == ("interrupted", "time-limit")
    assert status["checkpoint_step"] and "a checkpoint was written" in status["reason"]


@pytest.mark.slow
def test_the_time_limit_of_a_local_job_is_kept(lab: Lab) -> None:
    limited = job(lab, steps=100000, train={"checkpoint_every": None}, resources={**CPU, "time": "20s"})
    done = lab.cli("run", str(limited))
    assert done.returncode == EXIT_CODES["time-limit"], done.stdout + done.stderr
    status = lab.status(lab.newest())
    assert status["checkpoint_step"] and "a checkpoint was written" in status["reason"]


@pytest.mark.slow
def test_an_exception_in_the_users_task_names_rank_phase_and_step(lab: Lab) -> None:
    lab.script(
        "import os, torch\n"
        "from launcher.train import Task\n"
        "class Broken(Task):\n"
        "    def model(self):\n"
        "        return torch.nn.Linear(4, 1)\n"
        "    def data(self, split):\n"
        "        return torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))\n"
        "    def loss(self, model, batch):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            raise ValueError('label 7 is out of range')\n"
        "        x, y = batch\n"
        "        return ((model(x) - y) ** 2).sum(), len(x)\n",
        "mytask.py",
    )
    broken = job(lab, task="mytask:Broken", args={}, recipe={"sharding": "ddp", "precision": "fp32"})
    done = lab.cli("run", str(broken))
    assert done.returncode == EXIT_CODES["user-error"], done.stdout + done.stderr
    verdict = verdicts(lab.newest())[0]
    assert (verdict["rank"], verdict["phase"], verdict["confidence"]) == (1, "forward", "certain")
    assert verdict["exception"] == "ValueError: label 7 is out of range"
