"""The commands of docs/runpod.md run, in order, on the sandbox."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from tests.docs.test_docs import ROOT, commands, files
from tests.sandbox.server import start

PAGE = ROOT / "docs" / "runpod.md"


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name, content in files(PAGE).items():
        (project / name).write_text(content)
    homes = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("STATE", "CACHE", "CONFIG")}
    shown = ""
    with start(tmp_path / "sandbox") as sandbox:
        env = {
            **os.environ,
            **homes,
            **sandbox.environ,
            "LAUNCHER_RUNPOD_PAUSE": "0.1",
            "OMP_NUM_THREADS": "1",
        }
        for line in commands(PAGE):
            command = [sys.executable, "-m", "launcher", *shlex.split(line)[1:]]
            done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            shown += done.stdout
        assert not sandbox.state()["live"]
    assert "rents CPU pod, SECURE, EU-RO-1, stock HIGH: 0.063 USD/h; at most 1 h, 0.06 USD" in shown
    assert "hello from a pod" in shown and "succeeded" in shown and "nothing of launcher's is rented" in shown
