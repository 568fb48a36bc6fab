from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.runs.layout import RunDir
from launcher.supervise.process import end_processes, processes_of
from tests.lab import Lab, supervisor_pid

LONGEST = ["slurm", "train", "images", "e2e", "memory", "cli", "supervise"]
"Folders whose files take longest, that first."


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: when several workers share the files, the last one decides when all is done."""

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return LONGEST.index(folder) if folder in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    for path in (tmp_path / "runs").glob("*"):  # a failed test leaves no process behind
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.kill(supervisor_pid(RunDir(path)), 9)
        end_processes(lambda path=path: processes_of(path), grace=0)
