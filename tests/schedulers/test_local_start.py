"""Ctrl-C at any moment of a start."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.layout import RunDir
from launcher.schedulers.local import LocalScheduler


def test_ctrl_c_in_the_moment_in_which_the_process_begins_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, begun, popen = RunDir(tmp_path), [], subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        begun.append(popen(*args, **options))
        signal.raise_signal(signal.SIGINT)
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LocalScheduler()._start(run, ("sleep", "9"))
    assert begun[0].wait() == -signal.SIGKILL
    assert run.read_state().reason == "interrupted by Ctrl-C as it started"
