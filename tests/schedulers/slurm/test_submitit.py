"""What submitit's own tests expect of a Slurm executor (submitit/slurm/test_slurm.py, 1.5.4), asked of ours.

Used: test_slurm_job_mocked, test_slurm_job_array_mocked (both ways), test_slurm_error_mocked,
test_mocked_missing_state, test_watcher, test_read_info_array (through our records),
test_get_id_from_submission_command(_raise), test_update_parameters_error, test_slurm_weird_dir,
test_slurm_job_no_stderr.

Not used, because the thing is not:
- its signal handler and requeue (test_requeuing_*, test_checkpoint_and_exit): the batch script does that, and
  tests/render/test_sbatch.py and tests/slurm/ ask the same of it;
- its script (test_make_sbatch_*, test_slurm_through_auto*): tests/golden/;
- its environment on the node (test_job_environment, test_slurm_node_list*, test_slurm_missing_node_list,
  test_slurm_invalid_parse): inherited unchanged;
- the names of AutoExecutor (test_update_parameters, test_get_default_parameters, test_name,
  test_read_job_id).

There Python's subprocess is mocked; here Slurm's commands are small programs in PATH.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from submitit.core import utils

from launcher.rundir.files import replace_json, replace_text
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import UnclearError
from launcher.schedulers.slurm.executor import ArrayExecutor, RunExecutor, RunJob, Supervise
from launcher.schedulers.slurm.jobs import job_id
from tests.schedulers.slurm.fake_queue import Queue, ended


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    RunJob.watcher.clear()
    RunJob.watcher._registered.clear()
    return made


def a_run(folder: Path, name: str = "run-1") -> RunDir:
    run = RunDir(folder / name)
    run.scripts.mkdir(parents=True)
    replace_text(run.scripts / "job.sbatch", "#!/bin/bash\n#SBATCH --comment=run-1\necho ours\n")
    replace_json(run.state, {"state": "submitted"})
    return run


def submitted(run: RunDir) -> RunJob:
    job = RunExecutor(run).submit(Supervise(str(run.path)))
    assert isinstance(job, RunJob)
    return job


def test_a_job_has_its_id_its_state_its_logs_and_the_verdict_as_its_result(
    tmp_path: Path, queue: Queue
) -> None:
    run = a_run(tmp_path)
    queue.has(_12="RUNNING")
    job = submitted(run)
    assert (job.job_id, job.state, job.stdout(), job.done()) == ("12", "RUNNING", None, False)
    assert job.submission().function == Supervise(str(run.path))
    assert job.paths.submission_file.read_text() == (run.scripts / "job.sbatch").read_text()
    with pytest.raises(utils.UncompletedJobError):
        job._get_outcome_and_result()
    (run.path / "slurm-12.out").write_text("hop")
    ended(run, "succeeded")
    assert job.done()
    assert job.result().ok
    queue.has(_12="COMPLETED")
    assert job.state == "COMPLETED"
    assert job.exception() is None
    assert job.stdout() == "hop"


def test_a_function_is_refused_and_told_where_to_go(tmp_path: Path, queue: Queue) -> None:
    with pytest.raises(TypeError, match=r"built-in function pow>, with launcher\.slurm\.Executor"):
        RunExecutor(a_run(tmp_path)).submit(pow, 1, 2)
    assert not queue.sent.exists()


@pytest.mark.parametrize("batch", [False, True])
def test_an_array_is_one_submission_and_each_task_is_a_run(tmp_path: Path, queue: Queue, batch: bool) -> None:
    runs = [a_run(tmp_path, f"run-{n}") for n in range(3)]
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "array.sbatch").write_text("#!/bin/bash\n#SBATCH --array=0-2\n")
    executor = ArrayExecutor(folder, "sweep", "array.sbatch")
    payloads = [Supervise(str(run.path)) for run in runs]
    if batch:
        with executor.batch():
            jobs = [executor.submit(payload) for payload in payloads]
    else:
        jobs = executor.submit_array(payloads)
    assert [job.job_id for job in jobs] == ["12_0", "12_1", "12_2"]
    assert queue.sent.read_text().count("--parsable") == 1
    assert "--array=0-2" in jobs[0].paths.submission_file.read_text()
    queue.has(_12_0="COMPLETED", _12_1="RUNNING", _12_2="PENDING")
    assert [job.state for job in jobs] == ["COMPLETED", "RUNNING", "PENDING"]
    ended(runs[0], "succeeded")
    ended(runs[2], "gpu-oom")
    assert [job.done() for job in jobs] == [True, False, True]
    assert jobs[0].result().ok
    with pytest.raises(utils.FailedJobError, match="gpu-oom"):
        jobs[2].result()


def test_a_failed_run_raises_and_gives_its_exception(tmp_path: Path, queue: Queue) -> None:
    run = a_run(tmp_path)
    job = submitted(run)
    ended(run, "user-error", "rank 1 raised an exception")
    with pytest.raises(utils.FailedJobError, match="rank 1 raised"):
        job.result()
    assert isinstance(job.exception(), utils.FailedJobError)


def test_a_run_that_ended_without_a_verdict_is_uncompleted(tmp_path: Path, queue: Queue) -> None:
    job = submitted(a_run(tmp_path))
    queue.has(_12="FAILED")
    job.watcher._last_status_check = float("-inf")
    assert job.done(force_check=True)
    with pytest.raises(utils.UncompletedJobError, match="has no verdict"):
        job.result()


def test_a_run_that_goes_back_into_the_queue_is_not_done(tmp_path: Path, queue: Queue) -> None:
    run = a_run(tmp_path)
    queue.has(_12="RUNNING")
    job = submitted(run)
    ended(run, "time-limit")
    replace_json(run.state, {"state": "interrupted", "failure": "time-limit", "requeue": True})
    assert not job.done()


def test_a_job_that_slurm_does_not_know_has_an_unknown_state(tmp_path: Path, queue: Queue) -> None:
    assert RunJob(tmp_path, "12").state == "UNKNOWN"


def test_the_watcher_asks_once_for_all_and_no_more_for_those_that_have_ended(
    tmp_path: Path, queue: Queue
) -> None:
    watcher = RunJob.watcher
    queue.has(_12="RUNNING")
    calls = watcher.num_calls
    assert watcher.get_state("11") == "UNKNOWN"
    queue.has(_11="FAILED", _12="RUNNING")
    assert watcher.get_state("12", mode="force") == "RUNNING"
    assert watcher._registered == {"11", "12"}
    assert watcher._finished == {"11"}
    assert watcher.num_calls == calls + 2


@pytest.mark.parametrize("out", ["5610208\n", "5610208;cluster\n", "a site's greeting\n5610208\n"])
def test_the_job_id_is_read_from_what_sbatch_prints(out: str) -> None:
    assert job_id(out) == "5610208"


def test_an_answer_without_a_job_id_may_mean_a_job(tmp_path: Path) -> None:
    with pytest.raises(UnclearError):
        job_id("blublu")


def test_parameters_are_the_profiles_matter(tmp_path: Path, queue: Queue) -> None:
    with pytest.raises(ValueError, match="blublu"):
        RunExecutor(a_run(tmp_path)).update_parameters(blublu=12)


@pytest.mark.parametrize("name", ["with space", "quote's", "semi;colon", "dollar$HOME", "(paren)"])
def test_a_folder_may_have_any_name(tmp_path: Path, queue: Queue, name: str) -> None:
    run = a_run(tmp_path, name)
    assert submitted(run).job_id == "12"
    assert Path(queue.sent.read_text().splitlines()[-2]).read_text().endswith("echo ours\n")


def test_a_job_survives_pickling(tmp_path: Path, queue: Queue) -> None:
    run = a_run(tmp_path)
    job = pickle.loads(pickle.dumps(submitted(run)))
    ended(run, "succeeded")
    assert job.result().ok
