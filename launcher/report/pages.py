"""Render self-contained pages from the templates in this folder. All text is escaped; nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from launcher.logs.clean import harmless
from launcher.report.memory_bars import CATEGORIES, OTHER, Bar
from launcher.spec.quantities import format_bytes, format_duration

_HERE = Path(__file__).parent
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CHARTS = _HERE / "vendor" / "uplot-1.6.32"


def draw(template: str, **values: Any) -> str:
    """Render a template with the values, without their control characters."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "bytes": format_bytes,
        "duration": format_duration,
        "when": _when,
        "filled": _filled,
        "breakable": _breakable,
    }
    return environment.get_template(template).render(values)


def _shown(value: object) -> object:
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return _COLOUR.sub("", harmless(value.encode(errors="backslashreplace")).decode())


def _breakable(name: str) -> Markup:
    """Allow a line break after each `_` and `.` of a name."""
    return Markup("<wbr>").join(re.split(r"(?<=[_.])", str(_shown(name))))


def _filled(table: tuple[Sequence[str], Sequence[Sequence[object]]]) -> tuple[Any, Any]:
    """Drop columns of (columns, rows) that are empty in every row, except the first column."""
    columns, rows = table
    kept = [
        place
        for place in range(len(columns))
        if not place or any(row[place] not in ("", "-") for row in rows)
    ]
    return [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]


def _when(stamp: str) -> str:
    """Format a time stamp `2026-11-21T08:54:01.123456Z` as `2026-11-21 08:54:01 UTC`."""
    return f"{stamp[:10]} {stamp[11:19]} UTC" if stamp else ""


@cache
def chart_files() -> dict[str, Markup]:
    """Return the files of a page with charts: uPlot, its style, charts.js, and the scripts' hashes.

    The page's content security policy allows only these scripts, so no text in it can become a script.
    """
    scripts = [
        f"\n{path.read_text(encoding='utf-8')}\n"
        for path in (_CHARTS / "uPlot.iife.min.js", _HERE / "charts.js")
    ]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return {
        "chart_style": Markup((_CHARTS / "uPlot.min.css").read_text(encoding="utf-8")),
        "chart_scripts": Markup("".join(f"<script>{script}</script>\n" for script in scripts)),
        "chart_hashes": Markup(" ".join(f"'sha256-{one}'" for one in hashes)),
    }


def drawn_bars(bars: Sequence[Bar], capacity: int | None) -> dict[str, Any]:
    """Return the bars as rectangles, in percent of the width, with their legend."""
    scale = max(capacity or 0, *(bar.total for bar in bars))
    return {
        "bars": [(bar, _rectangles(bar, scale)) for bar in bars],
        "capacity": capacity,
        "capacity_at": None if capacity is None else _share(capacity, scale),
        "legend": [(name, _colour(name)) for name in _names(bars)],
    }


def _rectangles(bar: Bar, scale: int) -> list[dict[str, Any]]:
    rectangles, at = [], 0
    for name, size in bar.parts.items():
        place = {"x": _share(at, scale), "width": _share(size, scale)}
        rectangles.append({"name": name, "bytes": size, "colour": _colour(name), **place})
        at += size
    return rectangles


def _share(size: int, scale: int) -> float:
    return round(100 * size / scale, 4)


def _colour(name: str) -> str:
    return CATEGORIES.get(name, OTHER).css


def _names(bars: Sequence[Bar]) -> list[str]:
    present = dict.fromkeys(name for bar in bars for name in bar.parts)
    return [*(name for name in CATEGORIES if name in present), *(n for n in present if n not in CATEGORIES)]
