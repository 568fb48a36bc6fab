"""The progress of a run, read from the end of metrics.jsonl."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.rundir.files import open_regular, parsed
from launcher.rundir.layout import RunDir
from launcher.spec.quantities import format_bytes

TAIL_BYTES = 64 * 1024
"Bytes at the end of metrics.jsonl that are searched for the newest value of a metric: some 400 steps."


def last_metrics(run: RunDir) -> dict[str, Any]:
    """Return the newest step and the newest value of each metric, perhaps from an earlier step; or {}."""
    metrics: dict[str, Any] = {}
    for line in newest_lines(run.metrics):
        metrics = {**line, **metrics}
    return metrics


def newest(run: RunDir, name: str) -> Any:
    """Return `last_metrics(run).get(name)`, at a fraction of the cost."""
    return next((line[name] for line in newest_lines(run.metrics, name) if name in line), None)


def newest_lines(path: Path, name: str = "") -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file of JSON objects, the newest first, from its last 64 KiB.

    With a name, only lines that have it are read.
    """
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    key = json.dumps(name).encode() if name else b""
    likely = (line for line in reversed(lines) if key in line)
    yield from (value for value in map(parsed, likely) if isinstance(value, dict))


def last_step(run: RunDir) -> int | None:
    step = newest(run, "step")
    return step if isinstance(step, int) else None


def progress_text(metrics: dict[str, Any]) -> str:
    """A line of metrics for a person: loss, speed, and what else is known."""
    metrics = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    parts = []
    if (loss := metrics.get("loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if (held_out := metrics.get("eval_loss")) is not None:
        parts.append(f"held-out {held_out:.4f}")
    if (tokens := metrics.get("tokens_per_second")) is not None:
        parts.append(f"{tokens:,.0f} tokens/s")
    elif (samples := metrics.get("samples_per_second")) is not None:
        parts.append(f"{samples:,.1f} samples/s")
    if (mfu := metrics.get("mfu")) is not None:
        parts.append(f"MFU {mfu:.1%}")
    if (peak := metrics.get("memory_peak")) is not None:
        parts.append(f"peak {format_bytes(peak)}")
    return "  ".join(parts)
