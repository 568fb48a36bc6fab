"""Samples fetched by worker processes, with real ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import default_collate

from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_OOM
from launcher.train.data.loading import Loader, SampleError, WorkerError
from tests.train.runs import error, job, losses, prepare, recipe, start

TASK = "tests.train.augmented:Augmented"


def noisy(workers: int, **fields: Any) -> Any:
    train = {"workers": workers, "eval_every": 3, "checkpoint_every": 3}
    # 40 samples in batches of 8: the second epoch begins in step 6.
    return job(task=TASK, steps=8, train=train, **{"args": {"dropout": 0.2}, **fields})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = prepare(tmp_path_factory.mktemp("undisturbed") / "run", noisy(0))
    ended = start(run, recipe("ddp"))
    assert ended.codes == {0: 0, 1: 0}, ended.output
    return run


@pytest.mark.slow
def test_workers_change_nothing_and_a_resumed_run_with_them_goes_on_bit_for_bit(
    undisturbed: RunDir, tmp_path: Path
) -> None:
    with_workers = prepare(tmp_path / "workers", noisy(2))
    assert start(with_workers, recipe("ddp")).codes == {0: 0, 1: 0}
    assert losses(with_workers) == losses(undisturbed)

    for step in (6, 8):
        shutil.rmtree(with_workers.checkpoints / f"step-0000000{step}", ignore_errors=True)
    shutil.copytree(undisturbed.checkpoints / "step-00000006", with_workers.checkpoints / "step-00000006")
    assert start(with_workers, recipe("ddp")).codes == {0: 0, 1: 0}
    resumed = losses(with_workers, attempt=1)
    assert resumed == {step: loss for step, loss in losses(undisturbed).items() if step > 6}


@pytest.mark.slow
def test_augmentation_does_not_depend_on_the_split_of_the_batch(undisturbed: RunDir, tmp_path: Path) -> None:
    plain = {"args": {}}  # dropout does depend on it
    whole, split = (prepare(tmp_path / name, noisy(0, **plain)) for name in ("whole", "split"))
    assert start(whole, recipe("none", micro=8), ranks=1).codes == {0: 0}
    assert start(split, recipe("ddp", micro=2, accumulation=2)).codes == {0: 0, 1: 0}
    assert losses(split) == pytest.approx(losses(whole), rel=1e-5)


def test_a_killed_worker_is_the_hosts_memory_and_none_is_left_behind(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", noisy(2, args={"fault": "killed", "call": 9}))
    ended = start(run, recipe("none", micro=8), ranks=1, fresh=True)  # /proc shows what it was started with
    assert ended.codes == {0: EXIT_OOM}, ended.output
    assert error(run.attempt(0), 0)["failure"] == "host-oom"
    assert not [process for process in psutil.process_iter(["environ"]) if _of(process, run)]


@pytest.mark.slow
def test_what_a_worker_raises_is_the_users_error_with_the_workers_trace(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", noisy(1, args={"fault": "raise", "call": 9}))
    assert start(run, recipe("none", micro=8), ranks=1).codes == {0: 1}
    failure = error(run.attempt(0), 0)
    assert (failure["failure"], failure["phase"]) == ("user-error", "data")
    assert "no such file" in failure["exception"] and "__getitem__" in failure["exception"]


class Faulty:
    """Numbers; whoever fetches number 5 meets with the fault."""

    def __init__(self, fault: Callable[[], object]) -> None:
        self.fault = fault

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.fault()
        return index


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (lambda: os._exit(7), SampleError, r'samples of data\("train"\) ended with exit code 7: code of'),
        (lambda: os._exit(0), SampleError, "ended with exit code 0: code of"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            WorkerError,
            r"\(pid \d+\) is killed by signal: Killed",
        ),
        (
            lambda: sys.exit(3),
            SampleError,
            r'sample 5 of data\("train"\) raised SystemExit: 3\n(.*\n)*.*__getitem__',
        ),
    ],
    ids=["os._exit(7)", "os._exit(0)", "killed", "sys.exit(3)"],
)
def test_the_end_of_a_worker_shows_where_its_samples_are_missing(
    fault: Callable[[], object], kind: type[Exception], words: str
) -> None:
    """torch's handler of SIGCHLD raised an exception anywhere, such as in the optimizer."""
    handler = signal.getsignal(signal.SIGCHLD)
    loader = Loader("train", Faulty(fault), default_collate, seed=0, workers=1)
    batches = loader.start([[(index, index)] for index in range(8)])
    assert signal.getsignal(signal.SIGCHLD) == handler
    assert next(batches).tolist() == [0]
    with pytest.raises(kind, match=words):
        list(batches)


@pytest.mark.slow
def test_a_worker_that_crashes_prints_where_its_code_was(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", noisy(1, args={"fault": "crash", "call": 9}))
    ended = start(run, recipe("none", micro=8), ranks=1, fresh=True)
    failure = error(run.attempt(0), 0)
    assert (failure["failure"], failure["phase"]) == (None, "data")
    assert "killed by signal: Segmentation fault" in failure["exception"]
    assert "Fatal Python error: Segmentation fault" in ended.output and "in __getitem__" in ended.output


def _of(process: psutil.Process, run: RunDir) -> bool:
    return (process.info["environ"] or {}).get("LAUNCHER_RUN_DIR") == str(run.path)


def test_a_worker_that_begins_after_the_end_of_its_rank_ends() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("orphan.py"))], timeout=60, check=False
    )
    assert done.returncode == 1, "77: it has gone on"
