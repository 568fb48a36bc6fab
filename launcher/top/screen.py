"""The screen of `launcher top`: a table of runs, and below it the selected run with its ranks' memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Label, Static

from launcher.api.cancel import cancel
from launcher.api.snapshot import request_snapshot
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import progress_text
from launcher.spec.errors import LauncherError
from launcher.spec.one_line import plain
from launcher.top.background import Background
from launcher.top.board import Board, Entry, mark_of
from launcher.top.drawing import COLUMNS, cells_of, drawn, rank_text
from launcher.top.live import Live
from launcher.top.run_screen import Requested, RunScreen

READ_SECONDS = 2.0
"How often the files of visible runs are read, if there are few runs."
ROWS_PER_SECOND = 8
"Maximum number of rows to read and draw per second. Textual takes about 2 ms per row."
LOOK_SECONDS = 10.0
"How often schedulers are queried about runs that have not ended."
LEAST_RUN, MOST_RUN = 19, 44
PANEL_ROWS = 6


@dataclass
class Queried(Message):
    """Schedulers have been queried."""

    error: str = ""


@dataclass
class Answered(Message):
    """A user's request is done."""

    text: str
    failed: bool = False


class Confirm(ModalScreen[bool]):
    """A question that is answered with y or n."""

    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm Label { width: 60; padding: 1 2; border: round $warning; background: $surface; }
    """
    BINDINGS: ClassVar = [("y", "dismiss(True)", "Yes"), ("n,escape,q", "dismiss(False)", "No")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Label(f"{self._question}\n\ny: yes    n: no", markup=False)


class Top(App[None]):
    """The application. `board.look` must have been called once, so that there is something to draw."""

    CSS = """
    #head { height: 1; background: $panel; }
    DataTable { height: 1fr; }
    #panel { height: 7; border-top: solid $primary; padding: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("enter", "open('logs')", "Show", priority=False),
        ("f", "open('logs')", "Follow"),
        ("w", "open('why')", "Why"),
        ("c", "cancel", "Cancel"),
        ("s", "snapshot", "Snapshot"),
        ("q", "quit", "Quit"),
    ]

    def __init__(self, board: Board, *, timed: bool = True) -> None:
        """With `timed`, read and look at intervals, not only when `read` and `look` are called."""
        super().__init__()
        self.board, self._timed = board, timed
        self.background = Background()
        self._live: dict[RunDir, Live] = {}
        self._order: list[RunDir] = []
        self._shown: dict[RunDir, tuple[object, ...]] = {}
        self._looking = False

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield DataTable(cursor_type="row", cell_padding=0, zebra_stripes=False)
        yield Static(id="panel", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        if self._timed:
            self.call_after_refresh(self._read_by_the_clock)
            self.set_interval(LOOK_SECONDS, self.look)

    def _read_by_the_clock(self) -> None:
        if self.screen is self.screen_stack[0]:  # the screen of one run reads that run
            self.read()
        self.set_timer(max(READ_SECONDS, len(self._visible()) / ROWS_PER_SECOND), self._read_by_the_clock)

    @on(events.Resize)
    def _resized(self) -> None:
        self.call_after_refresh(self._draw_again)

    # What is read

    def look(self) -> None:
        """Query the schedulers in the background."""
        if self._looking:
            return
        self._looking = True

        def work() -> None:
            error = ""
            try:
                self.board.look()
            except (LauncherError, OSError) as problem:
                error = str(problem)
            self.post_message(Queried(error))

        self.background.look(work)

    @on(Queried)
    def _queried(self, message: Queried) -> None:
        self._looking = False
        if message.error:
            self.say(message.error, failed=True)
        self._draw()

    def read(self) -> None:
        """Read what visible runs have written, and redraw what has changed."""
        self._draw()
        if any(mark_of(run) != entry.mark for run, entry in self._visible()):
            self.look()

    # What is drawn

    def _draw_again(self) -> None:
        """Redraw everything after the width has changed."""
        table = self.query_one(DataTable)
        self._order, row = [], table.cursor_row
        table.clear(columns=True)
        table.add_column("RUN", width=self._run_width(), key="RUN")
        for head, width in COLUMNS.items():
            table.add_column(head, width=width, key=head)
        self._draw()
        table.move_cursor(row=row)

    def _run_width(self) -> int:
        return max(LEAST_RUN, min(MOST_RUN, self.size.width - sum(COLUMNS.values()) - 2))

    def _draw(self) -> None:
        table = self.query_one(DataTable)
        if not table.columns:
            return
        entries = self.board.entries
        if (order := list(entries)) != self._order:
            chosen = self.chosen
            table.clear()
            self._order, self._shown = order, {}
            for run in order:
                table.add_row(*[""] * (len(COLUMNS) + 1), key=str(run.path))
            if chosen in entries:
                table.move_cursor(row=order.index(chosen))
        for run, entry in self._visible():
            self._draw_row(table, run, entry)
        self._draw_head()
        self._draw_panel()

    def _visible(self) -> list[tuple[RunDir, Entry]]:
        table, entries = self.query_one(DataTable), self.board.entries
        first = int(table.scroll_offset.y)
        return [
            (run, entries[run])
            for run in self._order[first : first + table.size.height + 1]
            if run in entries
        ]

    def _draw_row(self, table: DataTable[RenderableType], run: RunDir, entry: Entry) -> None:
        live = self._live_of(run)
        live.read()
        cells = cells_of(entry, live, self._run_width() - 1)
        before = self._shown.get(run)
        if before == cells:
            return
        self._shown[run] = cells
        for place, (head, cell) in enumerate(zip(("RUN", *COLUMNS), cells, strict=True)):
            if before is None or before[place] != cell:
                table.update_cell(str(run.path), head, drawn(head, cell))

    def _draw_head(self) -> None:
        states = [entry.status.state for entry in self.board.entries.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        _update(self.query_one("#head", Static), Text(f" launcher top   {counts or 'no runs'}", no_wrap=True))

    def _draw_panel(self) -> None:
        run = self.chosen
        entry = self.board.entries.get(run) if run is not None else None
        panel = self.query_one("#panel", Static)
        if run is None or entry is None:
            _update(panel, Text("start a run: launcher submit JOB -c CLUSTER"))
            return
        _update(panel, Text("\n".join(self._panel_lines(run, entry, panel.size.width)), no_wrap=True))

    def _panel_lines(self, run: RunDir, entry: Entry, width: int) -> list[str]:
        row, live = entry.row, self._live_of(run)
        gpus = f"{row.gpus} GPUs" if row.gpus else ""
        cost = f"{row.usd} USD" if row.usd else ""
        place = ", ".join(filter(None, (row.cluster, gpus, row.duration, cost, row.tags)))
        lines = [f"{plain(run.id)}  {plain(place)}"]
        if row.reason:
            lines.append(plain(row.reason))
        if progress := progress_text(live.progress.last):
            lines.append(progress)
        cells = [rank_text(number, rank, live.capacity) for number, rank in live.all_ranks().items()]
        wide = max(map(len, cells), default=1) + 3
        per_line = max(1, (width + 3) // wide)
        for start in range(0, len(cells), per_line):
            lines.append("".join(cell.ljust(wide) for cell in cells[start : start + per_line]).rstrip())
        return lines[:PANEL_ROWS]

    def _live_of(self, run: RunDir) -> Live:
        return self._live.setdefault(run, Live(run))

    # What the user does

    @property
    def chosen(self) -> RunDir | None:
        """Return the run at the cursor."""
        row = self.query_one(DataTable).cursor_row
        return self._order[row] if 0 <= row < len(self._order) else None

    @on(DataTable.RowHighlighted)
    def _highlighted(self) -> None:
        self._draw_panel()

    @on(DataTable.RowSelected)
    def _selected(self) -> None:
        self.action_open("logs")

    def action_open(self, part: str) -> None:
        if (run := self.chosen) is not None:
            live = self._live_of(run)
            self.push_screen(RunScreen(run, live, part, self.board, self.background, timed=self._timed))

    def action_cancel(self) -> None:
        if (run := self.chosen) is not None:
            self._requested(Requested(run, "cancel"))

    def action_snapshot(self) -> None:
        if (run := self.chosen) is not None:
            self._requested(Requested(run, "snapshot"))

    @on(Requested)
    def _requested(self, message: Requested) -> None:
        """Do what the user asks. Cancelling must be confirmed."""
        run = message.run
        if message.what == "snapshot":
            self._request(lambda: str(request_snapshot(run)))
            return
        entry = self.board.entries.get(run)
        if entry is not None and entry.ended:
            self.say(f"{run.id} is not running: {entry.status.state}", failed=True)
            return
        what = "Kill its ranks at once?" if run.cancel.exists() else "It will be asked to stop."
        question = f"Cancel {plain(run.id)}? {what}"
        self.push_screen(Confirm(question), lambda yes: self._request(lambda: cancel(run)) if yes else None)

    def _request(self, work: Callable[[], str]) -> None:
        def done() -> None:
            try:
                self.post_message(Answered(work()))
            except (LauncherError, OSError) as error:
                self.post_message(Answered(str(error), failed=True))

        self.background.request(done)

    @on(Answered)
    def _answered(self, message: Answered) -> None:
        self.say(message.text, message.failed)
        self.look()

    def say(self, text: str, failed: bool = False) -> None:
        lines = "\n".join(map(plain, text.splitlines()))
        self.notify(lines, severity="error" if failed else "information", markup=False)


def _update(widget: Static, text: Text) -> None:
    """Update a widget if its text has changed."""
    if widget.visual is None or getattr(widget, "shown_text", None) != text:
        widget.shown_text = text  # type: ignore[attr-defined]
        widget.update(text)
