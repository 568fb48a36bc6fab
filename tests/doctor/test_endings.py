"""The doctor neither hangs with what it examines nor leaves anything behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.doctor.examine import examine
from launcher.doctor.leftovers import Leftovers
from launcher.doctor.measure import folders as folders_module
from launcher.doctor.measure import group as group_module
from launcher.doctor.measure.folders import measure_folders
from launcher.doctor.measure.group import Group
from launcher.doctor.measure.in_child import in_child
from launcher.doctor.rank_test import RankTest
from launcher.doctor.values import Expected, Measured
from tests.lab import Lab, wait_for

KILLED = """
import os, signal, sys
from launcher.doctor.leftovers import Leftovers
with Leftovers() as leftovers:
    for path in sys.argv[1:]:
        leftovers.add(path)
    os.killpg(0, signal.SIGKILL)
"""


def test_temporary_files_do_not_outlive_a_doctor_that_is_killed(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    (folder / "inside").mkdir(parents=True)
    command = [sys.executable, "-c", KILLED, str(file), str(folder), str(tmp_path / "gone")]
    done = subprocess.run(command, preexec_fn=lambda: os.setpgid(0, 0))
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: not list(tmp_path.iterdir()), "empty folder")


def test_a_folder_that_hangs_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fdatasync does not return in one of three folders. The others are measured, and nothing is left."""
    monkeypatch.setattr(folders_module, "ANSWER_SECONDS", 1.0)
    sync = os.fdatasync
    inside = tmp_path / "scratch"

    def hang(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().parent == inside:
            signal.pause()
        sync(file)

    monkeypatch.setattr(os, "fdatasync", hang)
    monkeypatch.setattr(os, "stat", _on_devices_of_their_own(os.stat))
    folders = {"run folder": tmp_path / "run", "scratch": inside, "nvme_dir": tmp_path / "nvme"}
    for folder in folders.values():
        folder.mkdir()
    with Leftovers() as leftovers:
        values = list(measure_folders(0, folders, 2**20, leftovers.add))
    assert [one.subject for one in values if one.check == "flock"] == ["run folder", "nvme_dir"]
    [hung] = [one for one in examine(values, Expected()) if one.check == "folder" and one.verdict == "broken"]
    assert hung.subjects == ("scratch",) and "does not answer within" in hung.cause and hung.cure
    assert not list(tmp_path.rglob(".doctor*"))


def _on_devices_of_their_own(stat: object) -> object:
    """os.stat, but every folder is on another device."""

    def with_device(path: object, **more: object) -> object:
        found = list(stat(path, **more))  # type: ignore[operator]
        found[2] = hash(str(path))
        return os.stat_result(found)

    return with_device


def test_a_driver_that_hangs_is_a_finding() -> None:
    def hang() -> list[Measured]:
        signal.pause()
        return []

    told = in_child(hang, 0.2)
    assert (told.values, told.error) == ([], "It does not answer within 0 s.")


def test_what_a_child_raises_is_told_with_what_it_measured_before() -> None:
    def fail() -> object:
        yield Measured("gpus", 0, 8)
        raise OSError(5, "Input/output error")

    told = in_child(fail, 30.0)  # type: ignore[arg-type]
    assert told.values == [Measured("gpus", 0, 8)] and told.error == "Input/output error"


def test_a_process_of_ranks_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import of torch hangs, for example on a network disk."""
    monkeypatch.setattr(group_module, "IMPORT_SECONDS", 0.2)
    began = time.monotonic()
    with Group() as group:
        group._process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with pytest.raises(OSError, match="hangs"):
            group.run([RankTest("connect", {}, (0,), "127.0.0.1", 61000, 0.1)], {0: 0})
        assert group._process is None
    assert time.monotonic() - began < 30


@pytest.mark.e2e
@pytest.mark.slow
def test_ctrl_c_cancels_the_examination(lab: Lab) -> None:
    scratch = lab.folder / "scratch"
    scratch.mkdir()
    environ = {**lab.environ, "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "launcher", "doctor"]
    process = subprocess.Popen(command, cwd=lab.folder, env=environ, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(scratch.glob("launcher-doctor-*/tiny/run.json")), "tiny model")
    so_far = lab.told("doctor", "--show", lab.newest().id, code=0)
    assert so_far["complete"] is False and so_far["verdict"] != "broken"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "cancelling doctor-" in said
    run = lab.newest()
    assert run.read_state().state == "cancelled"
    wait_for(lambda: not list(scratch.iterdir()), "empty scratch folder")
    assert not list(run.path.rglob(".doctor*"))
    shown = lab.cli("doctor", "--show", run.id)
    assert shown.returncode == 0 and "which was cancelled" in " ".join(shown.stdout.split())
