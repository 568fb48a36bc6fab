"""A plan as one self-contained HTML page: no script, no network, dark or light as the reader's system is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from launcher.report.content import (
    CATEGORIES,
    LADDER,
    OTHER,
    ZERO,
    Bar,
    Page,
    bars,
    comparison_table,
    host_rows,
    ladder_rows,
    lead,
    memory_rows,
    notes,
    time_rows,
    zero_lines,
    zero_rows,
)
from launcher.spec.base import format_bytes


def as_html(page: Page) -> str:
    """Render the page. All text from the job and the profile is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    compared = [(one, *comparison_table(page, one)) for one in page.comparisons]
    values: dict[str, Any] = {
        "page": page,
        "head": lead(page),
        "compared": compared,
        "notes": notes(page),
        "gib": format_bytes,
    }
    if page.zero is not None:
        title, stages = zero_rows(page)
        values["zero"] = {"title": title, "columns": ZERO, "rows": stages, "lines": zero_lines(page)}
    if (decision := page.decision) is not None:
        drawn, card = bars(decision.chosen.estimate), decision.room.card
        scale = max(card or 0, *(bar.total for bar in drawn))
        values |= {
            "bars": [(bar, _drawn(bar, scale)) for bar in drawn],
            "card": card,
            "card_at": None if card is None else _share(card, scale),
            "legend": [(name, _colour(name)) for name in _names(drawn)],
            "memory": memory_rows(decision),
            "host": host_rows(decision),
            "time": time_rows(page),
            "ladder": ladder_rows(decision),
            "ladder_columns": LADDER,
        }
    return environment.get_template("plan.html.j2").render(values)


def _drawn(bar: Bar, scale: int) -> list[dict[str, Any]]:
    """Rectangles in hundredths of the width."""
    found, at = [], 0
    for name, size in bar.parts.items():
        found.append(
            {
                "name": name,
                "bytes": size,
                "x": _share(at, scale),
                "width": _share(size, scale),
                "colour": _colour(name),
            }
        )
        at += size
    return found


def _share(size: int, scale: int) -> float:
    return round(100 * size / scale, 4)


def _colour(name: str) -> str:
    return CATEGORIES.get(name, OTHER).css


def _names(drawn: list[Bar]) -> list[str]:
    there = dict.fromkeys(name for bar in drawn for name in bar.parts)
    return [*(name for name in CATEGORIES if name in there), *(n for n in there if n not in CATEGORIES)]
