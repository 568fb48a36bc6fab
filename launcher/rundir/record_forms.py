"""Forms of the records in a run directory. Every record is checked when it is read.

Ranks, other hosts and other versions write records too. Records of another form are skipped, so code that
reads them can rely on the fields listed here.
"""

from __future__ import annotations

from launcher.spec import failures
from launcher.spec.json_forms import STAMP, Form
from launcher.spec.json_forms import fits as fits

FAILURES = frozenset(failures.FAILURES) - {"succeeded"}

ERROR: Form = {
    "rank": int,
    "node?": int,
    "time?": float,
    "failure?": FAILURES,
    "phase?": str,
    "step?": int,
    "exception?": str,
    "why_not_in_process?": str,
    "collectives?": {"begun": int, "units": [str], "issued": [int]},
}
"errors/rank-*.json. A rank never reports its own success; its exit code does."

EXIT: Form = {
    "rank": int,
    "node?": int,
    "time?": float,
    "exit_code": int,
    "max_rss?": int,
    "memory_limit?": int,
    "last_lines?": [str],
    "clues?": [object],
    "exception?": str,
    "stopping?": bool,
    "killed?": bool,
}
"exits/rank-*.json. Clues are checked individually."

METRIC: Form = {
    "time": STAMP,
    "attempt": int,
    "step": int,
    "seconds": float,
    "seconds_lost?": float,
}
"A line of metrics.jsonl."
