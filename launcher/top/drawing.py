"""Rows, curves and ranks as text for the screen."""

from __future__ import annotations

from statistics import fmean

from rich.color import Color
from rich.console import RenderableType
from rich.text import Text
from textual.renderables.sparkline import Sparkline

from launcher.report.listing import step_of
from launcher.report.steps import number
from launcher.report.terminal import STATE_STYLE
from launcher.spec.one_line import plain
from launcher.spec.quantities import format_bytes, format_duration
from launcher.top.board import Entry
from launcher.top.fitted_text import shortened
from launcher.top.live import Live
from launcher.top.rank_lines import Rank

COLUMNS = {"STATE": 12, "STEP": 10, "LOSS": 7, "": 9, "SPEED": 10, "LEFT": 5, "MEM": 6}
"Column head -> width. The first column, RUN, gets the rest of the line."
LOW, HIGH = Color.parse("cyan"), Color.parse("bright_cyan")

Cells = tuple[object, ...]
"The values of a row: text, or losses for a sparkline."


def cells_of(entry: Entry, live: Live, width: int) -> Cells:
    """Return a row's values, from the run's files where they are newer than the scheduler's answer."""
    status, row, progress = entry.status, entry.row, live.progress
    step = progress.step if progress.step is not None else status.step
    runs = status.state in ("running", "stopping")
    left = progress.left(status.steps) if runs else None
    loss = number(progress.last.get("loss"))
    first = live.first_rank.ranks.get(0)
    return (
        shortened(plain(row.run), width),
        plain(row.state),
        step_of(step, status.steps),
        row.loss if loss is None else short_number(loss, COLUMNS["LOSS"] - 1),
        tuple(progress.losses),
        progress.speed if runs else "",
        "" if left is None else format_duration(left).partition(" ")[0],
        first.short if runs and first is not None else "",
    )


def short_number(value: float, width: int) -> str:
    """Format a number with four significant digits, or fewer if it exceeds `width` characters."""
    texts = (f"{value:.{digits}g}" for digits in (4, 3, 2, 1))
    return next((text for text in texts if len(text) <= width), f"{value:.1g}")


def drawn(head: str, cell: object) -> RenderableType:
    """Return a cell for the table. Text is never a str, because Textual would parse it as markup."""
    if isinstance(cell, tuple):
        return curve(cell, COLUMNS[""] - 1) if len(set(cell)) > 1 else Text()
    text = str(cell)
    return Text(text, style=STATE_STYLE.get(text, "") if head == "STATE" else "", no_wrap=True)


def curve(values: tuple[float, ...], width: int) -> Sparkline[float]:
    return Sparkline(values, width=width, height=1, min_color=LOW, max_color=HIGH, summary_function=fmean)


def rank_text(number: int, rank: Rank, capacity: int | None) -> str:
    """Return the memory and utilization of a rank, such as `r003 12.3 GiB 51% GPU 98%`."""
    parts = [f"r{number:03d}", "" if rank.bytes is None else format_bytes(int(rank.bytes))]
    if rank.bytes is not None and rank.on_gpu and capacity:
        parts.append(f"{rank.bytes / capacity:.0%}")
    elif rank.bytes is not None and not rank.on_gpu:
        parts.append("host")
    if rank.gpu is not None:
        parts.append(f"GPU {rank.gpu:.0f}%")
    elif rank.cpu is not None:
        parts.append(f"CPU {rank.cpu:.0f}%")
    return " ".join(filter(None, parts))
