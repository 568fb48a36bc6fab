"""The page of findings: 80 columns of plain text. Pure."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from launcher.doctor.examine import spans
from launcher.doctor.values import Finding, Part

WIDTH = 80
COLUMNS = (6, 27, 22, 19)
"Widths of verdict, check, measured value and expected value. Three gaps and an indent make WIDTH."
PARTS: dict[Part, str] = {
    "run": "RUN",
    "node": "NODE",
    "network": "NETWORK",
    "collectives": "COLLECTIVES",
    "search": "SETTINGS",
    "model": "TINY MODEL",
    "job": "JOB",
}


def page(title: str, findings: Sequence[Finding], nodes: int) -> list[str]:
    """Return the lines of the page: each part with its findings, then the sum of verdicts."""
    lines = textwrap.wrap(title, WIDTH)
    for part, heading in PARTS.items():
        chosen = [one for one in findings if one.part == part]
        if chosen:
            lines += ["", *_row("", heading, "measured", "expected")]
            lines += [line for one in chosen for line in _lines(one, nodes)]
    return [*lines, "", summary(findings)]


def summary(findings: Iterable[Finding]) -> str:
    """Count the verdicts: `14 good, 1 poor`."""
    counts = Counter(one.verdict for one in findings)
    return ", ".join(f"{counts[word]} {word}" for word in ("good", "poor", "broken") if counts[word])


def _lines(one: Finding, nodes: int) -> list[str]:
    where = [f"node {spans(one.nodes)}"] if one.nodes and len(one.nodes) < nodes else []
    where += [_subjects(one.subjects)] if one.subjects else []
    lines = _row(one.verdict, ", ".join([one.title, *where]), one.measured, one.expected)
    if one.verdict != "good":
        lines += [*_paragraph("cause", one.cause), *_paragraph("cure", one.cure)]
    return lines


def _row(*cells: str) -> list[str]:
    """Return the lines of one row. A cell that is too long goes on below."""
    wrapped = [textwrap.wrap(cell, width) for cell, width in zip(cells, COLUMNS, strict=True)]
    rows = zip_longest(*wrapped, fillvalue="")
    return [
        ("  " + " ".join(f"{part:<{width}}" for part, width in zip(row, COLUMNS, strict=True))).rstrip()
        for row in rows
    ]


def _paragraph(word: str, text: str) -> list[str]:
    indent = " " * (COLUMNS[0] + 3)
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{indent}{word:<6} ",
        subsequent_indent=f"{indent}{'':<7}",
        break_on_hyphens=False,
    )


def _subjects(subjects: Sequence[str]) -> str:
    """Join subjects: `GPU 0-7` for consecutive GPUs."""
    gpus = [one.removeprefix("GPU ") for one in subjects]
    if all(one.isdecimal() for one in gpus) and all(one.startswith("GPU ") for one in subjects):
        return f"GPU {spans(map(int, gpus))}"
    return ", ".join(subjects)
