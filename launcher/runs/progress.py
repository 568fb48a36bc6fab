"""How far a run is, read from the end of metrics.jsonl."""

from __future__ import annotations

import json
import os
from typing import Any

from launcher.runs.layout import RunDir

_TAIL_BYTES = 16 * 1024


def last_metrics(run: RunDir) -> dict[str, Any]:
    """The newest whole line, or {}. Reads at most 16 KiB."""
    try:
        with open(run.metrics, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def last_step(run: RunDir) -> int | None:
    step = last_metrics(run).get("step")
    return step if isinstance(step, int) else None
