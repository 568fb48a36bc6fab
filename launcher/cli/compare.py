"""`launcher compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from launcher.cli.options import AsJson, complete_runs

if TYPE_CHECKING:
    from launcher.report.comparison import Comparison


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="runs, jobs, tags, sweeps, or patterns such as 'gpt-*'",
            autocompletion=complete_runs,
        ),
    ],
    by: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="sort by a result (the best first) or a setting, e.g. eval_loss"),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", metavar="FILE", help="also write a self-contained page"),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    json: AsJson = False,
) -> None:
    """Show runs side by side: what differs in job, recipe and environment, then the results."""
    from launcher.api.compare import chosen, compared
    from launcher.cli.output import console, fail, page_file, print_json
    from launcher.spec.progress import working

    if csv and json:
        fail("give --csv or --json, not both")
    page = page_file("--output", output) if output is not None else None
    with working("reading the runs"):
        comparison = compared(chosen(runs), by)
    if page is not None:
        from launcher.report.comparison_html import as_html
        from launcher.rundir.files import replace_text

        replace_text(page, as_html(comparison))
    if json:
        rows = [
            {"run": run.run, "state": run.state, "settings": run.settings, "results": run.results}
            for run in comparison.runs
        ]
        print_json({"by": comparison.by or None, "differing": comparison.differing, "runs": rows})
    elif csv:
        _print_csv(comparison)
    else:
        from launcher.report.comparison_text import show_comparison

        show_comparison(console(), comparison)


def _print_csv(comparison: Comparison) -> None:
    import csv
    import io

    rows, text = comparison.rows(), io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    # The output stream lets colours pass, and would add the end of a colour to the last column.
    print(text.getvalue().replace("\x1b", "^["), end="")
