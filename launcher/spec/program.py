"""Detect a program given in place of a job file."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_BY_SUFFIX = {".py": "python", ".sh": "bash", ".bash": "bash", ".sbatch": "bash"}


def not_a_job(file: Path, text: bytes) -> str | None:
    """Return a message with the job file to write instead, or None if the file may be YAML."""
    interpreter = _interpreter(file, text)
    if interpreter is None:
        return None
    language = "Python" if interpreter == "python" else "shell"
    return (
        f"this is a {language} file, and launcher reads a job file: write one that starts it, such as "
        "job.yaml with these three lines, and then `launcher run job.yaml`\n"
        f"  name: {file.stem}\n"
        f"  command: {interpreter} {shlex.quote(file.name)}\n"
        "  batch: {global: 64}\n"
        "`launcher job init` writes a longer one with comments"
    )


def _interpreter(file: Path, text: bytes) -> str | None:
    """Return the interpreter, from the first line or the file's suffix."""
    first = text.partition(b"\n")[0]
    if first.startswith(b"#!"):
        if b"python" in first:
            return "python"
        return "bash" if re.search(rb"\b(ba|da|k|z)?sh\b", first) else None
    return _BY_SUFFIX.get(file.suffix.lower())
