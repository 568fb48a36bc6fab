"""The rows of `launcher list`, and the columns that are left out on a narrow terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from launcher.report.run_cost import paid_for
from launcher.report.terminal import STATE_STYLE
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import newest
from launcher.rundir.time import seconds_of
from launcher.spec.quantities import format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.schedulers.base import Status


class Row(NamedTuple):
    """One run. Unknown fields are empty."""

    run: str
    state: str
    step: str = ""
    age: str = ""
    "Time since it was submitted."
    duration: str = ""
    "Time that its supervisors have run, without time in a queue."
    cluster: str = ""
    gpus: str = ""
    loss: str = ""
    "Loss of the newest step."
    usd: str = ""
    "Cost of its GPUs for `duration`, at the billed price or the profile's."
    tags: str = ""
    attempt: str = ""
    reason: str = ""


HEADS = {"usd": "USD", "gpus": "GPUS"}
DROP_ORDER = ("attempt", "tags", "usd", "gpus", "loss", "cluster", "duration", "age", "step")
"Columns to leave out if the terminal is too narrow, in this order."
MIN_REASON_WIDTH = 24
"Minimum width of the column with the reason."


def row_of(status: Status, run: RunDir, now: float | None = None) -> Row:
    """Return the row of a run. `now` is in seconds since the epoch."""
    about, events = run.read_about(), run.read_events()
    now = time.time() if now is None else now
    created = seconds_of(str(status.created or ""))
    seconds, usd = paid_for(run, events, now, ended=status.ended)
    gpus = about.nodes * about.gpus_per_node
    loss = newest(run, "loss")
    return Row(
        run=status.run_id,
        state=status.state,
        step=step_of(status.step, status.steps),
        age="" if created is None else format_duration(max(0.0, now - created)).partition(" ")[0],
        duration="" if seconds is None else format_duration(seconds),
        cluster=about.cluster.name or "",
        gpus=str(gpus) if gpus else "",
        loss=f"{loss:.4g}" if isinstance(loss, int | float) else "",
        usd="" if usd is None else f"{usd:.2f}",
        tags=",".join(about.job.tags or ()),
        attempt="" if status.attempt is None else str(status.attempt),
        reason=status.reason,
    )


def as_json(status: Status, run: RunDir) -> dict[str, Any]:
    """Return the status, with the time and the cost of the run so far."""
    return {**status.as_json(), **paid_for(run, run.read_events(), time.time(), ended=status.ended)._asdict()}


def step_of(step: int | None, steps: int | None) -> str:
    return "" if step is None else f"{step}" + (f"/{steps}" if steps else "")


def columns(rows: Sequence[Row], width: int) -> list[str]:
    """Return the columns for a terminal of `width` characters, without empty ones."""
    shown = [name for name in Row._fields if any(getattr(row, name) for row in rows)]

    def needed(names: Sequence[str]) -> int:
        widths = [
            max(len(name), *(len(getattr(row, name)) for row in rows)) for name in names if name != "reason"
        ]
        return sum(widths) + len(names) + (MIN_REASON_WIDTH if "reason" in names else 0)

    for name in (*DROP_ORDER, "reason"):
        if needed(shown) <= width:
            break
        shown = [other for other in shown if other != name]
    return shown


def show_list(console: Console, rows: Sequence[Row]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown = columns(rows, console.width) if rows else ["run", "state"]
    for name in shown:
        table.add_column(
            HEADS.get(name, name.upper()),
            no_wrap=name not in ("run", "reason"),
            overflow="fold" if name == "run" else "ellipsis",
            min_width=max(len(row.state) for row in rows) if name == "state" and rows else None,
        )
    for row in rows:
        style = STATE_STYLE.get(row.state, "")
        cells = {name: escape(getattr(row, name)) for name in shown}
        if style:
            cells["state"] = f"[{style}]{row.state}[/]"
        table.add_row(*cells.values())
    console.print(table)


def show_status(console: Console, status: Status, row: Row, lines: Sequence[str]) -> None:
    style = STATE_STYLE.get(status.state, "")
    table = Table.grid(padding=(0, 2))
    table.add_row("run", escape(status.run_id))
    table.add_row("state", f"[{style}]{status.state}[/]" if style else status.state)
    if status.reason:
        table.add_row("reason", escape(status.reason))
    if status.attempt is not None:
        table.add_row("attempt", str(status.attempt))
    if status.step is not None:
        table.add_row("step", f"{status.step}" + (f" of {status.steps}" if status.steps else ""))
    for name, value in _facts(row):
        table.add_row(name, escape(value))
    if status.checkpoint_step is not None:
        table.add_row("checkpoint", f"step {status.checkpoint_step}")
    table.add_row("directory", escape(status.path))
    for line in lines:
        table.add_row("", escape(line))
    if status.resumable:
        resume = f"launcher resume {escape(status.run_id)}"
        # A failure that was not understood may happen again.
        table.add_row(
            "next",
            f"see the reason; then {resume}" if status.failure == "unknown" else resume,
        )
    console.print(table)


def _facts(row: Row) -> list[tuple[str, str]]:
    where = row.cluster + (f", {row.gpus} GPUs" if row.gpus else "")
    age = f"{row.age} ago" if row.age else ""
    ran = f"ran for {row.duration}" if row.duration else ""
    pairs = [
        ("loss", row.loss),
        ("cluster", where),
        ("submitted", ", ".join(filter(None, (age, ran)))),
        ("cost", f"about {row.usd} USD" if row.usd else ""),
        ("tags", row.tags),
    ]
    return [(name, value) for name, value in pairs if value]


def as_html(rows: Sequence[Row]) -> str:
    """Return a table for a notebook, with every column that is not empty."""
    from html import escape as escaped

    shown = columns(rows, width=10**9) or ["run"]
    head = "".join(f"<th>{name}</th>" for name in shown)
    lines = ["".join(f"<td>{escaped(getattr(row, name))}</td>" for name in shown) for row in rows]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
