"""The table of all checks: a row for each measured value, with what is expected of it.

Judging is pure: a measured value and what is expected give an opinion. `launcher.doctor.measure` measures.
"""

from __future__ import annotations

from launcher.doctor.checks import collectives, folders, gpus, host, network, run
from launcher.doctor.checks.row import Check

ROWS = (*run.ROWS, *host.ROWS, *gpus.ROWS, *folders.ROWS, *network.ROWS, *collectives.ROWS)
CHECKS: dict[str, Check] = {row.name: row for row in ROWS}
"In the order of the page."
