"""Print a comparison of runs on a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from launcher.report.comparison import Comparison, table
from launcher.spec.one_line import plain

if TYPE_CHECKING:
    from rich.console import Console

Rows = Sequence[Sequence[str]]
"A table. Its first row has the column heads, and its first column has the runs."
GAP = 2
"Characters between two columns."


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print the differing settings, then the results: as tables if they fit, or else one block per run."""
    if not comparison.differing:
        console.print("job, recipe and environment are the same\n")
    settings = _rows(("run", "state", *comparison.differing), table(comparison, comparison.differing))
    results = _rows(("run", *comparison.results), table(comparison, comparison.results, state=False))
    parts = [settings, results]
    if not fitting_tables(results, console.width):  # one block per run
        parts = [[[*row, *more[1:]] for row, more in zip(settings, results, strict=True)]]
    shown = [drawn for rows in parts for drawn in _drawn_tables(rows, console.width)]
    for number, drawn in enumerate(shown):
        if number:
            console.print()
        console.print(drawn)


def fitting_tables(rows: Rows, width: int) -> list[Rows]:
    """Return the rows unchanged, transposed to a column per run, or split into several tables.

    Return [] if none of these fits into `width` characters.
    """
    for whole in (rows, _transposed(rows)):
        if _width(whole) <= width:
            return [whole]
    runs, *others = _transposed(rows)
    parts = [[runs]]
    for column in others:
        if _width(_transposed([*parts[-1], column])) > width and len(parts[-1]) > 1:
            parts.append([runs])
        parts[-1].append(column)
    tables = [_transposed(part) for part in parts]
    return tables if all(_width(one) <= width for one in tables) else []


def _rows(head: Sequence[str], below: Rows) -> Rows:
    return [[plain(cell) for cell in row] for row in (head, *below)]


def _transposed(rows: Rows) -> Rows:
    return list(zip(*rows, strict=True))


def _drawn_tables(rows: Rows, width: int) -> list[RenderableType]:
    if tables := fitting_tables(rows, width):
        return [_table(one) for one in tables]
    (_, *names), *below = rows
    return [Group(Text(run), _table([*zip(names, cells, strict=True)], heads=False)) for run, *cells in below]


def _width(rows: Rows) -> int:
    """Return the number of characters that a table needs."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return sum(widths) + GAP * (len(widths) - 1)


def _table(rows: Rows, *, heads: bool = True) -> Table:
    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=heads)
    for name in rows[0] if rows else ():
        drawn.add_column(Text(name), overflow="fold")
    for row in rows[heads:]:
        drawn.add_row(*map(Text, row))
    return drawn
