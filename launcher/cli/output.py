"""Printing: one console, JSON, and errors that end the program with their documented code."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

EXIT_USAGE = 2  # bad input: a file, an option, a name
EXIT_NOT_FOUND = 3  # no such run
EXIT_REFUSED = 4  # the scheduler or the plan refuses
EXIT_UNCLEAR = 5  # the scheduler may have started it
EXIT_DETACHED = 130  # Ctrl-C while following; the run goes on


def console() -> Console:
    """For people. Without a terminal lines are not wrapped at 80 characters."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 240, highlight=False, soft_wrap=False)


def narrow_console() -> Console:
    """For pages: as wide as the terminal, and 80 characters without one."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 80, highlight=False, soft_wrap=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """Print one clear message and end."""
    for line in message.splitlines() or [""]:
        print(f"launcher: {line}", file=sys.stderr)
    raise SystemExit(code)
