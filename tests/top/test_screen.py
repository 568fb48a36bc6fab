"""The screen of `launcher top`, driven by Textual's pilot: what is shown, and what the keys do."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("textual")

from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Static, TabbedContent

from launcher.api.listing import Filter
from launcher.rundir.find import default_root
from launcher.schedulers import lookup
from launcher.spec.one_line import plain
from launcher.top.board import Board
from launcher.top.drawing import short_number
from launcher.top.fitted_text import log_line, shortened
from launcher.top.run_screen import RunScreen
from launcher.top.screen import Confirm, Top
from tests.report.written_run import eventful
from tests.top.running_runs import Living

Use = Callable[[Top, Pilot[None]], Awaitable[None]]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    assert default_root() == tmp_path / "runs"
    return tmp_path / "runs"


def used(use: Use, board: Board | None = None) -> None:
    """Open the screen on 80 x 24 characters and use it. Nothing happens by the clock."""
    board = board or Board()
    board.look()

    async def main() -> None:
        app = Top(board, timed=False)
        app.NOTIFICATION_TIMEOUT = math.inf
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            app.read()
            await use(app, pilot)
        app.background.leave()

    asyncio.run(main())


async def settled(app: Top, pilot: Pilot[None]) -> None:
    """Wait until the background has done everything, and the screen shows it."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    app.background.look(lambda: loop.call_soon_threadsafe(done.set))
    await done.wait()
    await pilot.pause()


def rows(app: Top) -> list[str]:
    """The lines of the table as they are drawn, without the heads."""
    table = app.screen_stack[0].query_one(DataTable)
    console = Console(width=200, no_color=True, highlight=False)
    found = []
    for key in table.rows:
        cells = []
        for cell in table.get_row(key):
            with console.capture() as drawn:
                console.print(cell, end="", soft_wrap=True)
            cells.append(drawn.get().strip())
        found.append(" | ".join(cells))
    return found


def text_of(app: Top, name: str) -> str:
    return str(app.screen.query_one(name, Static).visual)


def test_living_runs_come_first_with_step_loss_speed_time_left_and_memory(runs: Path) -> None:
    living = Living(runs / "gpt-a")
    for step in range(1, 31):
        living.grow(step)
    eventful(runs / "gpt-b")

    async def use(app: Top, pilot: Pilot[None]) -> None:
        first, second = rows(app)
        assert first.startswith("gpt-a | running | 30/1000 | 4.7 | ▇")
        assert first.endswith("| 8.47k tok | 16m | 20G")
        assert second.startswith("gpt-b | succeeded | 40/40 | 1 | ") and second.endswith("|  |  | ")
        panel = text_of(app, "#panel")
        assert "loss 4.7000  8,474 tokens/s" in panel
        assert "r000 20 GiB 25% GPU 98%    r001 21 GiB 26% CPU 100%" in panel, "of 80 GiB each"
        living.grow(31)
        app.read()
        assert rows(app)[0].startswith("gpt-a | running | 31/1000 | 4.69 |")
        living.state("submitted", reason="waits for GPUs: 0 of 2 GPUs are free")  # resumed
        app.read()
        await settled(app, pilot)
        assert rows(app)[0].startswith("gpt-a | submitted | 31/1000 | 4.69 |"), "speed is that of before"
        assert rows(app)[0].endswith("|  |  | ")
        living.release()
        app.read()  # sees that state.json is another
        await settled(app, pilot)
        assert sorted(rows(app))[0].startswith("gpt-a | succeeded | 31/1000")
        assert text_of(app, "#head").split("top")[1].strip() == "2 succeeded"

    used(use)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.078125, "0.0781"), (12.3456, "12.35"), (123456.0, "1e+05"), (-0.0123456, "-0.012"), (0.0, "0")],
)
def test_a_loss_leaves_room_for_its_curve(value: float, text: str) -> None:
    assert short_number(value, 6) == text


