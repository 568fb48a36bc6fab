"""The form of the records below a run directory, checked when they are read.

Ranks, other hosts and other versions write there, too: a record of another form is left out, and what reads
records relies on the fields that are listed here.
"""

from __future__ import annotations

from launcher.spec import failures
from launcher.spec.forms import STAMP, Form
from launcher.spec.forms import fits as fits
from launcher.spec.record import form_of
from launcher.spec.records import StateRecord

FAILURES = frozenset(failures.FAILURES) - {"succeeded"}
STATE = form_of(StateRecord)
"state.json."

ERROR: Form = {
    "rank": int,
    "node?": int,
    "time?": float,
    "failure?": FAILURES,
    "phase?": str,
    "step?": int,
    "exception?": str,
    "why_not_in_process?": str,
}
"errors/rank-*.json: a rank never tells of itself that it succeeded; its exit code does."

EXIT: Form = {
    "rank": int,
    "node?": int,
    "time?": float,
    "exit_code": int,
    "max_rss?": int,
    "memory_limit?": int,
    "last_lines?": [str],
    "exception?": str,
    "stopping?": bool,
}
"exits/rank-*.json. Clues are checked one by one."

METRIC: Form = {
    "time": STAMP,
    "attempt": int,
    "step": int,
    "seconds": float,
    "seconds_lost?": float,
}
"A line of metrics.jsonl."
