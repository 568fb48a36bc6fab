"""The queue of a sweep: its runs are processes, and what they hold is free when they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.supervise.gpus import GpusError, _flock
from launcher.supervise.sweep_queue import QueueError, SweepQueue

# Takes its turn at each line of stdin, as far as it can.
RUN = """
import sys
from pathlib import Path
from launcher.supervise.sweep_queue import SweepQueue
queue = SweepQueue(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
for line in sys.stdin:
    if line == "take\\n":
        has = "later" if not queue.is_first() else "place" if queue.take_place() else "full"
    else:
        has = queue.leave_place() or "left"
    if has == "place":
        queue.leave_line()
    print(has, flush=True)
"""


class Waiting:
    """A run that waits, in a process of its own."""

    def __init__(self, file: Path, task: int, places: int) -> None:
        command = [sys.executable, "-c", RUN, str(file), str(task), str(places)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self, line: str = "take") -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[int], Waiting]]:
    """Starts a run of a sweep with one place."""
    begun: list[Waiting] = []

    def start(task: int) -> Waiting:
        begun.append(Waiting(tmp_path / "sweeps" / "s" / "queue", task, 1))
        return begun[-1]

    yield start
    for one in begun:
        one.kill()


def test_waiting_runs_have_their_turn_in_order_and_a_killed_one_is_passed_over(
    run: Callable[[int], Waiting],
) -> None:
    runs = [run(task) for task in range(4)]
    assert [one.says() for one in runs] == ["place", "full", "later", "later"]
    runs[0].kill()
    assert [runs[task].says() for task in (3, 2)] == ["later", "later"]
    runs[1].kill()
    assert [runs[task].says() for task in (3, 2)] == ["later", "place"]
    assert runs[3].says() == "full"


def test_a_place_that_is_left_is_free_for_another_run(run: Callable[[int], Waiting]) -> None:
    first, second = run(0), run(1)
    assert (first.says(), second.says()) == ("place", "full")
    assert first.says("leave") == "left"
    assert second.says() == "place"


def test_a_queue_that_cannot_be_written_or_locked_says_where(tmp_path: Path) -> None:
    (tmp_path / "sweeps").touch()
    with pytest.raises(QueueError, match=f"the queue of the sweep, {tmp_path}/sweeps/s/queue: Not a dir"):
        SweepQueue(tmp_path / "sweeps" / "s" / "queue", 0, 1)
    queue = SweepQueue(tmp_path / "queue", 0, 1)
    queue.close()
    with pytest.raises(QueueError, match=f"{tmp_path}/queue cannot be locked: Bad file descriptor"):
        queue.is_first()


def test_a_folder_of_gpu_locks_without_locks_says_so(tmp_path: Path) -> None:
    file = os.open(tmp_path, os.O_PATH)  # cannot be locked
    with pytest.raises(
        GpusError, match="which holds the locks of GPUs, cannot be locked: Bad file descriptor"
    ):
        _flock(file, 2)
    os.close(file)
