"""A plan's second process: it gives the same traces, and it never stands in the way."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a second process needs two cores")

TASK = """
import os
import torch
from tests.train.test_tracing import Blocks

class Says(Blocks):
    def example(self):
        with open("examples", "a") as file:
            print(os.getpid(), file=file)
        return super().example()

    def loss(self, model, batch):
        with open("processes", "a") as file:
            print(os.getpid(), len(batch), file=file)
        print("loss() of the task")
        if os.path.exists("raises") and len(batch) == 3:
            raise ValueError("three are too many")
        if os.path.exists("exits") and len(batch) == 3 and os.getpid() != FIRST:
            os._exit(0)
        return super().loss(model, batch)

FIRST = os.getpid()
"""
TRACE = """
import os
from pathlib import Path
from launcher.memory.states import Ranks
from launcher.planning.model_source import NoTraceError
from launcher.train.tracing.task_source import TaskSource
from tests.train.test_declared import job
from tests.train.test_tracing import recipe

def traced():
    source, ranks = TaskSource(job(task="says:Says"), Path.cwd()), Ranks(1, 1, on_gpu=True)
    return [source.trace(recipe(sharding="none", activations=kept), ranks) for kept in POLICIES]
"""


def run(script: str, folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=env, text=True, capture_output=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("ends", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_pair_of_samples_is_traced_by_two_processes_with_the_same_result(
    tmp_path: Path, ends: bool
) -> None:
    (tmp_path / "says.py").write_text(TASK)
    if ends:
        (tmp_path / "exits").touch()
    compare = f"""{TRACE}
POLICIES = ["keep", "checkpoint"][: 1 + {ends}]
together = traced()
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
assert traced() == together
"""
    printed = run(compare, tmp_path)
    rows = [line.split() for line in (tmp_path / "processes").read_text().splitlines()]
    first = rows[-1][0]  # with one core, everything runs in the first process
    here, there = ([size for process, size in rows if (process == first) is own] for own in (True, False))
    assert set(there) == {"3"}
    assert len(there) == (1 if ends else 2)  # a copy that ended is not asked again
    # Both use the sample that each source's first process has loaded.
    assert (tmp_path / "examples").read_text().split() == [first, first]
    # Only the first process prints.
    assert printed.count("loss() of the task") == len(here)


@pytest.mark.slow
def test_an_error_of_the_second_process_is_raised_by_the_first(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(TASK)
    (tmp_path / "raises").touch()
    caught = f"""{TRACE}
POLICIES = ["keep"]
try:
    traced()
except NoTraceError as error:
    print("refused:", error)
"""
    assert "three are too many" in run(caught, tmp_path).split("refused:")[1]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("sys.exit(3)", 3),
        ("os.close(write); del second; threading.Event().wait()", None),
    ],
)
def test_the_second_process_ends_with_the_first_in_the_middle_of_a_call(end: str, code: int | None) -> None:
    read, write = os.pipe()
    script = (
        "import os, signal, sys, threading\n"
        "from launcher.train.tracing.second_process import SecondProcess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a task may do\n"
        "def call(last):\n"
        "    return threading.Event().wait() if last else os.getpid()\n"
        "assert SecondProcess.is_possible()\n"
        "second = SecondProcess(call)\n"
        "other = second.start(False)()\n"
        "assert other not in (None, os.getpid()), other\n"
        "second.start(True)\n"
        f"write = {write}\n"
        "os.write(write, b'called')\n"
        f"{end}\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script], env=env, pass_fds=[write]) as first:
        os.close(write)
        try:
            with os.fdopen(read, "rb", buffering=0) as held:
                assert held.read(6) == b"called"
                assert select.select([held], [], [], 60)[0], "the second process has not ended"
                assert held.read() == b""  # no process holds the other end
            if code is not None:
                assert first.wait(60) == code
        finally:
            first.kill()


def test_a_result_that_was_not_awaited_is_not_that_of_the_next_call(tmp_path: Path) -> None:
    script = (
        "from launcher.train.tracing.second_process import SecondProcess\n"
        "second = SecondProcess(abs)\n"
        "assert second.start(-1)() == 1\n"
        "second.start(-2)\n"
        "assert second._connection.poll(60)\n"
        "assert second.start(-3)() is None\n"
    )
    run(script, tmp_path)


def test_a_call_that_never_returns_is_given_up(tmp_path: Path) -> None:
    script = (
        "import threading\n"
        "from launcher.train.tracing import second_process\n"
        "second_process.PATIENCE = 0.1\n"
        "second = second_process.SecondProcess(threading.Event().wait)\n"
        "assert second.start()() is None\n"
        "second._process.join()\n"
        "assert second.start()() is None\n"
    )
    run(script, tmp_path)
