"""Errors of a task's code, as `launcher plan` tells them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from pathlib import Path

import pytest

import launcher
from launcher.api.model_sources import UserCodeError, running_user_code


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("bad heads", "ValueError: bad heads ("),
        ("invalid config:\n    4097 is odd\n    more", "ValueError: invalid config: 4097 is odd ("),
        ("sizes differ\nmore", "ValueError: sizes differ ("),
    ],
)
def test_an_error_is_told_with_its_reason_and_place(tmp_path: Path, message: str, told: str) -> None:
    with pytest.raises(UserCodeError) as caught, running_user_code("task m:T", tmp_path):
        raise ValueError(message)
    assert str(caught.value).startswith(f"task m:T: {told}")


class OwnExit(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(0), "SystemExit: 0 ("),
        (SystemExit(), "SystemExit ("),
        (OwnExit("early"), "OwnExit: early ("),
        (AssertionError(), "AssertionError ("),
    ],
)
def test_code_that_leaves_is_no_success(error: BaseException, told: str, tmp_path: Path) -> None:
    """`launcher plan` ended with exit code 0, without a plan."""
    with pytest.raises(UserCodeError) as caught, running_user_code("task m:T", tmp_path):
        raise error
    assert str(caught.value).startswith(f"task m:T: {told}")


def test_code_that_ends_the_process_is_no_success_either(tmp_path: Path) -> None:
    """`launcher submit` ended with exit code 0, and no run had begun."""
    with (
        pytest.raises(UserCodeError, match="task m:T: SystemExit: 0"),
        running_user_code("task m:T", tmp_path),
    ):
        os._exit(0)
    leave = os._exit
    with running_user_code("task m:T", tmp_path):
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
        child.start()
        child.join()
    assert child.exitcode == 7 and os._exit is leave


def test_ctrl_c_still_ends_a_plan(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), running_user_code("task m:T", tmp_path):
        raise KeyboardInterrupt


def test_code_of_two_threads_never_runs_at_the_same_time(tmp_path: Path) -> None:
    """The folder, os._exit() and stdout of the program were another thread's afterwards."""
    before = Path.cwd(), os._exit, sys.stdout
    both = threading.Barrier(2)
    met = []

    def run(folder: Path) -> None:
        folder.mkdir()
        with running_user_code("task m:T", folder):
            try:
                both.wait(0.5)
            except threading.BrokenBarrierError:
                met.append(Path.cwd() != folder)
            else:
                met.append(True)

    threads = [threading.Thread(target=run, args=(tmp_path / name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [False, False]
    assert (Path.cwd(), os._exit, sys.stdout) == before


def test_a_process_group_of_the_program_is_no_fault_of_the_task() -> None:
    dist = pytest.importorskip("torch.distributed")
    job = {
        "name": "x",
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 1, "dim": 48, "heads": 2, "context": 16},
        "batch": {"global": 2},
        "steps": 1,
        "resources": {"gpus_per_node": 1},
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(launcher.UsageError, match="this process has a process group"):
            launcher.plan(job, cluster="slurm-a100")
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()
