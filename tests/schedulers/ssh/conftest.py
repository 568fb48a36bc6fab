from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.runs.layout import RunDir
from launcher.supervise.process import end_processes, processes_of
from tests.lab import supervisor_pid
from tests.schedulers.ssh.hosts import Laptop


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    laptop = Laptop(tmp_path)
    yield laptop
    for path in laptop.runs.glob("[!.]*"):  # a failed test leaves no process behind
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.kill(supervisor_pid(RunDir(path)), 9)
        end_processes(lambda path=path: processes_of(path), grace=0)
    laptop.close()
