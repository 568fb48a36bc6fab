"""One run on the screen: its logs, the memory of its ranks, its events, and why it failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, RichLog, Static, TabbedContent, TabPane

from launcher.logs.files import RankFile, attempt_files
from launcher.logs.follow import Follower
from launcher.logs.merged_lines import Source
from launcher.logs.new_lines import NewLines
from launcher.logs.read import OffsetReader, offset_near_end
from launcher.logs.show import tag
from launcher.report.history import history
from launcher.report.timeline import text_of
from launcher.report.why import why
from launcher.rundir.layout import RunDir
from launcher.rundir.progress import progress_text
from launcher.schedulers.lookup import scheduler_of
from launcher.schedulers.wanted_files import Wanted
from launcher.spec.errors import LauncherError
from launcher.spec.events import read_event
from launcher.spec.one_line import plain
from launcher.top.background import Background
from launcher.top.board import Board
from launcher.top.drawing import curve, rank_text
from launcher.top.fitted_text import log_line
from launcher.top.live import Live

READ_SECONDS, FETCH_SECONDS = 0.5, 10.0
"How often files are read, and how often a remote run's files are fetched."
LOG_BYTES, LEAST_LOG_BYTES = 256 * 1024, 2 * 1024
"Bytes shown at first from the end of all log files together, and at least of each file."
EVENT_BYTES = 256 * 1024
LINES = 2000
"Number of lines to keep for scrolling back."
PARTS = {"logs": "l", "memory": "m", "events": "e", "why": "w"}
"Part of the screen -> its key."


@dataclass
class Explained(Message):
    """The text of `launcher why`."""

    text: str


@dataclass
class Requested(Message):
    """The user requested something of a run."""

    run: RunDir
    what: Literal["cancel", "snapshot"]


class RunScreen(Screen[None]):
    CSS = """
    #about { height: 2; background: $panel; padding: 0 1; }
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; padding: 0; }
    """
    BINDINGS: ClassVar = [
        Binding("escape,q", "dismiss", "Back"),
        *((key, f"part('{part}')", part.capitalize()) for part, key in PARTS.items()),
        ("f", "follow", "Follow"),
        ("c", "cancel", "Cancel"),
        ("s", "snapshot", "Snapshot"),
    ]

    def __init__(
        self, run: RunDir, live: Live, part: str, board: Board, background: Background, *, timed: bool = True
    ) -> None:
        super().__init__()
        self.run, self.live, self.follows = run, live, True
        self._part, self._board, self._background, self._timed = part, board, background, timed
        self._follower = Follower(self._log_files, self._source)
        self._files = 1
        self._events = NewLines(run.events, EVENT_BYTES)
        self._explained: object = None
        "The status for which `why` was computed."

    def compose(self) -> ComposeResult:
        yield Static(id="about", markup=False)
        with TabbedContent(initial=self._part):
            with TabPane("Logs", id="logs"):
                yield RichLog(id="lines", max_lines=LINES, markup=False, highlight=False)
            with TabPane("Memory", id="memory"), VerticalScroll():
                yield Static(id="ranks", markup=False)
            with TabPane("Events", id="events"):
                yield RichLog(id="story", max_lines=LINES, markup=False, highlight=False, wrap=True)
            with TabPane("Why", id="why"), VerticalScroll():
                yield Static(id="explained", markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.fetch()
        self.call_after_refresh(self.read)
        if self._timed:
            self.set_interval(READ_SECONDS, self.read)
            self.set_interval(FETCH_SECONDS, self.fetch)

    def fetch(self) -> None:
        """Fetch the logs of a remote run in the background."""

        def work() -> None:
            try:
                scheduler_of(self.run).fetch(self.run, Wanted(logs=True))
            except (LauncherError, OSError):
                return  # `look` reports the same error

        self._background.look(work)

    def read(self) -> None:
        """Show what was written since the last call, in the open tab."""
        self._show_about()
        part = self.query_one(TabbedContent).active
        if part == "logs":
            self._show_logs()
        elif part == "events":
            self._show_events()
        elif part == "memory":
            self.live.read()
            self.query_one("#ranks", Static).update(self._memory())
        elif part == "why":
            self._explain()

    def _show_about(self) -> None:
        entry = self._board.entries.get(self.run)
        self.live.progress.read()
        first = plain(self.run.id)
        if entry is not None:
            first += f"  {entry.row.state}  {plain(entry.row.reason)}"
        follows = "" if self.follows else "  (not following)"
        text = Text(f"{first}\n{progress_text(self.live.progress.last)}{follows}", no_wrap=True)
        self.query_one("#about", Static).update(text)

    # Logs

    def _log_files(self, oldest: int) -> list[list[RankFile]]:
        attempts = [attempt_files(start) for start in self.run.starts() if start.number >= oldest]
        self._files = max(1, sum(map(len, attempts)))
        return attempts

    def _source(self, file: RankFile) -> Source:
        start = offset_near_end(file.path, max(LEAST_LOG_BYTES, LOG_BYTES // self._files))
        return Source(OffsetReader(file.path, start), file.rank, tag(file, colour=True))

    def _show_logs(self) -> None:
        log = self.query_one("#lines", RichLog)
        for _, lines in self._follower.new_lines():
            for line in lines[-LINES:]:
                log.write(log_line(line), scroll_end=self.follows)

    # The other parts

    def _show_events(self) -> None:
        log = self.query_one("#story", RichLog)
        for line in self._events.read():
            if (event := read_event(line)) is not None:
                text = Text(f"{event.time[11:19]}  {plain(event.kind):<12}  {plain(text_of(event))}")
                log.write(text, scroll_end=self.follows)

    def _memory(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        ranks = self.live.all_ranks()
        for number, rank in ranks.items():
            values = tuple(rank.history)
            line: RenderableType = curve(values, 24) if len(set(values)) > 1 else Text()
            table.add_row(Text(rank_text(number, rank, self.live.capacity)), line)
        return table if ranks else Group(Text("no rank has written its memory yet"))

    def _explain(self) -> None:
        entry = self._board.entries.get(self.run)
        if entry is None or entry == self._explained:
            return
        self._explained = entry

        def work() -> None:
            try:
                lines = [*why(self.run, entry.status), *history(self.run)]
            except (LauncherError, OSError) as error:
                lines = [str(error)]
            self.post_message(Explained("\n".join(map(plain, lines))))

        self._background.look(work)

    def on_explained(self, message: Explained) -> None:
        self.query_one("#explained", Static).update(Text(message.text))

    # What the user does

    def on_tabbed_content_tab_activated(self) -> None:
        self.read()

    def action_part(self, part: str) -> None:
        self.query_one(TabbedContent).active = part

    def action_follow(self) -> None:
        """Turn scrolling to new lines on or off."""
        self.follows = not self.follows
        if self.follows:
            for log in self.query(RichLog):
                log.scroll_end(animate=False)
        self._show_about()

    def action_cancel(self) -> None:
        self.post_message(Requested(self.run, "cancel"))

    def action_snapshot(self) -> None:
        self.post_message(Requested(self.run, "snapshot"))
