"""Daemons that a rank starts: whatever they do to hide, they end with the attempt."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import handover_folder
from launcher.supervise.process import processes_of
from tests.lab import Lab, supervisor_pid, wait_for

pytestmark = pytest.mark.e2e

HIDES = """
import os, pathlib, subprocess, sys, time
pids = pathlib.Path(sys.argv[1])
# A session of its own, no environment, another folder, nothing open, and its parent ends at once.
hide = "cd / && setsid env -i sh -c 'echo $$ >$0; trap \\"\\" TERM HUP INT; while :; do sleep 1; done' $0"
subprocess.run(["sh", "-c", f"({hide} >/dev/null 2>&1 </dev/null &)", str(pids / os.environ["RANK"])])
while len(list(pids.iterdir())) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
while len(sys.argv) > 2:
    time.sleep(0.1)
"""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """The folder in which each daemon leaves its process id."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    for pid in _living(folder):  # of a failed test
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _living(folder: Path) -> list[int]:
    pids = [int(file.read_text()) for file in folder.iterdir() if file.read_text().strip()]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _submit(lab: Lab, ranks: int, *arguments: str) -> RunDir:
    lab.script(HIDES)
    resources = {"gpus_per_node": 0, "ranks_per_node": ranks}
    return lab.submit(str(lab.job(command=["python", "train.py", *arguments], resources=resources)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_daemon_that_hides_ends_with_the_attempt(lab: Lab, pids: Path, ranks: int) -> None:
    run = _submit(lab, ranks, str(pids))
    assert lab.wait(run)["state"] == "succeeded"
    assert len(list(pids.iterdir())) == ranks and _living(pids) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_daemon_that_hides_ends_when_the_supervisor_is_killed(lab: Lab, pids: Path, ranks: int) -> None:
    run = _submit(lab, ranks, str(pids), "stay")
    wait_for(lambda: len(_living(pids)) == ranks, "daemon of each rank")
    os.kill(supervisor_pid(run), signal.SIGKILL)
    wait_for(lambda: not _living(pids), "end of the daemons")
    assert lab.wait(run, "lost")["state"] == "lost"


ENDS_EARLY = """
import os, pathlib, subprocess, time
def zombies():
    found = 0
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            found += state == "Z" and int(parent) == os.getppid()
    return found
for _ in range(50):
    subprocess.run(["sh", "-c", "(sleep 0.01 &)"])
deadline = time.monotonic() + 60
while (left := zombies()) and time.monotonic() < deadline:
    time.sleep(0.05)
print("zombies left:", left)
"""


@pytest.mark.slow
def test_orphans_that_end_while_the_rank_goes_on_leave_no_zombies(lab: Lab) -> None:
    lab.script(ENDS_EARLY)
    run = lab.submit(str(lab.job(command="python train.py")))
    assert lab.wait(run)["state"] == "succeeded"
    for rank in (0, 1):
        assert "zombies left: 0" in run.attempt(0).rank_log(0, rank, "out").read_text()


def test_shared_memory_of_runs_whose_processes_were_all_killed_goes_with_the_next_run_or_clean(
    lab: Lab,
) -> None:
    def killed() -> tuple[RunDir, Path]:
        run = lab.submit(str(lab.job(command=["sleep", "60"])))
        shared = handover_folder(run, 0).parent
        wait_for(lambda: len(list(shared.glob("errors-00/*"))) == 2, "both ranks")
        pids = [supervisor_pid(run), *processes_of(run.path)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that none sees the end of another
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes_of(run.path), "end of all processes")
        assert lab.wait(run, "lost")["state"] == "lost" and shared.is_dir()
        return run, shared

    (first, of_first), (second, of_second) = killed(), killed()
    assert not of_first.exists(), "the second run removes it"
    assert lab.cli("clean", first.id, second.id, "--yes").returncode == 0
    assert not of_second.exists()
