"""A request to stop that does not reach the login node, over real ssh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.over_ssh.remote_store import RemoteStore
from launcher.schedulers.over_ssh.ssh import SshLogin
from launcher.schedulers.slurm.scheduler import SlurmScheduler
from tests.schedulers.sshd import Sshd


def on_both_sides(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, scancel: str = ""
) -> tuple[SlurmScheduler, RunDir, RunDir]:
    """A run as it is known here, and on a login node where scancel writes down what it is asked for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (command := sshd.folder / "scancel").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n{scancel}')
    command.chmod(0o755)
    sshd.login_shell(f'PATH={sshd.folder}:$PATH; exec sh -c "$SSH_ORIGINAL_COMMAND"')
    store = RemoteStore(SshLogin(sshd.host), str(tmp_path / "runs"))
    slurm, run = SlurmScheduler(store), RunDir(store.local_root / "demo-1")
    run.path.mkdir(parents=True)
    replace_json(run.submitted, {"id": run.id, "cluster": {"name": "c", "scheduler": "slurm"}})
    replace_json(run.state, {"state": state})
    run.event("submitted", handle="slurm:c:7")
    slurm.fetch(run)
    return slurm, run, RunDir(tmp_path / "runs" / run.id)


def test_a_request_that_slurm_did_not_answer_is_taken_back_over_there_unless_the_run_has_begun(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    down = "echo no controller >&2; exit 1"
    slurm, run, there = on_both_sides(sshd, tmp_path, monkeypatch, "submitted", down)
    for _ in range(2):
        with pytest.raises(SchedulerError, match="no controller; demo-1 has not begun and was not cancelled"):
            slurm.cancel(run)
        assert not run.cancel.exists() and not there.cancel.exists()
    there.event("job", handle="slurm:c:7")
    slurm.cancel(run)
    assert "demo-1 has begun, and stops anyway" in capsys.readouterr().err
    assert there.cancel.exists()
    assert (tmp_path / "asked").read_text() == "--state=PENDING 7\n" * 3


def test_a_request_that_could_not_be_sent_leaves_what_was_sent_before(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, run, there = on_both_sides(sshd, tmp_path, monkeypatch, "running")
    sshd.stop()
    with pytest.raises(
        SchedulerError, match="demo-1 was not asked to stop and keeps running: cancel it again"
    ):
        slurm.cancel(run)
    sshd.start()
    slurm.fetch(run)
    assert not run.cancel.exists() and not there.cancel.exists()

    slurm.cancel(run)
    first = there.cancel.read_bytes(), os.stat(there.cancel).st_ino
    sshd.stop()
    with pytest.raises(SchedulerError, match="was not asked to stop"):
        slurm.cancel(run)
    sshd.start()
    slurm.fetch(run)
    assert (there.cancel.read_bytes(), os.stat(there.cancel).st_ino) == first, "no second request"
    slurm.cancel(run)
    assert there.cancel.read_bytes() != first[0]
    assert (tmp_path / "asked").read_text() == "--state=PENDING 7\n7\n"


def test_a_run_whose_disk_is_full_over_there_is_cancelled_by_slurm_alone(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, run, there = on_both_sides(sshd, tmp_path, monkeypatch, "running")
    there.event("job", handle="slurm:c:7")
    (tar := sshd.folder / "tar").write_text("#!/bin/sh\necho no space >&2; exit 2\n")
    tar.chmod(0o755)
    slurm.cancel(run)
    assert (tmp_path / "asked").read_text() == "7\n"
    assert not run.cancel.exists() and not there.cancel.exists()
