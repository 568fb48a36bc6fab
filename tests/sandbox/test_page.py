"""docs/runpod-sandbox.md: its commands run as they are written, and its table holds every fault."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("boto3")

from launcher.sandbox.faults import DEFAULTS, KINDS
from tests.docs.test_docs import files
from tests.lab import wait_for

PAGE = Path(__file__).parents[2] / "docs" / "runpod-sandbox.md"


@pytest.mark.slow
@pytest.mark.e2e
def test_the_commands_of_the_page_run_as_they_are_written(tmp_path: Path) -> None:
    home, bin_ = tmp_path / "home", tmp_path / "bin"
    for folder in (home, bin_):
        folder.mkdir()
    (bin_ / "launcher").write_text(f'#!/bin/sh\nexec {sys.executable} -m launcher "$@"\n')
    (bin_ / "launcher").chmod(0o755)
    for name, content in files(PAGE).items():
        (home / name).write_text(content)
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), flags=re.S)
    first, *rest = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    dropped = ("XDG_", "LAUNCHER_", "RUNPOD_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"HOME": str(home), "PATH": f"{bin_}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        ["bash", "-c", f"exec {first} --port 0 >{tmp_path}/said 2>&1"], cwd=home, env=env
    )
    try:
        wait_for(lambda: "Ctrl-C" in (tmp_path / "said").read_text(), "server")
        done = subprocess.run(
            ["bash", "-e", "-c", "\n".join(rest)],
            cwd=home,
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "hello from pod" in done.stdout and "succeeded" in done.stdout
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(240)


def test_the_table_of_the_page_holds_every_fault_and_its_value() -> None:
    rows = dict(re.findall(r"^\| (`.*?) \|(.*)$", PAGE.read_text(), flags=re.M))
    told = {name: rest for names, rest in rows.items() for name in re.findall(r"`([\w-]+)`", names)}
    assert set(told) == set(KINDS)
    for name, value in DEFAULTS.items():
        assert f"({value:g})" in told[name], name
