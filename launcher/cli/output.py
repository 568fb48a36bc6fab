"""Print to the console, print JSON, and exit with an error and its documented code."""

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
    from pathlib import Path

    from rich.console import Console

EXIT_USAGE = 2  # bad input: a file, an option, a name
EXIT_NOT_FOUND = 3  # no such run
EXIT_REFUSED = 4  # the scheduler or the plan refuses
EXIT_UNCLEAR = 5  # the scheduler may have started it
EXIT_DETACHED = 130  # Ctrl-C while following; the run continues


@contextlib.contextmanager
def telling_of(sentence: str) -> Iterator[None]:
    """Print what was done to standard error, and exit, if standard output cannot be written in the block.

    A caller must learn of a run that was started, because it costs GPUs or money.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        fail(f"{sentence}; {message_of(error)}", EXIT_UNCLEAR)


class HarmlessText(io.TextIOWrapper):
    """A text stream that spells out terminal control sequences. Colours stay."""

    def write(self, text: str) -> int:
        with self._named_in_errors():
            super().write(harmless_text(text))
        return len(text)

    def flush(self) -> None:
        with self._named_in_errors():
            super().flush()

    @contextlib.contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = f"standard {'error' if self.fileno() == 2 else 'output'}"
            raise


def make_output_harmless() -> None:
    """Spell out terminal control sequences in the output, because a job's names and messages may come from
    anyone, and characters that the locale's encoding lacks.

    `sys.__stdout__` and `sys.__stderr__` are unchanged, for code that moves the cursor.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            safe = HarmlessText(
                stream.buffer,
                stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, safe)


def harmless_text(text: str) -> str:
    """Apply `logs.clean.harmless` to a text, and also spell out invalid Unicode."""
    return harmless(text.encode(errors="backslashreplace")).decode()


def print_harmless(data: bytes) -> None:
    """Print lines from a log of launcher's own processes."""
    sys.stdout.flush()
    sys.stdout.buffer.write(harmless(data))
    sys.stdout.buffer.flush()


def console(without_terminal: int = 240) -> Console:
    """Return a console as wide as the terminal or COLUMNS, otherwise `without_terminal` characters."""
    from rich.console import Console

    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # a shell without a terminal may set 0, and rich would print nothing
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Console(width=None if has_width else without_terminal, highlight=False, soft_wrap=False)


_C1_CONTROLS = re.compile("[\x7f-\x9f]")


def print_json(value: Any) -> None:
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps(value, indent=2, ensure_ascii=not is_unicode)
    print(_C1_CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def page_file(option: str, path: Path) -> Path:
    """Return the file for a page, with links resolved. Exit with an error if it cannot be written there."""
    if not path.absolute().parent.is_dir():
        fail(f"{option}: there is no directory {path.absolute().parent}")
    if path.exists() and not path.is_file():
        fail(f"{option}: {path} is not a regular file")  # a device such as /dev/stdout would be replaced
    return path.resolve()


def message_of(error: Exception) -> str:
    """Return the message of an error. For system errors, it has no number, and names the file if possible."""
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_directory():
        return "the current directory was deleted; change to another one"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _has_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 (Path.cwd() raises the same)
    except FileNotFoundError:
        return False
    return True


def say(message: str) -> None:
    """Print a message for people, or nothing if it is empty. Long values in it are shortened."""
    for line in message.splitlines():
        print(f"launcher: {shortened(line)}", file=sys.stderr)


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """Print one message and exit. Long values in it are shortened."""
    say(message or "\n")
    raise SystemExit(code)
