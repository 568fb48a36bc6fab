"""Work that takes longer than a second says what it does."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from launcher.spec.progress import working
from tests.lab import Lab

WORKS = """
import sys, threading
import typer
from launcher.cli import main, spinner
from launcher.cli.options import AsJson
from launcher.spec.progress import working

spinner.PATIENCE = float(sys.argv.pop(1))
app = main.app = typer.Typer()
shown = threading.Event()
show = spinner.LongWork._show
def told(self, work):
    show(self, work)
    shown.set()
spinner.LongWork._show = told

@app.command()
def verb(json: AsJson = False):
    with working("sending [red]\\x1b[2J", 2**30) as advance:
        shown.wait(0 if json or spinner.PATIENCE > 1 else 60)
        advance(2**29)
        with working("sending [red]\\x1b[2J", 2**30):
            pass
    print("done")

main.main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WORKS, *arguments], capture_output=True, text=True)


def test_without_a_terminal_it_is_one_plain_line() -> None:
    done = run("0.01")
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    assert done.stderr == "launcher: sending [red]^[[2J: 0 B of 1 GiB\n"


@pytest.mark.parametrize("arguments", [("1000",), ("0.01", "--json")], ids=["at once", "json"])
def test_quick_work_and_json_are_silent(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_on_a_terminal_a_line_shows_how_far_it_is_and_goes_away() -> None:
    main, end = pty.openpty()
    command = [sys.executable, "-c", WORKS, "0.01"]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, env=environ) as process:
        os.close(end)
        shown = b""
        try:
            while data := os.read(main, 4096):
                shown += data
        except OSError:  # the other end is closed
            pass
        assert process.stdout is not None and process.stdout.read() == b"done\n"
    os.close(main)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "sending [red]^[[2J: " in text and "512 MiB of 1 GiB" in text
    assert b"\x1b[2J" not in shown and shown.rstrip().endswith(b"\x1b[2K")


@pytest.mark.slow
def test_a_plan_of_minutes_is_not_silent(lab: Lab) -> None:
    lab.job(task="slow:Slow", steps=1)
    lab.script("import time; time.sleep(1.5)\nfrom launcher.tasks.gpt import PydocGPT as Slow\n", "slow.py")
    done = lab.cli("plan", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("launcher: ") for line in done.stderr.splitlines())
    assert "launcher: " not in lab.cli("plan", "job.yaml", "--json").stderr


def test_without_a_listener_nothing_happens() -> None:
    with working("something", 3) as advance:
        advance(3)
