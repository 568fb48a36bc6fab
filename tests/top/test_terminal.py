"""`launcher top` in a real terminal, under tmux."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab, wait_for
from tests.report.written_run import eventful
from tests.top.running_runs import Living

pytest.importorskip("textual")
tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
TOP = [sys.executable, "-m", "launcher", "top"]


class Terminal:
    """80 x 24 characters, and whoever types there."""

    def __init__(self, lab: Lab) -> None:
        self._tmux = ["tmux", "-S", str(lab.folder / "tmux"), "-f", "/dev/null"]
        self._lab = lab

    def __call__(self, *arguments: str) -> str:
        environ = {**self._lab.environ, "TERM": "xterm-256color"}
        for name in ("TMUX", "COLUMNS"):  # the terminal says how wide it is
            environ.pop(name, None)
        done = subprocess.run(
            [*self._tmux, *arguments], env=environ, cwd=self._lab.folder, capture_output=True, text=True
        )
        return done.stdout

    def start(self, command: list[str]) -> int:
        """Start a command, and return its process id. When it has ended, the screen says how.

        A shell waits for it: tmux sometimes misses the end of what it runs.
        """
        shell = f"{shlex.join(command)}; echo ended with status $?; exec cat"
        self("new-session", "-d", "-x", "80", "-y", "24", f"exec sh -c {shlex.quote(shell)}")
        pid = self("list-panes", "-F", "#{pane_pid}").strip()
        children = Path(f"/proc/{pid}/task/{pid}/children")
        return int(wait_for(lambda: children.read_text().strip(), "process of the command"))

    def screen(self) -> str:
        return self("capture-pane", "-p")

    def shows(self, text: str) -> str:
        wait_for(lambda: text in self.screen(), f"{text!r} on the screen")
        return self.screen()


@pytest.fixture
def terminal(lab: Lab) -> Iterator[Terminal]:
    terminal = Terminal(lab)
    yield terminal
    terminal("kill-server")


@tmux
def test_top_shows_a_run_follows_it_and_leaves_the_terminal_as_it_was(lab: Lab, terminal: Terminal) -> None:
    eventful(lab.folder / "runs" / "gpt-ended")
    living = Living(lab.folder / "runs" / "[red]gpt")
    living.grow(1)
    terminal.start(TOP)
    screen = terminal.shows("1/1000")
    lines = screen.splitlines()
    assert len(lines) == 24 and lines[0].strip() == "launcher top   1 running, 1 succeeded"
    assert lines[1].split()[:4] == ["RUN", "STATE", "STEP", "LOSS"]
    assert lines[2].startswith("[red]gpt") and lines[3].startswith("gpt-ended")
    assert "r000 20 GiB 25% GPU 98%" in screen and "q Quit" in lines[23]
    living.grow(2)
    terminal.shows("2/1000")
    terminal("send-keys", "f")
    terminal.shows("0:r000 | step 2")
    living.log(0, 0, "a title \x1b]0;mine\x07 and \x1b[2J")
    assert "a title ^[]0;mine^G and ^[[2J" in terminal.shows("a title")
    assert "mine" not in terminal("display-message", "-p", "#{pane_title}")
    terminal("send-keys", "c")
    terminal.shows("Cancel [red]gpt? It will be asked to stop.")
    terminal("send-keys", "y")
    wait_for(living.run.cancel.exists, "cancellation")
    terminal("send-keys", "Escape")
    terminal.shows("RUN")
    terminal("send-keys", "q")
    assert "launcher top" not in terminal.shows("ended with status 0")


def test_without_a_terminal_top_names_the_verb_that_needs_none(lab: Lab) -> None:
    done = lab.cli("top")
    assert done.returncode == 2 and done.stderr.strip() == (
        "launcher: `launcher top` needs a terminal; `launcher list` prints the same once"
    )


def test_without_textual_top_says_what_to_install(lab: Lab, tmp_path: Path) -> None:
    program = (
        "import sys, importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'textual' else find(name, *more)\n"
        "sys.argv = ['launcher', 'top']\n"
        "from launcher.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=lab.environ, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.strip() == (
        "launcher: `launcher top` needs Textual: in launcher's checkout, pip install '.[top]'"
    )


def test_no_other_verb_imports_textual(lab: Lab) -> None:
    program = (
        "import sys\nfrom launcher.cli.main import main\nsys.argv = ['launcher', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n    assert 'textual' not in sys.modules\n"
    )
    for arguments in (["--help"], ["list"], ["top", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], env=lab.environ, cwd=lab.folder, capture_output=True
        )
        assert done.returncode == 0, done.stderr


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@tmux
@pytest.mark.thorough
@pytest.mark.parametrize("rows", [24, 60])
def test_fifty_runs_cost_less_than_two_percent_of_a_core(lab: Lab, terminal: Terminal, rows: int) -> None:
    """Processor time of a minute in which ten of the runs write a step each second."""
    for number in range(40):
        eventful(lab.folder / "runs" / f"ended-{number:02d}")
    living = [Living(lab.folder / "runs" / f"living-{number}") for number in range(10)]
    pid = terminal.start(TOP)
    terminal("resize-window", "-x", "120", "-y", str(rows))
    terminal.shows("living-9")
    before = cpu_seconds(pid)
    began = time.monotonic()
    for step in range(1, 61):
        for run in living:
            run.grow(step)
        time.sleep(max(0.0, began + step - time.monotonic()))
    cost = (cpu_seconds(pid) - before) / (time.monotonic() - began)
    print(f"{cost:.2%} of a core, {rows} rows")
    terminal.shows("60/1000")
    assert cost < 0.02
