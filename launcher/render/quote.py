"""How a value is written into each kind of file so that it arrives byte for byte, or is refused.

One function per kind. Each raises QuoteError, with a message for the user, when the file cannot carry it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from launcher.spec.text import no_nul


class QuoteError(ValueError):
    """A value that this kind of file cannot carry."""


class Written(str):
    """Text that is already in the language of the file. Only this room makes it, never a template."""

    __slots__ = ()
    # Jinja's sandbox returns formatted text in the class of its format string: the arguments would count as
    # quoted.
    format = None  # type: ignore[assignment]
    format_map = None  # type: ignore[assignment]


# A step of a shell that would read more than a name here could run a command.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Characters that no shell, sbatch, Docker or Apptainer gives a meaning to.
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise QuoteError(f"{value!r} ({type(value).__name__}) is not text or a whole number")
    try:
        return no_nul(str(value))
    except ValueError as error:
        raise QuoteError(f"{str(value)!r} {error}") from None


def sh(value: object) -> Written:
    """bash: text in single quotes, a list as words; whole numbers as they are.

    Inside single quotes bash gives no character a meaning, a line break included.
    """
    if isinstance(value, Written):
        return value
    if isinstance(value, list | tuple):
        return Written(" ".join(sh(item) for item in value))
    text = _text(value)
    return Written(text if isinstance(value, int) else "'" + text.replace("'", "'\\''") + "'")


def name(value: object) -> Written:
    """The name of a variable, bare."""
    text = _text(value)
    if _NAME.fullmatch(text) is None:
        raise QuoteError(f"{text!r} is not a variable name")
    return Written(text)


def number(value: object) -> Written:
    """A whole number, bare: where bash computes, quotes mean nothing."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise QuoteError(f"{value!r} ({type(value).__name__}) is not a whole number")
    return Written(value)


def comment(value: object) -> Written:
    """Inside a comment: one line, control characters shown as `\\n`."""
    return Written(_CONTROL.sub(lambda match: ascii(match[0])[1:-1], _text(value)))


def sbatch(value: object) -> Written:
    """The value of an `#SBATCH --option=`.

    sbatch splits the line at blanks outside quotes (a backslash does not save a blank), ends it at `#` (old
    versions also inside quotes), and takes any other character after a backslash as it is (`_get_argument` in
    Slurm's sbatch/opt.c; tried with 22.05): so double quotes around, and a backslash before what is not
    plain. It also blanks the words hetjob and packjob wherever they stand.
    """
    text = _text(value)
    if not text:
        raise QuoteError("is empty, which an #SBATCH line cannot carry")
    if _CONTROL.search(text):
        raise QuoteError(f"{text!r} contains a control character, which an #SBATCH line cannot carry")
    if len(text.encode()) > 500:
        raise QuoteError(f"{text[:40]!r}... is longer than 500 bytes, which an #SBATCH line cannot carry")
    escaped = "".join(c if _PLAIN.fullmatch(c) or c == " " or ord(c) > 127 else "\\" + c for c in text)
    escaped = re.sub(r"(?i)(het|pack)(job)", r"\1\\\2", escaped)
    return Written(escaped if _PLAIN.fullmatch(escaped) else f'"{escaped}"')


def slurm_file(path: str) -> str:
    """A path as part of a Slurm file name pattern, where `%` starts a symbol and `\\` switches them off."""
    if "\\" in path:
        raise QuoteError(f"{path!r} contains a backslash, which a Slurm file name cannot carry")
    return path.replace("%", "%%")


def json_value(value: object) -> Written:
    """JSON, ASCII only."""
    if isinstance(value, Written):
        return value
    return Written(json.dumps(value))


def dockerfile(value: object) -> Written:
    """One word of a Dockerfile: bare when plain, else in double quotes."""
    text = _text(value)
    if _PLAIN.fullmatch(text):
        return Written(text)
    if _CONTROL.search(text):
        raise QuoteError(f"{text!r} contains a control character, which a Dockerfile cannot carry")
    return Written('"' + re.sub(r'(["\\$`])', r"\\\1", text) + '"')


def apptainer(value: object) -> Written:
    """One word of an Apptainer definition's header or labels: only plain characters."""
    text = _text(value)
    if _PLAIN.fullmatch(text) is None:
        raise QuoteError(f"{text!r} contains characters that an Apptainer definition cannot carry")
    return Written(text)


def image(value: str) -> str:
    """A container image reference or path: refused when it could be read as anything else."""
    if re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./:@#+=-]*", value) is None:
        raise QuoteError(f"image {value!r} is not an image reference or path")
    return value


def list_items(values: Iterable[str], separators: str, what: str) -> str:
    """Join with commas for an option that cannot quote one; refuse values with a separator in them."""
    items = list(values)
    for item in items:
        bad = [char for char in separators if char in item]
        if bad or _CONTROL.search(item):
            shown = " or ".join(repr(char) for char in bad) or "a control character"
            raise QuoteError(f"{item!r} contains {shown}, which {what} cannot carry")
    return ",".join(items)
