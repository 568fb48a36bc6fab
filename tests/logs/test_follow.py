"""A follow beside real writers."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher.logs.show import LogOptions, show_logs
from launcher.rundir.layout import RunDir
from tests.lab import wait_for
from tests.logs.helpers import write_rank


class Screen(io.RawIOBase):
    """The lines that were shown."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []

    def write(self, data: bytes) -> int:
        self.shown += [line for line in data.split(b"\n")[:-1] if not line.startswith(b"----")]
        return len(data)

    def flush(self) -> None:
        pass


def follow(run: RunDir, done: threading.Event) -> tuple[threading.Thread, Screen]:
    screen = Screen()
    arguments = (run, LogOptions(follow=True), screen, False, done.is_set)
    thread = threading.Thread(target=show_logs, args=arguments, daemon=True)
    thread.start()
    return thread, screen


def test_a_line_is_shown_before_the_program_writes_another(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    log, seen = run.attempt(0).rank_log(0, 0, "out"), tmp_path / "seen"
    os.mkfifo(seen)
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; from pathlib import Path\n"
            "from launcher.logs.capture import RankCapture\n"
            "log, seen = map(Path, sys.argv[1:])\n"
            "loop = 'import sys\\nseen = open(sys.argv[1])\\n'\n"
            "loop += 'for i in range(9): print(i, flush=True); seen.readline()'\n"
            "child = subprocess.Popen([sys.executable, '-c', loop, seen], stdout=-1, stderr=-1, bufsize=0)\n"
            "RankCapture(log, log.with_suffix('.err')).pump(child)",
            str(log),
            str(seen),
        ]
    )
    done = threading.Event()
    thread, screen = follow(run, done)
    with open(seen, "w") as answers:
        for shown in range(9):
            wait_for(lambda count=shown: len(screen.shown) == count + 1, f"line {shown} is shown")
            print(file=answers, flush=True)
    assert writer.wait(240) == 0
    done.set()
    thread.join(240)
    assert not thread.is_alive()
    assert [line.rpartition(b" ")[2] for line in screen.shown] == [b"%d" % i for i in range(9)]


def test_a_follow_ends_when_nobody_reads_it_any_more(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    write_rank(run, 0, [(0.0, b"the only line")])
    read, write = os.pipe()
    asked = []

    def done() -> bool:
        asked.append(True)
        if len(asked) == 3:
            os.close(read)  # as `grep -m1` does after the line
        return False

    with os.fdopen(write, "wb", buffering=0) as pipe, pytest.raises(BrokenPipeError):
        show_logs(run, LogOptions(follow=True), pipe, False, done)
    assert len(asked) == 3


def test_a_file_that_is_emptied_to_free_space_is_followed_from_its_new_beginning(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    path = write_rank(run, 0, [(at, b"before %d" % at) for at in range(9)])
    done = threading.Event()
    thread, screen = follow(run, done)
    wait_for(lambda: len(screen.shown) == 9, "all lines are shown")
    os.truncate(path, 0)
    write_rank(run, 0, [(10, b"after")])
    wait_for(lambda: len(screen.shown) == 10, "the first line of the truncated file")
    done.set()
    thread.join(240)
    assert screen.shown[-1].endswith(b"| after")


def test_a_file_that_is_moved_away_and_made_anew_is_followed_from_its_beginning(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    path = write_rank(run, 0, [(at, b"before %d" % at) for at in range(2)])
    done = threading.Event()
    thread, screen = follow(run, done)
    wait_for(lambda: len(screen.shown) == 2, "all lines are shown")
    later = write_rank(run, 1, [(10 + at, b"after %d" % at) for at in range(9)])
    later.replace(path)  # longer than what was read
    wait_for(lambda: len(screen.shown) >= 11, "the lines of the new file")
    done.set()
    thread.join(240)
    assert [line.rpartition(b"| ")[2] for line in screen.shown[2:] if b"r000" in line] == [
        b"after %d" % at for at in range(9)
    ]


def test_new_ranks_and_attempts_appear_and_the_end_is_drained(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    done = threading.Event()
    thread, screen = follow(run, done)
    for attempt in range(4):
        for rank in range(2):
            write_rank(run, rank, [(attempt * 10 + rank, b"attempt %d" % attempt)], attempt, stream="err")
            time.sleep(0.2)
    write_rank(run, 0, [(99, b"late")], attempt=3, stream="err")
    done.set()
    thread.join(240)
    assert not thread.is_alive()
    assert [line[16:] for line in screen.shown] == [
        b"%d:r%03d ! attempt %d" % (attempt, rank, attempt) for attempt in range(4) for rank in range(2)
    ] + [b"3:r000 ! late"]


def test_an_idle_follow_of_1024_ranks_is_cheap_and_keeps_no_file_open(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for rank in range(1024):
        write_rank(run, rank, [(rank, b"hello")])
    done = threading.Event()
    before = len(os.listdir("/proc/self/fd"))
    thread, screen = follow(run, done)
    while len(screen.shown) < 1024:
        time.sleep(0.05)
    start, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    most = 0
    while time.monotonic() < start + 2:
        most = max(most, len(os.listdir("/proc/self/fd")))
        time.sleep(0.05)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime - used
    done.set()
    thread.join(240)
    assert most <= before + 4
    assert used < 0.6, "less than a third of one core for 1,024 ranks"
