"""The table of all checks: a row for each measured value, with what is expected of it.

Judging is pure: a measured value and what is expected give an opinion. `launcher.doctor.measure` measures.
"""

from __future__ import annotations

from launcher.doctor.checks import folders, gpus, host, run
from launcher.doctor.checks.row import Check

CHECKS: dict[str, Check] = {row.name: row for row in (*run.ROWS, *host.ROWS, *gpus.ROWS, *folders.ROWS)}
"In the order of the page."
