"""The table of all checks, with a row for each kind of measured value.

Judging is pure: it maps a measured value and the expectations to an opinion. The code that measures is in
`launcher.doctor.measure`.
"""

from __future__ import annotations

from launcher.doctor.checks import collectives, folders, gpus, host, job, model, network, run, search
from launcher.doctor.checks.row import Check

PARTS = (run, host, gpus, folders, network, collectives, search, model, job)
CHECKS: dict[str, Check] = {row.name: row for part in PARTS for row in part.ROWS}
"In the order of the page."
