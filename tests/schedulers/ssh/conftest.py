from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rundir.layout import RunDir
from launcher.supervise.process import end_processes, processes_of
from tests.lab import supervisor_pid
from tests.schedulers.ssh.hosts import Laptop


@contextlib.contextmanager
def on_two_hosts(folder: Path) -> Iterator[Laptop]:
    """What a failed test leaves behind ends with it."""
    laptop = Laptop(folder)
    try:
        yield laptop
    finally:
        for path in laptop.runs.glob("[!.]*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                os.kill(supervisor_pid(RunDir(path)), 9)
            end_processes(lambda path=path: processes_of(path), grace=0)
        laptop.close()


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    with on_two_hosts(tmp_path) as laptop:
        yield laptop
