from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from launcher.rundir.layout import RunDir
from launcher.spec.variables import RESERVED_PREFIX
from launcher.supervise.process import end_processes, processes_of
from tests.lab import Lab, supervisor_pid

settings.register_profile("launcher", deadline=None)  # a busy machine is no failure
settings.load_profile("launcher")

os.environ.pop("COLUMNS", None)  # output has the width that a test asks for, whatever terminal it runs in
for name in [name for name in os.environ if name.startswith(RESERVED_PREFIX)]:
    del os.environ[name]  # such as LAUNCHER_RUNS, with which you keep your runs elsewhere

LONGEST = ["slurm", "train", "images", "e2e", "schedulers", "doctor", "memory", "cli", "api", "supervise"]
"Folders whose files take longest, that first."
WAITING = {"runpod", "ssh", "sandbox"}
"Folders whose tests wait most of the time."


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers inherit it
        folder = tempfile.TemporaryDirectory(prefix="launcher-tests-", ignore_cleanup_errors=True)
        os.environ["SELF_TESTS"] = folder.name
        os.environ["XDG_STATE_HOME"] = f"{folder.name}/state"  # runs of tests are not among your own
        config.add_cleanup(folder.cleanup)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each worker imports another part of the tests first: the assertions of a file are rewritten by one
    worker, and the others find its bytecode."""
    if (worker := getattr(session.config, "workerinput", None)) is None:
        return
    first, workers = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    root = Path(__file__).parent
    for file in sorted(root.rglob("test_*.py"))[first::workers]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # its collection says what is wrong
            importlib.import_module(".".join(file.relative_to(root.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: when several workers share the files, the last one decides when all is done. Files
    that wait are spread among those that compute, so that cores are busy while some workers wait."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def place(file: Path) -> int:
        return LONGEST.index(file.parent.name) if file.parent.name in LONGEST else len(LONGEST)

    kinds: tuple[list[Path], list[Path]] = [], []
    for file in sorted(files, key=place):
        kinds[file.parent.name in WAITING].append(file)
    share = {file: (number + 0.5) / len(kind) for kind in kinds for number, file in enumerate(kind)}
    items[:] = [item for file in sorted(files, key=share.__getitem__) for item in files[file]]


def pytest_collection_finish() -> None:
    """Modules and tests stay alive. Each later collection of garbage takes 0.3 s less without them."""
    gc.collect()
    gc.freeze()


class OneSlurmCluster(LoadFileScheduling):
    """A file stays on one worker, and all files that share a Slurm cluster do."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/slurm" if nodeid.startswith("tests/slurm/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return OneSlurmCluster(config, log) if config.getvalue("dist") == "loadfile" else None


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A shell without job control starts what runs in the background deaf to Ctrl-C, and nohup starts it deaf to
# SIGHUP. Children inherit both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _heard() -> tuple[object, ...]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()), *(signal.getsignal(one) for one in SIGNALS)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A test that leaves a signal blocked or ignored makes every process deaf that a later test starts."""
    before = _heard()
    yield
    assert _heard() == before


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    for path in (tmp_path / "runs").glob("*"):  # a failed test leaves no process behind
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.kill(supervisor_pid(RunDir(path)), 9)
        end_processes(lambda path=path: processes_of(path), grace=0)
