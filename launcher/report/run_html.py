"""Render a run as one self-contained HTML page."""

from __future__ import annotations

from typing import Any

from launcher.report.pages import chart_files, draw, drawn_bars
from launcher.report.rank_memory import MEASURES
from launcher.report.run_report import Report, headline
from launcher.report.timeline import KINDS, Span, Timeline
from launcher.rundir.time import stamp
from launcher.spec.quantities import format_bytes


def as_html(report: Report, refresh: int | None = None) -> str:
    """Render the page. `refresh` is the seconds after which the browser reloads it, for a live run."""
    memory = report.memory
    bars = drawn_bars(report.bars, report.capacity) if report.bars else {"bars": ()}
    return draw(
        "run.html.j2",
        report=report,
        refresh=refresh,
        headline=headline(report),
        has_charts=bool(report.curves.step),
        highest=[
            (MEASURES[name], format_bytes(size), rank, step if memory.of_steps else "-", attempt)
            for name, (size, rank, step, attempt) in memory.highest.items()
        ],
        moments=[(one.name, *_compared(one.planned, one.measured)) for one in report.moments],
        categories=[(one.name, *_compared(one.planned, one.measured)) for one in report.categories],
        lanes=_lanes(report.timeline),
        begin=stamp(report.timeline.begin),
        data=_data(report),
        **bars,
        **chart_files(),
    )


def _compared(planned: int | None, measured: int | None) -> tuple[str, str, str]:
    ratio = f"{measured / planned:.3f}" if planned and measured else "-"
    return *("-" if size is None else format_bytes(size) for size in (planned, measured)), ratio  # type: ignore[return-value]


def _lanes(timeline: Timeline) -> list[tuple[str, list[tuple[Span, float, float]]]]:
    """Return the spans of each kind with their position and length in percent of the width."""
    length = timeline.end - timeline.begin or 1.0

    def share(moment: float) -> float:
        return round(100 * (min(max(moment, timeline.begin), timeline.end) - timeline.begin) / length, 3)

    lanes = []
    for kind in KINDS:
        spans = [span for span in timeline.spans if span.kind == kind]
        if spans:
            places = [
                (span, share(span.begin), round(share(span.end) - share(span.begin), 3)) for span in spans
            ]
            lanes.append((kind, places))
    return lanes


def _data(report: Report) -> dict[str, Any]:
    """Return the data for charts.js."""
    curves, memory = report.curves, report.memory
    limits = {"capacity": report.capacity, "planned": report.planned}
    return {
        "runs": [curves.as_data(report.run)] if curves.step else [],
        "charts": [chart._asdict() for chart in curves.charts],
        "memory": [
            {
                "title": MEASURES[name],
                "x": memory.seconds,
                "series": [
                    {"label": f"rank {rank}", "values": [None if v is None else round(v) for v in column]}
                    for rank, column in zip(memory.ranks, columns, strict=True)
                ],
                "lines": {name: size for name, size in limits.items() if size is not None}
                if name != "rss"
                else {},
            }
            for name, columns in memory.values.items()
        ],
    }
