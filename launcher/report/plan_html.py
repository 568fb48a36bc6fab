"""Render a plan as one self-contained HTML page, without scripts, in the system's dark or light style."""

from __future__ import annotations

from typing import Any

from launcher.report.content import Page, lead, memory_rows, sections
from launcher.report.memory_bars import bars
from launcher.report.pages import draw, drawn_bars


def as_html(page: Page) -> str:
    """Render the page. All text from the job and the profile is escaped."""
    values: dict[str, Any] = {
        "page": page,
        "head": lead(page),
        "sections": [one for one in sections(page, explain=True) if one.rows or one.lines],
    }
    if (decision := page.decision) is not None:
        values |= drawn_bars(bars(decision.chosen.estimate), decision.room.card)
        values["memory"] = memory_rows(decision)
    return draw("plan.html.j2", **values)
