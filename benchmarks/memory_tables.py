"""Tables of Markdown, and their place in a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The keys of the first row are the columns."""
    if not rows:
        return "(none)"
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def between(page: Path, script: str, text: str) -> None:
    """Replace what stands between the marks of `script` in a page."""
    start, end = f"<!-- {script} --save writes this -->", f"<!-- end of {script} -->"
    before, rest = page.read_text().split(start)
    _, after = rest.split(end)
    page.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")
