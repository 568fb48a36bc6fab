"""The doctor neither hangs with what it examines nor leaves anything behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from launcher.doctor.examine import examine
from launcher.doctor.leftovers import Leftovers
from launcher.doctor.measure import folders as folders_module
from launcher.doctor.measure import group as group_module
from launcher.doctor.measure.folders import measure_folders
from launcher.doctor.measure.group import Group
from launcher.doctor.measure.in_child import in_child
from launcher.doctor.options import Options
from launcher.doctor.order_files import END, TESTS, Orders
from launcher.doctor.rank_test import RankReport, RankTest
from launcher.doctor.results import results_of
from launcher.doctor.values import Expected, Measured
from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.spec.verdict import Verdict
from launcher.supervise.process import processes_of
from tests.lab import PATIENCE, Lab, wait_for

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
        if inside in Path(f"/proc/self/fd/{file}").readlink().parents:
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
    hangs = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with Group() as group:
        group._process = hangs
        with pytest.raises(OSError, match="hangs"):
            group.run([RankTest("connect", {}, (0,), "127.0.0.1", 61000, 0.1)], {0: 0})
        assert group._process is None and hangs.wait() == -signal.SIGKILL


@pytest.mark.e2e
@pytest.mark.slow
def test_an_examination_that_was_killed_is_not_complete(lab: Lab) -> None:
    """Every process of the run is killed while ranks are tested. Nothing is blamed, or called good."""
    command = [sys.executable, "-m", "launcher", "doctor"]
    process = subprocess.Popen(
        command, cwd=lab.folder, env=lab.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    [order] = wait_for(lambda: list(lab.folder.glob("**/doctor/order-002.json")), "order to connect")
    run = RunDir(order.parents[3])
    for pid in (json.loads(run.supervisor_lock.read_text())["pid"], *processes_of(run.path)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    page, said = process.communicate(timeout=PATIENCE)
    words = " ".join(page.split())
    assert process.returncode == 1 and f"{run.id}, which was lost" in words, said
    assert "ranks that connected" not in words and "a node has died" not in said
    assert "Anything that is not on this page was not examined" in words
    assert f"launcher resume {run.id}" in words
    told = lab.json("doctor", "--show", run.id, "--compare", code=1)
    assert (told["complete"], told["unfinished"]) == (False, "was lost") and told["verdict"] != "good"
    # A busy machine may be slow, which is poor.
    found = {one["verdict"] for one in told["findings"] if one["part"] in ("run", "collectives")}
    assert "good" in found and "broken" not in found


ALL_GOOD = {"values": [asdict(Measured("shm", 0, 2**34))]}
FAILED = {"do": TESTS, "check": "joined", "tests": [asdict(RankTest("connect", {}, (0,), "h", 61000, 1.0))]}


def examined(folder: Path, failure: str | None, *, over: bool) -> RunDir:
    """A doctor's run on one node that ended as `failure` while ranks were tested, or after that."""
    run = RunDir(folder)
    run.path.mkdir()
    about = {"id": run.id, "job": {"command": Options().command}, "cluster": {"name": "local"}}
    run.run.write_text(json.dumps(about))
    run.plan.write_text(json.dumps({"layout": {"nodes": 1, "ranks_per_node": 1}}))
    orders = Orders(run.attempt(0).path / "doctor", 0, 1)
    orders.answer(0, ALL_GOOD)
    orders.give(1, FAILED)
    orders.answer(1, {"told": [[asdict(RankReport(0, True, error="ended by SIGKILL"))]]})
    if over:
        orders.give(2, {"do": END})
    if failure is not None:
        verdict = Verdict(failure=failure, reason="why it ended")
        replace_json(run.attempt(0).verdict, {**verdict.model_dump(), "then": ""})
    return run


@pytest.mark.parametrize("content", ["", "garbage", "[]", '{"values": 3}', '{"values": [{"bogus": 1}]}'])
@pytest.mark.parametrize("name", ["node-00-000.json", "node-00-001.json", "order-001.json", "order-002.json"])
def test_a_file_that_cannot_be_read_is_no_finding(tmp_path: Path, name: str, content: str) -> None:
    run = examined(tmp_path / "doctor-1", "succeeded", over=True)
    file = run.attempt(0).path / "doctor" / name
    file.write_text(content)
    found = results_of(run)
    assert found is not None and found.unfinished == f"has files that cannot be read: {file}"
    checks = {one.check for one in found.findings}
    assert "ranks" not in checks and found.cut_off
    assert ("answers" in checks) is (name != "node-00-000.json")
    assert ("joined" in checks) is (name == "node-00-000.json"), "the test whose files are whole is shown"


@pytest.mark.parametrize(
    ("failure", "over", "unfinished", "broken"),
    [
        ("succeeded", True, "", {"joined", "ranks"}),
        ("succeeded", False, "ended too early: the doctor itself failed", set()),
        ("rendezvous-failed", True, "", {"joined", "ranks"}),
        ("time-limit", False, "ended too early: why it ended", set()),
        ("preempted", True, "ended too early: why it ended", {"joined"}),
        ("host-oom", False, "ended too early: why it ended", set()),
        ("node-failed", False, "ended too early: why it ended", set()),
        ("cancelled", False, "was cancelled", set()),
        (None, True, "was lost", {"joined"}),
    ],
)
def test_what_was_not_examined_has_no_verdict(
    tmp_path: Path, failure: str | None, over: bool, unfinished: str, broken: set[str]
) -> None:
    """The test of ranks was the last one, and failed. If it was cut off, its end is that of the run."""
    run = examined(tmp_path / "doctor-1", failure, over=over)
    found = results_of(run)
    assert found is not None and found.unfinished == unfinished
    assert {one.check for one in found.findings if one.verdict == "broken"} == broken
    assert found.verdict == ("broken" if broken else None) and found.cut_off is bool(unfinished)
    if failure is None:
        Orders(run.attempt(1).path / "doctor", 0, 1).answer(0, ALL_GOOD)
        resumed = results_of(run, ended=False)
        assert resumed is not None and "joined" not in {one.check for one in resumed.findings}


@pytest.mark.e2e
@pytest.mark.slow
def test_ctrl_c_cancels_the_examination(lab: Lab) -> None:
    scratch = lab.folder / "scratch"
    scratch.mkdir()
    environ = {**lab.environ, "TMPDIR": str(scratch)}
    command = [sys.executable, "-m", "launcher", "doctor"]
    process = subprocess.Popen(command, cwd=lab.folder, env=environ, stderr=subprocess.PIPE, text=True)
    model, *_ = wait_for(lambda: list(scratch.glob("launcher-doctor-*/*/run.json")), "tiny model")
    run = lab.newest()
    examining = processes_of(run.path) + processes_of(model.parent)
    for pid in examining:  # otherwise the examination may end before it is cancelled
        os.kill(pid, signal.SIGSTOP)
    so_far = lab.json("doctor", "--show", run.id, code=0)
    assert so_far["complete"] is False and so_far["verdict"] != "broken"
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any(f"cancelling {run.id}" in line for line in process.stderr)
    for pid in examining:
        os.kill(pid, signal.SIGCONT)
    assert process.wait(timeout=PATIENCE) == 130
    assert run.read_state().state == "cancelled"
    wait_for(lambda: not list(scratch.glob("launcher-doctor-*")), "scratch without the doctor's folders")
    assert not list(run.path.rglob(".doctor*"))
    shown = lab.cli("doctor", "--show", run.id)
    assert shown.returncode == 1 and "which was cancelled" in " ".join(shown.stdout.split())
