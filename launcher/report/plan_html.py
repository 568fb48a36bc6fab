"""Render a plan as one self-contained HTML page, without scripts, in the system's dark or light style."""

from __future__ import annotations

from typing import Any

from launcher.report.content import (
    LADDER,
    ZERO,
    Page,
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
from launcher.report.memory_bars import bars
from launcher.report.pages import draw, drawn_bars


def as_html(page: Page) -> str:
    """Render the page. All text from the job and the profile is escaped."""
    values: dict[str, Any] = {
        "page": page,
        "head": lead(page),
        "compared": [(one, *comparison_table(page, one)) for one in page.comparisons],
        "notes": notes(page),
    }
    if page.zero is not None:
        title, stages = zero_rows(page)
        values["zero"] = {"title": title, "columns": ZERO, "rows": stages, "lines": zero_lines(page)}
    if (decision := page.decision) is not None:
        values |= {
            **drawn_bars(bars(decision.chosen.estimate), decision.room.card),
            "memory": memory_rows(decision),
            "host": host_rows(decision),
            "time": time_rows(page),
            "ladder": ladder_rows(decision),
            "ladder_columns": LADDER,
        }
    return draw("plan.html.j2", **values)
