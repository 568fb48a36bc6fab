"""Each fault of a host is made for real, and found and named by the quick check of a node."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor.checks import CHECKS
from launcher.doctor.examine import examine
from launcher.doctor.interpret import values_of
from launcher.doctor.measure.folders import measure_folder
from launcher.doctor.order_files import Orders
from launcher.doctor.values import Expected, Finding, Measured
from launcher.rundir.layout import RunDir
from launcher.spec.verdict import EXIT_SICK
from tests.doctor.faulty_host import in_mounts, stub

PYTHON = [sys.executable, "-m", "launcher.doctor"]


class Node:
    """A run directory whose job is an ordinary one, and the check of this host in it."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "run")
        self.run.attempt(0).path.mkdir(parents=True)
        self.run.submitted.write_text(json.dumps({"id": "run", "job": {"command": ["true"]}, "cluster": {}}))
        layout = {"nodes": 1, "ranks_per_node": 1, "gpus_per_node": 0}
        (self.run.path / "plan.json").write_text(json.dumps({"layout": layout}))
        self.environ = {**os.environ, "LAUNCHER_RUN_DIR": str(self.run.path), "LAUNCHER_ATTEMPT": "0"}
        self.environ |= {"TMPDIR": str(folder)}
        self.output = ""

    def check(self, command: Sequence[str] = PYTHON, **environ: str) -> int:
        done = subprocess.run(command, env={**self.environ, **environ}, capture_output=True, text=True)
        self.output = done.stderr
        return done.returncode

    @property
    def values(self) -> list[Measured]:
        return values_of(Orders(self.run.attempt(0).path / "doctor", 0, 1).history())

    @property
    def findings(self) -> dict[str, Finding]:
        return {one.check: one for one in examine(self.values, Expected()) if one.verdict != "good"}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_every_measured_value_is_a_row_of_the_table_and_nothing_is_left_behind(node: Node) -> None:
    code = node.check()
    assert code == EXIT_SICK * any(one.verdict == "broken" for one in node.findings.values()), node.output
    checks = [value.check for value in node.values]
    assert set(checks) <= set(CHECKS)
    assert {"memory", "shm", "torch", "flock", "write", "clock"} <= set(checks)
    assert not [value for value in node.values if value.error]
    assert not list(node.run.path.parent.rglob(".doctor*"))


def tiny_shm(node: Node) -> int:
    """A `/dev/shm` of 1 MiB (tmpfs)."""
    return node.check(in_mounts("mount -t tmpfs -o size=1m tmpfs /dev/shm", PYTHON))


def little_locked_memory(node: Node) -> int:
    """64 KiB of locked memory (`ulimit -l`)."""
    return node.check(["bash", "-c", 'ulimit -l 64; exec "$@"', "-", *PYTHON])


def few_open_files(node: Node) -> int:
    """256 open files (`ulimit -n`)."""
    return node.check(["bash", "-c", 'ulimit -n 256; exec "$@"', "-", *PYTHON])


def full_scratch(node: Node) -> int:
    """A full disk (tmpfs)."""
    folder = node.run.path.parent / "scratch"
    folder.mkdir()
    fill = f"mount -t tmpfs -o size=4m tmpfs {folder}; cp /dev/zero {folder}/fill 2>/dev/null || true"
    return node.check(in_mounts(fill, PYTHON), TMPDIR=str(folder))


def no_inodes(node: Node) -> int:
    """A file system without free inodes (tmpfs)."""
    folder = node.run.path.parent / "scratch"
    folder.mkdir()
    fill = f"mount -t tmpfs -o size=64m,nr_inodes=40 tmpfs {folder}"
    return node.check(in_mounts(fill, PYTHON), TMPDIR=str(folder))


def read_only_scratch(node: Node) -> int:
    """A read-only scratch folder (mount)."""
    folder = node.run.path.parent / "scratch"
    folder.mkdir()
    return node.check(
        in_mounts(f"mount -t tmpfs tmpfs {folder}; mount -o remount,ro {folder}", PYTHON), TMPDIR=str(folder)
    )


def no_file_locks(node: Node) -> int:
    """A file system without flock (ENOLCK, by a preloaded library)."""
    return node.check(LD_PRELOAD=str(stub("flock_stub", node.run.path.parent)))


def wrong_clock(node: Node) -> int:
    """A clock that is 30 s ahead (by a preloaded library)."""
    return node.check(LD_PRELOAD=str(stub("clock_stub", node.run.path.parent)))


def no_utf8(node: Node) -> int:
    """An ASCII locale without Python's UTF-8 mode (`LC_ALL=POSIX PYTHONUTF8=0`)."""
    return node.check(LC_ALL="POSIX", PYTHONUTF8="0")


NODE_FAULTS = [
    (tiny_shm, "shm", "broken", "1 MiB"),
    (little_locked_memory, "memlock", "poor", "64 KiB"),
    (few_open_files, "nofile", "broken", "256"),
    (full_scratch, "space", "broken", "0 B"),
    (no_inodes, "inodes", "broken", "3"),
    (read_only_scratch, "write", "broken", "Read-only file system"),
    (no_file_locks, "flock", "poor", "No locks available"),
    (wrong_clock, "clock", "poor", "+30.0"),
    (no_utf8, "encoding", "poor", "ANSI_X3.4-1968"),
]


@pytest.mark.parametrize(
    ("fault", "check", "verdict", "words"),
    NODE_FAULTS,
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_fault_is_found_and_named(
    node: Node, fault: Callable[[Node], int], check: str, verdict: str, words: str
) -> None:
    code = fault(node)
    found = node.findings[check]
    assert found.verdict == verdict
    assert words in f"{found.measured} {found.cause}" and found.cure
    assert found.title in node.output
    assert code == EXIT_SICK * any(one.verdict == "broken" for one in node.findings.values())


def test_file_locks_are_tried_as_nfs_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flock(2): over NFS, a file must be open for writing to get an exclusive lock. Linux says EBADF."""
    flock = fcntl.flock

    def flock_over_nfs(file: Any, operation: int) -> None:
        access = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if access == (os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_over_nfs)
    [found] = [one for one in measure_folder(0, "run folder", tmp_path, 1, print) if one.check == "flock"]
    assert (found.value, found.error) == ("excludes", "")


def test_a_command_that_needs_no_torch_runs_without(node: Node) -> None:
    """A Python without torch, for a job with `command:` and for one with `task:`."""
    bare = node.run.path.parent / "bare"
    bare.mkdir()
    hidden = (
        "import importlib.metadata as m\nfound = m.version\ndef version(name):\n"
        "    if name == 'torch': raise m.PackageNotFoundError(name)\n"
        "    return found(name)\nm.version = version\n"
    )
    (bare / "sitecustomize.py").write_text(hidden)
    node.check(PYTHONPATH=str(bare))
    assert node.findings["torch"].verdict == "broken" and "torch" not in node.output
    about = json.loads(node.run.submitted.read_text())
    node.run.submitted.write_text(json.dumps({**about, "job": {"task": "a:B"}}))
    assert node.check(PYTHONPATH=str(bare)) == EXIT_SICK and "broken torch" in node.output
