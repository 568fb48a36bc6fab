"""What an earlier start of a run has left on a host."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.schedulers.ssh import on_host

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


def test_a_supervisor_that_is_named_by_its_lock_is_ended(tmp_path: Path) -> None:
    (lock := tmp_path / "supervisor.lock").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline()
    lock.write_text(json.dumps({"pid": holder.pid}))
    assert on_host.stop({"run_dir": str(tmp_path), "rank": 0}) == {}
    assert holder.wait(240) == -9
