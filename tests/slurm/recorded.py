"""Answers of Slurm that were written down: `>>> NAME | exit CODE` (or `stderr`), then what it printed."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.schedulers.login import Answer

FOLDER = Path(__file__).parent / "outputs"


def answers(name: str) -> dict[str, Answer]:
    """Of one file; lines before the first answer say where it comes from."""
    found: dict[str, Answer] = {}
    parts = re.split(
        r"^>>> (.+) \| (exit \d+|stderr)\n", (FOLDER / f"{name}.txt").read_text(), flags=re.MULTILINE
    )
    assert parts[0].startswith("# "), name
    for question, what, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if what == "stderr":
            found[question] = Answer(found[question].code, found[question].out, text)
        else:
            found[question] = Answer(int(what.removeprefix("exit ")), text, "")
    return found
