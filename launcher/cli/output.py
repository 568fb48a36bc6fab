"""Printing: one console, JSON, and errors that end the program with their documented code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from launcher.logs.clean import harmless
from launcher.spec.errors import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

EXIT_USAGE = 2  # bad input: a file, an option, a name
EXIT_NOT_FOUND = 3  # no such run
EXIT_REFUSED = 4  # the scheduler or the plan refuses
EXIT_UNCLEAR = 5  # the scheduler may have started it
EXIT_DETACHED = 130  # Ctrl-C while following; the run goes on


class HarmlessText(io.TextIOWrapper):
    """A stream of text on which what steers a terminal is spelled out; colours stay."""

    def write(self, text: str) -> int:
        super().write(harmless_text(text))
        return len(text)


def make_output_harmless() -> None:
    """Names, messages and exceptions of jobs are part of what is printed, and anybody may have written them.

    `sys.__stdout__` and `sys.__stderr__` stay as they were, for what moves the cursor.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            safe = HarmlessText(
                stream.buffer,
                stream.encoding,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, safe)


def harmless_text(text: str) -> str:
    """See `logs.clean.harmless`; what is no Unicode is spelled out, too."""
    return harmless(text.encode(errors="backslashreplace")).decode()


def print_harmless(data: bytes) -> None:
    """Lines of a log that launcher's own processes wrote."""
    sys.stdout.flush()
    sys.stdout.buffer.write(harmless(data))
    sys.stdout.buffer.flush()


def console(without_terminal: int = 240) -> Console:
    """For people: as wide as the terminal or as COLUMNS says, else so many characters."""
    from rich.console import Console

    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Console(width=None if known else without_terminal, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """One line while it lasts, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(file=sys.__stderr__).status(what):
        yield


_STEERING = re.compile("[\x7f-\x9f]")


def print_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    print(_STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """Print one clear message and end. Of a long value that it quotes, a part is printed."""
    for line in message.splitlines() or [""]:
        print(f"launcher: {shortened(line)}", file=sys.stderr)
    raise SystemExit(code)
