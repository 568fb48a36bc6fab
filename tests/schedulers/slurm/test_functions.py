"""What submitit's own tests expect of an executor, asked of launcher.slurm.Executor (submitit 1.5.4).

From submitit/slurm/test_slurm.py: test_slurm_job_mocked, test_slurm_job_array_mocked (both ways),
test_slurm_error_mocked, test_update_parameters_error, test_slurm_weird_dir, test_slurm_job_no_stderr,
test_requeuing_*; from submitit/core: test_fake_executor_batch (as it is, with our executor in the place of
theirs), test_unpickling_watcher_registration, and test_async.py (test_result). Not used is what has no
counterpart: submitit's script, its environment on a node, which is inherited, and the limit of a pickle's
size. tests/slurm/test_functions.py does the rest on a real cluster.

Slurm's commands are small programs here, and a job is its call as launcher starts it on a node.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from submitit.core import core, test_core, utils

import launcher.slurm
from launcher.rundir.files import replace_json
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.slurm.executor import RunJob
from launcher.schedulers.slurm.functions import Executor, FunctionJob
from launcher.spec.errors import SpecError
from tests.schedulers.slurm.fake_queue import Queue, ended

SAID = "2026-11-23T09:01:22.455588Z "


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    profile = {"name": "lab", "scheduler": "slurm", "max_nodes": 4, "paths": {"runs": str(tmp_path / "runs")}}
    (tmp_path / "lab.yaml").write_text(json.dumps(profile))
    RunJob.watcher.clear()
    RunJob.watcher._registered.clear()
    return made


def executor(folder: Path) -> Executor:
    return Executor(folder / "calls", cluster="lab.yaml")


def call(job: FunctionJob, rank: int = 0, ranks: int = 1) -> subprocess.Popen[bytes]:
    """What a rank of the run starts."""
    command = job.run.read_about().job.command
    assert command is not None and command[3] == "launcher.schedulers.slurm.call"
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "SLURM_JOB_ID": job.job_id,
    }
    ours = {"LAUNCHER_RUN_ID": job.run.id, "LAUNCHER_RUN_DIR": str(job.run.path)}
    return subprocess.Popen([sys.executable, *command[1:]], env={**os.environ, **environ, **ours})


def run(job: FunctionJob, code: int = 0) -> None:
    assert call(job).wait() == code
    ended(job.run, "succeeded" if code == 0 else "user-error", "rank 0 raised an exception")


def log(job: FunctionJob, stream: str, *lines: str) -> None:
    file = job.run.attempt(0).rank_log(0, 0, stream)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{SAID}{line}\n" for line in lines))


def submitted(job: core.Job[Any]) -> FunctionJob:
    assert isinstance(job, FunctionJob)
    return job


def test_a_call_has_its_state_its_logs_and_what_it_returned(tmp_path: Path, queue: Queue) -> None:
    queue.has(_12="RUNNING")
    job = submitted(executor(tmp_path).submit(test_core.do_nothing, 1, 2, blublu=3))
    assert (job.job_id, job.state, job.stdout(), job.stderr(), job.done()) == (
        "12",
        "RUNNING",
        None,
        None,
        False,
    )
    assert job.submission().kwargs == {"blublu": 3}
    assert "#SBATCH --ntasks-per-node=1" in job.paths.submission_file.read_text(), "our own script"
    assert job.run.read_about().job.name == "do_nothing"
    run(job)
    log(job, "out", "hop", "la")
    log(job, "err", "This is the error log")
    assert job.done() and job.result() == 12 and job.exception() is None
    assert (job.stdout(), job.stderr()) == ("hop\nla\n", "This is the error log\n")


@pytest.mark.parametrize("batch", [False, True])
def test_calls_together_are_one_array(tmp_path: Path, queue: Queue, batch: bool) -> None:
    ours = executor(tmp_path)
    ours.update_parameters(array_parallelism=3)

    def add(x: int, y: int) -> int:
        return x + y

    if batch:
        with ours.batch():
            jobs: list[Any] = [ours.submit(add, x, x + 10) for x in range(5)]
    else:
        jobs = ours.map_array(add, range(5), range(10, 15))
    assert [job.job_id for job in jobs] == [f"12_{task}" for task in range(5)]
    (script,) = tmp_path.glob("runs/sweeps/*/array.sbatch")
    assert "#SBATCH --array=0-4%3\n" in script.read_text()
    for job in jobs[:2]:
        run(job)
    assert [job.result() for job in jobs[:2]] == [10, 12]


def test_what_a_function_raises_comes_back_with_its_traceback(tmp_path: Path, queue: Queue) -> None:
    job = submitted(executor(tmp_path).submit(test_core.do_nothing, error=True))
    run(job, code=1)
    with pytest.raises(utils.FailedJobError, match="ValueError: Too bad"):
        job.result()
    assert isinstance(job.exception(), utils.FailedJobError)


def test_a_run_without_a_result_says_why_and_what_was_printed_last(tmp_path: Path, queue: Queue) -> None:
    job = submitted(executor(tmp_path).submit(test_core.do_nothing))
    ended(job.run, "host-oom", "host memory ran out")
    log(job, "err", "job is running ...")
    with pytest.raises(utils.UncompletedJobError, match=r"(?s)host memory ran out.*job is running \.\.\."):
        job.result()


def test_what_an_earlier_attempt_raised_is_not_the_result(tmp_path: Path, queue: Queue) -> None:
    job = submitted(executor(tmp_path).submit(divmod, 1, 0))
    assert call(job).wait() == 1
    assert not job.done(), "launcher may try again, and does so by its own policy"
    replace_json(job.run.state, {"state": "interrupted", "requeue": True})
    assert not job.done()


def test_submitits_own_test_of_batches(tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(folder: Path) -> Executor:
        return executor(folder)

    monkeypatch.setattr(test_core, "FakeExecutor", ours)
    monkeypatch.setattr(test_core, "FakeJob", FunctionJob)
    test_core.test_fake_executor_batch(tmp_path)


def test_a_job_can_be_awaited(tmp_path: Path, queue: Queue) -> None:
    job = submitted(executor(tmp_path).submit(divmod, 7, 3))

    async def both() -> Any:
        result = asyncio.create_task(job.awaitable().result())
        await asyncio.to_thread(run, job)
        return await result

    assert asyncio.run(both()) == (2, 1)


def test_a_job_survives_pickling(tmp_path: Path, queue: Queue) -> None:
    job = pickle.loads(pickle.dumps(executor(tmp_path).submit(divmod, 7, 3)))
    run(job)
    assert job.result() == (2, 1)


@pytest.mark.parametrize("name", ["with space", "quote's", "semi;colon", "dollar$HOME", "(paren)"])
def test_a_folder_may_have_any_name(tmp_path: Path, queue: Queue, name: str) -> None:
    job = submitted(executor(tmp_path / name).submit(divmod, 7, 3))
    run(job)
    assert job.result() == (2, 1)


class Waits:
    def __call__(self, folder: Path) -> None:
        (folder / "waits").touch()
        signal.pause()


class WaitsAndLasts(Waits):
    def checkpoint(self, folder: Path) -> utils.DelayedSubmission:
        return utils.DelayedSubmission(divmod, 7, 3)


@pytest.mark.parametrize(
    ("function", "reason", "code"),
    [(Waits(), "time-limit", 1), (Waits(), "preempted", 85), (WaitsAndLasts(), "time-limit", 85)],
)
def test_a_request_to_stop(tmp_path: Path, queue: Queue, function: Waits, reason: str, code: int) -> None:
    """Is it a time limit? The supervisor knows. What cannot go on after one has failed."""
    job = submitted(executor(tmp_path).submit(function, tmp_path))
    lasts = isinstance(function, WaitsAndLasts)
    assert job.run.read_about().job.validated().retries.time_limits == (3 if lasts else 0)
    process = call(job)
    while not (tmp_path / "waits").exists():
        assert process.poll() is None
    job.run.event("stopping", reason=reason)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == code
    assert job.paths.result_pickle.exists() == (code == 1)
    if lasts:
        run(job)
        assert job.result() == (2, 1), "the call that the checkpoint gave"


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"blublu": 12}, ValueError, r"\['blublu'\]; there are account, additional_parameters"),
    ({"nodes": 0}, SpecError, "resources.nodes"),
    ({"mem_gb": "8"}, ValueError, "these parameters must be numbers: {'mem_gb': '8'}"),
    ({"timeout_min": "soon"}, SpecError, "is not a duration"),
    ({"slurm_additional_parameters": {"nice": [1]}}, SpecError, "slurm.extra.nice"),
]


@pytest.mark.parametrize(("given", "kind", "said"), WRONG)
def test_wrong_parameters_are_refused_and_change_nothing(
    tmp_path: Path, queue: Queue, given: dict[str, Any], kind: type[Exception], said: str
) -> None:
    ours = executor(tmp_path)
    ours.update_parameters(nodes=2)
    with pytest.raises(kind, match=said):
        ours.update_parameters(**given)
    assert ours.parameters == {"nodes": 2}


def test_parameters_of_submitit_become_options_of_our_script(tmp_path: Path, queue: Queue) -> None:
    ours = executor(tmp_path)
    ours.update_parameters(
        timeout_min=90, mem_gb=2, nodes=2, tasks_per_node=2, cpus_per_task=3, setup=["true"]
    )
    more = {"slurm_partition": "fast", "qos": "high", "mail_user": "me@here", "signal_delay_s": 77}
    ours.update_parameters(**more, slurm_additional_parameters={"nice": 5})
    job = submitted(ours.submit(divmod, 7, 3))
    assert job.num_tasks == 4
    script = job.paths.submission_file.read_text()
    for option in (
        *("nodes=2", "time=0-01:30:00", "partition=fast", "qos=high", "mail-user=me@here", "nice=5"),
        *("cpus-per-task=6", "mem=2048M", "signal=B:USR2@77"),
    ):
        assert f"#SBATCH --{option}\n" in script, script[:1500]


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"scheduler": "local"}, "this profile has local"),
        ({"scheduler": "slurm", "login": "me@far"}, "has a login node: run your program there"),
    ],
)
def test_a_profile_without_slurm_here_is_refused(
    tmp_path: Path, queue: Queue, profile: dict[str, Any], said: str
) -> None:
    (tmp_path / "lab.yaml").write_text(json.dumps({"name": "lab", **profile}))
    with pytest.raises((SchedulerError, SpecError), match=said):
        executor(tmp_path)


def test_a_refused_submission_leaves_nothing(tmp_path: Path, queue: Queue) -> None:
    (queue.bin / "sbatch").write_text("#!/bin/sh\necho no such partition >&2; exit 1\n")
    with pytest.raises(SchedulerError, match="no such partition"):
        executor(tmp_path).submit(divmod, 7, 3)
    assert not list(tmp_path.glob("calls/*")) and not list(tmp_path.glob("runs/*"))


def test_submitit_is_imported_when_it_is_used() -> None:
    code = "import launcher.slurm, sys; assert not {'submitit', 'pydantic', 'jinja2'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert launcher.slurm.Executor is Executor
    with pytest.raises(AttributeError, match="nothing"):
        _ = launcher.slurm.nothing
