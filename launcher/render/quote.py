"""Write a value into each kind of file so that it arrives byte for byte, or refuse it.

There is one function per kind. Each raises RenderError if the file cannot carry the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from launcher.spec.errors import LauncherError
from launcher.spec.text import no_nul


class RenderError(LauncherError, ValueError):
    """A file cannot be rendered, for example because it cannot carry a value. The message is for the user."""


class Written(str):
    """Text that is already in the language of the file. Only this package creates it, never a template."""

    __slots__ = ()
    # Jinja's sandbox returns formatted text in the class of its format string, so the arguments would count
    # as quoted.
    format = None  # type: ignore[assignment]
    format_map = None  # type: ignore[assignment]


# Restrictive, because a shell construct that reads more than a name here could run a command.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Characters without a special meaning to any shell, sbatch, Docker or Apptainer.
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RenderError(f"{value!r} ({type(value).__name__}) is not text or a whole number")
    try:
        return no_nul(str(value))
    except ValueError as error:
        raise RenderError(f"{str(value)!r} {error}") from None


def sh(value: object) -> Written:
    """Quote for bash: text in single quotes, a list as words, whole numbers as they are.

    Inside single quotes no character has a meaning to bash, not even a line break.
    """
    if isinstance(value, Written):
        return value
    if isinstance(value, list | tuple):
        return Written(" ".join(sh(item) for item in value))
    text = _text(value)
    return Written(text if isinstance(value, int) else "'" + text.replace("'", "'\\''") + "'")


def name(value: object) -> Written:
    """Write the name of a variable without quotes."""
    text = _text(value)
    if _NAME.fullmatch(text) is None:
        raise RenderError(f"{text!r} is not a variable name")
    return Written(text)


def number(value: object) -> Written:
    """Write a whole number without quotes, because quotes mean nothing in arithmetic."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RenderError(f"{value!r} ({type(value).__name__}) is not a whole number")
    return Written(value)


def comment(value: object) -> Written:
    """Write a value in a comment: on one line, with control characters shown as `\\n`."""
    return Written(_CONTROL.sub(lambda match: ascii(match[0])[1:-1], _text(value)))


def sbatch(value: object) -> Written:
    """Quote the value of an `#SBATCH --option=`.

    sbatch splits the line at blanks outside quotes (a backslash does not protect a blank), ends it at `#`
    (old versions even inside quotes), and takes any other character after a backslash literally
    (`_get_argument` in Slurm's sbatch/opt.c; tried with 22.05). Therefore the value gets double quotes, and a
    backslash before every character that is not plain. sbatch also blanks the words hetjob and packjob
    anywhere.
    """
    text = _text(value)
    if not text:
        raise RenderError("is empty, which an #SBATCH line cannot carry")
    if _CONTROL.search(text):
        raise RenderError(f"{text!r} contains a control character, which an #SBATCH line cannot carry")
    if len(text.encode()) > 500:
        raise RenderError(f"{text[:40]!r}... is longer than 500 bytes, which an #SBATCH line cannot carry")
    escaped = "".join(c if _PLAIN.fullmatch(c) or c == " " or ord(c) > 127 else "\\" + c for c in text)
    escaped = re.sub(r"(?i)(het|pack)(job)", r"\1\\\2", escaped)
    return Written(escaped if _PLAIN.fullmatch(escaped) else f'"{escaped}"')


def slurm_file(path: str) -> str:
    """Escape a path for a Slurm file name pattern, in which `%` starts a symbol and `\\` disables all of
    them."""
    if "\\" in path:
        raise RenderError(f"{path!r} contains a backslash, which a Slurm file name cannot carry")
    return path.replace("%", "%%")


def json_value(value: object) -> Written:
    """Write a value as JSON, in ASCII only."""
    if isinstance(value, Written):
        return value
    return Written(json.dumps(value))


def dockerfile(value: object) -> Written:
    """Write one word of a Dockerfile: without quotes if plain, otherwise in double quotes."""
    text = _text(value)
    if _PLAIN.fullmatch(text):
        return Written(text)
    if _CONTROL.search(text):
        raise RenderError(f"{text!r} contains a control character, which a Dockerfile cannot carry")
    return Written('"' + re.sub(r'(["\\$`])', r"\\\1", text) + '"')


def apptainer(value: object) -> Written:
    """Write one word of an Apptainer definition's header or labels. Only plain characters are allowed."""
    text = _text(value)
    if _PLAIN.fullmatch(text) is None:
        raise RenderError(f"{text!r} contains characters that an Apptainer definition cannot carry")
    return Written(text)


def image(value: str) -> str:
    """Return a container image reference or path. Refuse it if it could be read as anything else."""
    if re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./:@#+=-]*", value) is None:
        raise RenderError(f"image {value!r} is not an image reference or path")
    return value


def list_items(values: Iterable[str], separators: str, what: str) -> str:
    """Join values with commas for an option without quoting. Refuse values that contain a separator."""
    items = list(values)
    for item in items:
        bad = [char for char in separators if char in item]
        if bad or _CONTROL.search(item):
            shown = " or ".join(repr(char) for char in bad) or "a control character"
            raise RenderError(f"{item!r} contains {shown}, which {what} cannot carry")
    return ",".join(items)
