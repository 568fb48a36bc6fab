"""A rank that the kernel kills where memory really runs out: in a memory cgroup with a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rundir.host_memory import cgroups
from launcher.spec.verdict import EXIT_CODES
from tests.e2e.test_causes import ONE_RANK, verdicts
from tests.lab import Lab, wait_for

GREEDY = """
pieces = []
while True:
    pieces.append(b"x" * 2**24)
"""
NEARLY = """
import os, pathlib, time
piece, used, most = 2**22, 0, int(os.environ["MOST"])
pieces = []
while used < most:
    pieces.append(b"x" * piece)
    used += piece
pathlib.Path("full").write_text(str(os.getpid()))
time.sleep(600)
"""


def limit_of(cgroup: Path) -> Path:
    return next(file for name in ("memory.max", "memory.limit_in_bytes") if (file := cgroup / name).exists())


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup of this machine with a limit, below the one that the tests are in."""
    made: list[Path] = []
    for parent in cgroups():
        one = parent / f"launcher-test-{uuid.uuid4().hex[:8]}"
        try:
            one.mkdir()
            made.append(one)
            limit_of(one).write_text(f"{512 * 2**20}\n")
            break
        except (OSError, StopIteration):
            continue
    else:
        for one in made:
            one.rmdir()
        pytest.skip("no memory cgroup can be made here: that needs root, and a controller that is delegated")
    yield made[-1]
    for one in made:
        wait_for(lambda one=one: not (one / "cgroup.procs").read_text().strip(), "the cgroup is empty")
        one.rmdir()


def within(cgroup: Path, lab: Lab, *arguments: str) -> subprocess.Popen[str]:
    """Start the CLI, and with it all that it starts, in the cgroup."""
    join = f'echo $$ > {cgroup}/cgroup.procs && exec {sys.executable} -m launcher "$@"'
    return subprocess.Popen(
        ["sh", "-c", join, "sh", *arguments],
        cwd=lab.folder, env=lab.environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.thorough  # the kernel counts the kill for the whole host: runs of other tests would see it
def test_a_rank_that_the_kernel_kills_ran_out_of_host_memory(lab: Lab, limited: Path) -> None:
    lab.script(GREEDY)
    job = lab.job(command="python train.py", resources=ONE_RANK, retries={"same": 0, "lower": 0})
    cli = within(limited, lab, "run", str(job))
    said, _ = cli.communicate(timeout=240)
    assert cli.returncode == EXIT_CODES["host-oom"], said
    (verdict,) = verdicts(lab.newest())
    assert (verdict["failure"], verdict["confidence"]) == ("host-oom", "likely")
    assert any(one.startswith("oom_kill +") for one in verdict["evidence"])


@pytest.mark.slow
def test_a_kill_by_nobody_known_near_the_limit_is_taken_for_the_kernel_s(lab: Lab, limited: Path) -> None:
    """What ended it counts nothing in the cgroup, such as a daemon that watches the pressure."""
    limit_of(limited).write_text(f"{2 * 2**30}\n")  # a tenth of it holds launcher itself
    lab.environ["MOST"] = str(int(2 * 2**30 * 0.9))
    lab.script(NEARLY)
    job = lab.job(command="python train.py", resources=ONE_RANK, retries={"same": 0, "lower": 0})
    cli = within(limited, lab, "run", str(job))
    full = lab.folder / "full"
    pid = int(wait_for(lambda: full.exists() and full.read_text(), "the rank has filled its memory"))
    os.kill(pid, signal.SIGKILL)
    said, _ = cli.communicate(timeout=240)
    assert cli.returncode == EXIT_CODES["host-oom"], said
    (verdict,) = verdicts(lab.newest())
    assert (verdict["failure"], verdict["confidence"]) == ("host-oom", "likely")
    assert "of 2 GiB host memory" in verdict["reason"]
