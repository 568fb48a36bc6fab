"""`launcher logs`: select, format and write lines."""

from __future__ import annotations

import errno
import os
import re
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import BinaryIO, Literal

from launcher.logs.clean import RESET
from launcher.logs.files import RankFile, attempt_files, check_selection, parse_selection
from launcher.logs.follow import Follower
from launcher.logs.merged_lines import Source
from launcher.logs.read import TEXT_START, OffsetReader, offset_of
from launcher.rundir.layout import RunDir
from launcher.rundir.time import stamp
from launcher.spec.quantities import parse_seconds

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # cycled through by rank; red is left to the programs


@dataclass(frozen=True)
class LogOptions:
    """What to show. `ranks` and `nodes` are written as `0,3-5`; None shows all."""

    attempt: int | None = None
    ranks: str | None = None
    nodes: str | None = None
    since: str | None = None
    "`10m` (before now) or an ISO time (UTC if it names no zone)."
    grep: str | None = None
    "A regular expression that is searched for in the text of each line."
    streams: Literal["both", "out", "err"] = "both"
    follow: bool = False
    fold: bool = True


def show_logs(
    run: RunDir,
    options: LogOptions,
    out: BinaryIO,
    colour: bool,
    done: Callable[[], bool] = lambda: True,
) -> None:
    """Write the selected lines to `out`, merged by time, attempt by attempt.

    A line reads `09:12:33.123456 0:r003 | text`: UTC, attempt, rank, `|` for stdout and `!` for stderr. A
    line with the date precedes the first line of a day. With `follow`, lines are written as they appear,
    until `done()` is true and everything is shown. Terminal control sequences are spelled out; colours stay.

    Raises ValueError for invalid options, and for a rank, node or attempt that does not exist (while
    following, it may still appear). Its message is one sentence for the user. Raises OSError from `out`.
    """
    ranks = parse_selection(options.ranks, "rank") if options.ranks is not None else None
    nodes = parse_selection(options.nodes, "node") if options.nodes is not None else None
    streams = ("out", "err") if options.streams == "both" else (options.streams,)
    since = parse_since(options.since) if options.since is not None else None
    keep = _grep(options.grep) if options.grep is not None else None

    def files(oldest: int) -> list[list[RankFile]]:
        starts = [start for start in run.starts() if options.attempt in (None, start.number)]
        return [attempt_files(start, ranks, nodes, streams) for start in starts if start.number >= oldest]

    def source(file: RankFile) -> Source:
        start = offset_of(file.path, since) if since is not None else 0
        return Source(OffsetReader(file.path, start), file.rank, tag(file, colour), keep)

    may_appear = options.follow and not done() and (options.attempt is None or options.attempt >= 0)
    if not may_appear:
        check_selection(run, options.attempt, ranks, nodes)
    follower = Follower(files, source, options.fold)
    shown_day = b""
    for day, lines in follower.lines(done) if options.follow else follower.new_lines():
        if day and day != shown_day:
            shown_day = day
            out.write(b"---- %s UTC ----\n" % day[:10])
        if lines:
            lines.append(b"")
            out.write(b"\n".join(lines))
        elif not day:
            out.flush()
            if _has_no_reader(out):
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    out.flush()
    if may_appear:
        check_selection(run, options.attempt, ranks, nodes)


def _has_no_reader(out: BinaryIO) -> bool:
    """Return whether `out` is a pipe that nobody reads any more, such as after `| grep -m1`. Otherwise a
    follower would notice this only when it writes the next line."""
    poll = select.poll()
    try:
        poll.register(out.fileno(), 0)
    except OSError:  # an object without a file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def tag(file: RankFile, colour: bool) -> bytes:
    """The text between the time and the message."""
    name = b"%d:r%03d" % (file.attempt, file.rank)
    if colour:
        name = b"\x1b[%dm%s%s" % (_COLOURS[file.rank % len(_COLOURS)], name, RESET)
    return b" " + name + (b" | " if file.stream == "out" else b" ! ")


def parse_since(text: str, now: float | None = None) -> bytes:
    """`"10m"` or `"2026-11-21T08:54"` -> the stamp from which lines are shown."""
    try:
        seconds = parse_seconds(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        except ValueError:
            raise ValueError(
                f"{text!r} is neither a duration (10m, 2h) nor a time (2026-11-21T08:54, UTC)"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return stamp(moment.timestamp()).encode()
    return stamp((time.time() if now is None else now) - seconds).encode()


def _grep(pattern: str) -> Callable[[list[bytes]], list[bytes]]:
    try:
        search = re.compile(pattern.encode()).search
    except re.error as error:
        raise ValueError(f"--grep {pattern!r} is not a regular expression: {error}") from None

    def keep(lines: Iterable[bytes]) -> list[bytes]:
        return [line for line in lines if search(line[TEXT_START:])]

    return keep