def test_a_new_run_appears_and_the_cursor_stays_on_its_run(runs: Path) -> None:
    eventful(runs / "gpt-a")
    eventful(runs / "gpt-b")

    async def use(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("down")
        chosen = app.chosen
        another = Living(runs / "gpt-c")
        app.look()
        await settled(app, pilot)
        assert rows(app)[0].startswith("gpt-c | running") and len(rows(app)) == 3
        assert app.chosen == chosen and another.run != chosen

    used(use)


def test_only_living_runs_are_asked_about_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        eventful(runs / f"ended-{number}")
    living = Living(runs / "living")
    board = Board()
    board.look()
    asked: list[list[str]] = []
    monkeypatch.setattr(
        "launcher.top.board.states_of",
        lambda these: asked.append([run.id for run in these]) or lookup.states_of(these),
    )
    board.look()
    living.release()
    board.look()
    board.look()
    assert asked == [["living"], ["living"], []]


def test_a_limit_keeps_living_runs_and_a_filter_its_own(runs: Path) -> None:
    old = Living(runs / "old", name="long")
    for number in range(4):
        eventful(runs / f"new-{number}")
    board = Board(limit=2)
    board.look()
    assert [run.id for run in board.entries] == ["old", "new-3"]
    board = Board(Filter(name="long"))
    board.look()
    assert list(board.entries) == [old.run]


def test_enter_shows_logs_memory_events_and_the_cause(runs: Path) -> None:
    log = eventful(runs / "gpt-a")

    async def use(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await settled(app, pilot)
        screen = app.screen
        assert isinstance(screen, RunScreen)
        lines = [line.text for line in screen.query_one("#lines", RichLog).lines]
        assert any("0:r001 | torch.OutOfMemoryError" in line for line in lines)
        assert any("1:r000 | done" in line for line in lines)
        log.log(1, 0, "one more")
        screen.read()
        await pilot.pause()
        assert [line.text for line in screen.query_one("#lines", RichLog).lines][len(lines) :][0].endswith(
            "1:r000 | one more"
        )
        await pilot.press("e")
        await pilot.pause()
        told = "".join(line.text for line in screen.query_one("#story", RichLog).lines)
        assert "downgrade" in told and "micro-batch 16 -> 8" in told
        await pilot.press("m")
        await pilot.pause()
        assert screen.query_one(TabbedContent).active == "memory"
        assert list(screen.live.all_ranks()) == [0, 1]
        await pilot.press("w")
        await settled(app, pilot)
        assert "gpu-oom: rank 1 ran out of memory" in text_of(app, "#explained")
        await pilot.press("f")
        assert not screen.follows and "(not following)" in text_of(app, "#about")
        await pilot.press("escape")
        assert not isinstance(app.screen, RunScreen)

    used(use)


def test_cancel_asks_first_and_a_request_outlives_the_screen(runs: Path) -> None:
    living = Living(runs / "gpt-a")

    async def use(app: Top, pilot: Pilot[None]) -> None:
        await pilot.press("c")
        assert isinstance(app.screen, Confirm)
        await pilot.press("n")
        await settled(app, pilot)
        assert not living.run.cancel.exists()
        await pilot.press("c", "y")

    used(use)
    assert living.run.cancel.exists()


def test_a_run_that_has_ended_is_not_cancelled_and_a_snapshot_is_refused_with_the_reason(
    runs: Path,
) -> None:
    eventful(runs / "gpt-a")

    async def use(app: Top, pilot: Pilot[None]) -> None:
        for screens in (1, 2):  # the table, and the screen of the run
            await pilot.press("c")
            assert not isinstance(app.screen, Confirm)
            await pilot.press("s")
            await settled(app, pilot)
            said = [note.message for note in app._notifications]
            assert said == screens * [
                "gpt-a is not running: succeeded",
                "gpt-a has no running ranks to ask; its state is succeeded",
            ]
            await pilot.press("enter")
            await settled(app, pilot)
            assert isinstance(app.screen, RunScreen)

    used(use)


HOSTILE = "[red]x[/red]<script>\x1b]0;title\x07\x1b[2J\u202e"


def test_what_ranks_and_jobs_write_changes_nothing_on_the_screen(runs: Path) -> None:
    living = Living(runs / "[bold]a\x1b[2J", tags=[HOSTILE])
    living.grow(1)
    living.log(0, 0, HOSTILE)
    living.state("running", attempt=0, reason=HOSTILE)

    async def use(app: Top, pilot: Pilot[None]) -> None:
        shown = "[bold]a\\x1b[2J"
        assert rows(app)[0].startswith(f"{shown} | running")
        spelled = r"[red]x[/red]<script>\x1b]0;title\x07\x1b[2J\u202e"
        assert text_of(app, "#panel").count(spelled) == 2
        await pilot.press("c")
        assert isinstance(app.screen, Confirm)
        await pilot.press("n", "enter")
        await settled(app, pilot)
        assert text_of(app, "#about").startswith(f"{shown}  running  {spelled}")
        lines = [line.text for line in app.screen.query_one("#lines", RichLog).lines]
        assert any(line.endswith(r"[red]x[/red]<script>^[]0;title^G^[[2J\u202e") for line in lines), lines
        drawn = "".join(segment.text for line in app.screen._compositor.render_strips() for segment in line)
        assert "\x1b" not in drawn and "\u202e" not in drawn

    used(use)


def test_text_is_spelled_out_and_colours_of_a_log_stay() -> None:
    assert plain("a\nb\x1b[1m\x9b") == r"a\nb\x1b[1m\x9b"
    line = log_line(b"\x1b[31mred\x1b[0m \x1b[2J[blue]")
    assert line.plain == "red ^[[2J[blue]" and str(line.spans[0].style) == "color(1)"
    assert shortened("gpt-20261125-184815-bbac", 18) == "gpt-20…184815-bbac"
    assert len(shortened("x" * 50, 19)) == 19 and shortened("short", 19) == "short"
