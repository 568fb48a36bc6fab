"""Format findings as a page of plain text, 80 columns wide. Pure."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from launcher.doctor.values import Finding, Part
from launcher.logs.files import ranges
from launcher.spec.one_line import plain

WIDTH = 80
COLUMNS = (6, 27, 22, 19)
"Widths of verdict, check, measured value and expected value. With three gaps and an indent they fill WIDTH."
FEW = 4
"Maximum number of connections between nodes to list. More are counted."
PARTS: dict[Part, str] = {
    "run": "RUN",
    "node": "NODE",
    "network": "NETWORK",
    "collectives": "COLLECTIVES",
    "search": "SETTINGS",
    "model": "TINY MODEL",
    "job": "JOB",
}


def page(
    title: str,
    findings: Sequence[Finding],
    nodes: int,
    hosts: Mapping[int, str] | None = None,
    note: str = "",
) -> list[str]:
    """Return the lines of the page: each part with its findings, then the count of verdicts and the note.

    `hosts` holds the nodes' names. The page shows all of up to FEW nodes; of more, those with a fault.
    """
    lines = _wrapped(title, WIDTH)
    if nodes > 1:
        named = {
            node: name for node, name in (hosts or {}).items() if nodes <= FEW or node in _sick(findings)
        }
        lines += _wrapped(", ".join(f"node {node}: {name}" for node, name in named.items()), WIDTH)
    for part, heading in PARTS.items():
        chosen = [finding for finding in findings if finding.part == part]
        if chosen:
            lines += ["", *_row("", heading, "measured", "expected")]
            lines += [line for finding in chosen for line in _lines(finding, nodes)]
    return [*lines, "", summary(findings) or "nothing was measured", *_wrapped(note, WIDTH)]


def _sick(findings: Iterable[Finding]) -> set[int]:
    """Return the nodes named in findings that are not good."""
    sick: set[int] = set()
    for finding in findings:
        if finding.verdict != "good":
            text = f"{finding.cause} {_subjects(finding.subjects)}"
            sick |= {*finding.nodes, *map(int, re.findall(r"\bnode (\d+)", text))}
    return sick


def summary(findings: Iterable[Finding]) -> str:
    """Count the verdicts: `14 good, 1 poor`."""
    counts = Counter(finding.verdict for finding in findings)
    return ", ".join(f"{counts[word]} {word}" for word in ("good", "poor", "broken") if counts[word])


def _lines(finding: Finding, nodes: int) -> list[str]:
    where = [f"node {ranges(finding.nodes)}"] if finding.nodes and len(finding.nodes) < nodes else []
    where += [_subjects(finding.subjects)] if finding.subjects else []
    lines = _row(finding.verdict, ", ".join([finding.title, *where]), finding.measured, finding.expected)
    if finding.verdict != "good":
        lines += [*_paragraph("cause", finding.cause), *_paragraph("cure", finding.cure)]
    return lines


def _row(*cells: str) -> list[str]:
    """Return the lines of one row. A long cell wraps, and uses the space of an empty cell next to it."""
    widths = COLUMNS if cells[-1] else (*COLUMNS[:2], COLUMNS[2] + 1 + COLUMNS[3], 0)
    wrapped = [_wrap(cell, width) if cell else [] for cell, width in zip(cells, widths, strict=True)]
    rows = zip_longest(*wrapped, fillvalue="")
    return [
        ("  " + " ".join(f"{part:<{width}}" for part, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def _wrap(cell: str, width: int) -> list[str]:
    """Wrap a cell, after a comma or semicolon if possible."""
    lines: list[str] = []
    for part in re.split(r"(?<=[,;]) ", cell):
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f" {part}"
        else:
            lines += _wrapped(part, width)
    return lines


def _paragraph(word: str, text: str) -> list[str]:
    indent = " " * (COLUMNS[0] + 3)
    return _wrapped(
        text,
        WIDTH,
        initial_indent=f"{indent}{word:<6} ",
        subsequent_indent=f"{indent}{'':<7}",
        break_on_hyphens=False,
    )


def _wrapped(text: str, width: int, **options: Any) -> list[str]:
    """Wrap a text, with control characters escaped, such as ESC in a path."""
    return textwrap.wrap(plain(" ".join(text.split())), width, **options)


def _subjects(subjects: Sequence[str]) -> str:
    """Join subjects: `GPU 0-7` for consecutive GPUs, `8 ways to node 3` for ways with a node or a few
    in common."""
    gpus = [subject.removeprefix("GPU ") for subject in subjects]
    if all(subject.isdecimal() for subject in gpus) and all(
        subject.startswith("GPU ") for subject in subjects
    ):
        return f"GPU {ranges(map(int, gpus))}"
    matches = [re.fullmatch(r"(\d+) to (\d+)(.*)", subject) for subject in subjects]
    if len(subjects) <= FEW or not all(matches):
        return ", ".join(subjects)
    ends = [(match[1], match[2]) for match in matches if match]
    rest = "".join(sorted({match[3] for match in matches if match}))
    for word, nodes in (("from", {way[0] for way in ends}), ("to", {way[1] for way in ends})):
        if len(nodes) == 1:
            return f"{len(ends)} ways {word} node {nodes.pop()}{rest}"
    if len(common := _common(ends)) <= len(ends) // FEW:
        return f"{len(ends)} ways of {' or '.join(f'node {node}' for node in common)}{rest}"
    return f"{', '.join(subjects[:FEW])} and {len(ends) - FEW} other ways"


def _common(ways: Sequence[tuple[str, str]]) -> list[str]:
    """Return nodes that together are at an end of every way, the node with most ways first."""
    nodes: list[str] = []
    while remaining := [way for way in ways if not {*way} & {*nodes}]:
        counts = Counter(chain.from_iterable(remaining))
        nodes.append(max(counts, key=counts.__getitem__))
    return nodes
