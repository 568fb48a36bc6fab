"""Rank files as a capture writes them, and the run directory around them."""

from __future__ import annotations

import io
from pathlib import Path

from launcher.logs.show import LogOptions, show_logs
from launcher.rundir.layout import RunDir
from launcher.rundir.time import STAMP_LENGTH, stamp

START = 1_795_250_000.0  # 2026-11-21, in the morning


def write_rank(
    run: RunDir,
    rank: int,
    lines: list[tuple[float, bytes]],
    attempt: int = 0,
    node: int = 0,
    stream: str = "out",
) -> Path:
    """`lines` are (seconds after START, text)."""
    path = run.attempt(attempt).rank_log(node, rank, stream)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(b"".join(stamp(START + at).encode() + b" " + text + b"\n" for at, text in lines))
    return path


def shown(run: RunDir, **options: object) -> list[bytes]:
    """The lines of `show_logs`, without those that tell the date."""
    out = io.BytesIO()
    colour = bool(options.pop("colour", False))
    show_logs(run, LogOptions(**options), out, colour)  # type: ignore[arg-type]
    return [line for line in out.getvalue().split(b"\n")[:-1] if not line.startswith(b"---- ")]


def texts(path: Path) -> list[bytes]:
    """The lines of a captured file without stamps; every line must have one, and time not go back."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    lines = data.split(b"\n")[:-1]
    stamps = [line[:STAMP_LENGTH] for line in lines]
    assert stamps == sorted(stamps)
    assert all(line[26:28] == b"Z " and len(one) == 27 for line, one in zip(lines, stamps, strict=True))
    return [line[STAMP_LENGTH + 1 :] for line in lines]
