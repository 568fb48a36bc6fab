"""What an earlier start of a run has left on a host."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.login import LocalLogin
from launcher.schedulers.over_ssh.remote_store import RemoteStore
from launcher.schedulers.ssh import on_host
from launcher.schedulers.ssh.scheduler import SshHosts

TAR_ENDS = "tar: Exiting with failure status due to previous errors"
HOLD = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(); sys.stdin.read()"


@pytest.mark.parametrize("record", ["", '{"pid": 1', "[]", '{"pid": null}'])
def test_a_supervisor_that_is_not_named_by_its_lock_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    monkeypatch.setattr(on_host, "END_SECONDS", 0.0)
    lock = tmp_path / "supervisor.lock"
    lock.write_text(record)
    with open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(on_host.RefusedError, match=r"supervisor\.lock does not name its process: end it"):
            on_host.stop({"run_dir": str(tmp_path), "rank": 0})
    assert on_host.stop({"run_dir": str(tmp_path), "rank": 0}) == {}, "nobody holds it any more"


@contextlib.contextmanager
def holding(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock, which names it."""
    lock.touch()
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        lock.write_text(json.dumps({"pid": holder.pid}))
        yield holder


def test_a_supervisor_that_is_named_by_its_lock_is_ended(tmp_path: Path) -> None:
    with holding(tmp_path / "supervisor.lock") as holder:
        assert on_host.stop({"run_dir": str(tmp_path), "rank": 0}) == {}
        assert holder.wait(240) == -9


def test_a_host_whose_disk_is_full_is_asked_to_stop_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = RunDir(tmp_path / "there" / "r"), RunDir(tmp_path / "here" / "r")
    hosts = SshHosts(("tensor01",), str(there.path.parent))
    store = RemoteStore(LocalLogin(), str(there.path.parent), {})
    monkeypatch.setattr(hosts, "_store_of", lambda _: store)
    store.local_root = here.path.parent
    for run in (there, here):
        run.path.mkdir(parents=True)
        replace_json(run.run, {"id": "r", "job": {}, "cluster": {"paths": {"python": sys.executable}}})
        replace_json(run.state, {"state": "running"})
    hosts.fetch(here)
    with holding(there.supervisor_lock) as holder:
        full = "tar: r/cancel: Cannot write: No space left on device"
        (tar := tmp_path / "tar").write_text(f"#!/bin/sh\necho {full!r} >&2\necho {TAR_ENDS!r} >&2\nexit 2\n")
        tar.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        hosts.cancel(here)
        assert holder.wait(240) != 0 and not here.cancel.exists()
    with holding(there.supervisor_lock):
        there.supervisor_lock.write_text("")
        with pytest.raises(SchedulerError, match=re.escape(full)):
            hosts.cancel(here)
