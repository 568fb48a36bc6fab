"""Render a comparison of runs as one self-contained HTML page."""

from __future__ import annotations

from launcher.report.comparison import Comparison, parallel, table
from launcher.report.metric_curves import charts_of
from launcher.report.pages import chart_files, draw


def as_html(comparison: Comparison) -> str:
    """Render the page. All text is escaped."""
    columns = dict.fromkeys(name for run in comparison.runs for name in run.curves.columns)
    data = {
        "runs": [run.curves.as_data(run.run) for run in comparison.runs if run.curves.step],
        "charts": [chart._asdict() for chart in charts_of(columns)],
        "memory": [],
        "parallel": parallel(comparison),
    }
    return draw(
        "compare.html.j2",
        comparison=comparison,
        differing=(("run", "state", *comparison.differing), table(comparison, comparison.differing)),
        results=(("run", *comparison.results), table(comparison, comparison.results, state=False)),
        data=data,
        **chart_files(),
    )
