"""Print a plan on a terminal, with the memory at each peak compared with the capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.report.content import Page, lead, memory_rows, sections
from launcher.report.memory_bars import CATEGORIES, OTHER, Bar, bars, in_cells
from launcher.report.terminal import grid
from launcher.spec.quantities import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.planning.recipe_and_ladder import Decision

MODULE = 17
"Characters shown of a module's name. Its end is more specific than its beginning."
OTHER_COLUMNS = 36
"Characters of the columns other than the bar and the module."


def show_page(console: Console, page: Page) -> None:
    console.print(grid(lead(page)))
    if page.explain and page.decision is not None:
        _memory(console, page.decision)
    for section in sections(page, explain=page.explain):
        if section.rows:
            table = _table(section.columns, section.rows) if section.columns else grid(section.rows)
            _section(console, section.title, table)
        if section.conclusion:
            console.print(Text(section.conclusion, style="bold"))
        _lines(console, section.title, section.lines)
    if page.decision is not None and not page.explain:
        console.print()
        console.print("--explain shows each peak of memory, the parts of a step, and why not another recipe")


def _memory(console: Console, decision: Decision) -> None:
    estimate, capacity = decision.chosen.estimate, decision.room.card
    drawn = bars(estimate)
    scale = max(capacity or 0, *(bar.total for bar in drawn))
    module = max(len("MODULE"), *(min(MODULE, len(bar.module)) for bar in drawn))
    width = min(console.width, 120) - OTHER_COLUMNS - module
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name, min_width in (("WHEN", 12), ("PHASE", 9)):
        table.add_column(name, no_wrap=True, min_width=min_width)
    table.add_column("ALLOCATED", no_wrap=True, justify="right")
    # The right edge is the capacity, unless more is needed.
    table.add_column("" if capacity is None else f"OF {format_bytes(scale)}", no_wrap=True)
    table.add_column("MODULE", no_wrap=True)
    for bar in drawn:
        size = format_bytes(bar.total if bar.allocated is None else bar.allocated)
        name = bar.module if len(bar.module) <= MODULE else f"…{bar.module[1 - MODULE :]}"
        style = "bold" if bar.allocated is None else ""
        table.add_row(bar.when, bar.phase, size, _drawn(bar, scale, width), Text(name), style=style)
    _section(console, "memory of a GPU" if capacity is not None else "memory of a rank", table)
    console.print(_legend(drawn, console.width))
    console.print()
    console.print(grid(memory_rows(decision)))


def _drawn(bar: Bar, scale: int, width: int) -> Text:
    """Draw a bar with a letter for each category, so that it is readable without colours."""
    text = Text()
    cells = in_cells([*bar.parts.values()], scale, width)
    for name, count in zip(bar.parts, cells, strict=True):
        category = CATEGORIES.get(name, OTHER)
        text.append(category.letter * count, style=f"{category.rich} reverse")
    return text.append("." * (width - sum(cells)), style="dim")


def _legend(drawn: Sequence[Bar], width: int) -> Text:
    present = {name for bar in drawn for name in bar.parts}
    text, column = Text(), 0
    for name in (name for name in [*CATEGORIES, *present - CATEGORIES.keys()] if name in present):
        category, words = CATEGORIES.get(name, OTHER), f" {name}  "
        if column + 1 + len(words) > width:
            text.append("\n")
            column = 0
        text.append(category.letter, style=f"{category.rich} reverse").append(words)
        column += 1 + len(words)
    return text


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table in which one column wraps: the last of five or more columns, or else the first."""
    table = Table(box=None, pad_edge=False)
    wraps = 0 if len(columns) < 5 else len(columns) - 1
    for number, column in enumerate(columns):
        table.add_column(
            column, no_wrap=number != wraps, justify="left" if number in (0, len(columns) - 1) else "right"
        )
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _section(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def _lines(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print()
        console.print(Text(title, style="bold"))
    for line in lines:
        listed = Table.grid(padding=(0, 1))
        listed.add_row("-", escape(line))
        console.print(listed)
