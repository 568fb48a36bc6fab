"""Tables of Markdown, and their place in a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.memory.estimate import Estimate
from launcher.spec.quantities import GIB


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The keys of the first row are the columns."""
    if not rows:
        return "(none)"
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def budget(estimate: Estimate) -> dict[str, str]:
    """Return the GiB of each category at the highest peak, of the allocator's rest, and beside PyTorch."""
    rest = estimate.reserved - estimate.allocated
    terms = {**estimate.worst.parts, "allocator": rest, **estimate.overhead}
    return {name: f"{size / GIB:.2f}" for name, size in terms.items() if size > 0.005 * GIB}


def filled(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows with every row's columns; `-` stands where a row has none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name, "-") for name in names} for row in rows]


def between(page: Path, script: str, text: str) -> None:
    """Replace what stands between the marks of `script` in a page."""
    start, end = f"<!-- {script} --save writes this -->", f"<!-- end of {script} -->"
    before, rest = page.read_text().split(start)
    _, after = rest.split(end)
    page.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")
