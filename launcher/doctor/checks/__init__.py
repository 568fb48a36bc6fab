"""The table of all checks: a row for each measured value, with what is expected of it.

Judging is pure: a measured value and what is expected give an opinion. `launcher.doctor.measure` measures.
"""

from __future__ import annotations

from launcher.doctor.checks import collectives, folders, gpus, host, job, model, network, run, search
from launcher.doctor.checks.row import Check

PARTS = (run, host, gpus, folders, network, collectives, search, model, job)
CHECKS: dict[str, Check] = {row.name: row for part in PARTS for row in part.ROWS}
"In the order of the page."
