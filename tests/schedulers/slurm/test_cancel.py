"""A request to stop that does not reach the login node, over real ssh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.runs.files import replace_json
from launcher.runs.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.slurm.remote import RemoteSlurm
from tests.schedulers.sshd import Sshd


def test_a_request_that_could_not_be_sent_leaves_what_was_sent_before(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (scancel := sshd.folder / "scancel").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n')
    scancel.chmod(0o755)
    sshd.login_shell(f'PATH={sshd.folder}:$PATH; exec sh -c "$SSH_ORIGINAL_COMMAND"')
    slurm = RemoteSlurm(sshd.host, str(tmp_path / "runs"))
    run = RunDir(slurm.copies.mirror.here / "demo-1")
    run.path.mkdir(parents=True)
    replace_json(run.submitted, {"id": run.id, "cluster": {"name": "c", "scheduler": "slurm"}})
    replace_json(run.state, {"state": "running"})
    run.event("submitted", handle="slurm:c:7")
    slurm.known.append(run)
    slurm.fetch(run)  # it is on both sides
    there = RunDir(tmp_path / "runs" / run.id)

    sshd.stop()
    with pytest.raises(SchedulerError, match="demo-1 was not asked to stop and goes on: cancel it again"):
        slurm.cancel("slurm:c:7")
    sshd.start()
    slurm.fetch(run)
    assert not run.cancel.exists() and not there.cancel.exists()

    slurm.cancel("slurm:c:7")
    first = there.cancel.read_bytes(), os.stat(there.cancel).st_ino
    sshd.stop()
    with pytest.raises(SchedulerError, match="was not asked to stop"):
        slurm.cancel("slurm:c:7")
    sshd.start()
    slurm.fetch(run)
    assert (there.cancel.read_bytes(), os.stat(there.cancel).st_ino) == first, "no second request"
    slurm.cancel("slurm:c:7")
    assert there.cancel.read_bytes() != first[0]
    assert (tmp_path / "asked").read_text() == "--state=PENDING 7\n7\n"
