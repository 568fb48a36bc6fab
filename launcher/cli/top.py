"""`launcher top`."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated, Optional

import typer

_Text = Optional[str]  # noqa: UP045


def top(
    limit: Annotated[
        int,
        typer.Option(
            "--limit", "-n", min=1, help="maximum number of runs to show, those that have not ended first"
        ),
    ] = 50,
    name: Annotated[_Text, typer.Option(help="show only runs of this job")] = None,
    cluster: Annotated[_Text, typer.Option("--cluster", "-c", help="show only runs on this cluster")] = None,
    tag: Annotated[_Text, typer.Option(help="show only runs with this tag")] = None,
) -> None:
    """Watch all runs live: state, loss, speed, time left, memory. Enter shows one; c cancels it."""
    from launcher.cli.output import fail

    if importlib.util.find_spec("textual") is None:
        fail("`launcher top` needs Textual: in launcher's checkout, pip install '.[top]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):
        fail("`launcher top` needs a terminal; `launcher list` prints the same once")
    from launcher.api.listing import Filter
    from launcher.schedulers.over_ssh.ssh import SshLogin
    from launcher.spec.progress import be_silent, working
    from launcher.top.board import Board

    board = Board(Filter(name=name, cluster=cluster, tag=tag), limit)
    with working("querying the runs"):
        board.look()
    be_silent()
    SshLogin.may_ask = False  # a question for a password would disturb the screen
    from launcher.top.screen import Top

    screen = Top(board)
    screen.run()
    screen.background.leave()
