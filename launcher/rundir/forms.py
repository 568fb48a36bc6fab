"""The form of the records below a run directory, checked when they are read.

Ranks, other hosts and other versions write there, too: a record of another form is left out, and what reads
records relies on the fields that are listed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from launcher.spec.verdict import FailureClass

Form = Any
"""A type or a union of types (`int` takes no bool, `float` takes an int); a set of values; a pattern that a
text matches; `[form]`, a list of any length; `(form, form)`, a list of that length; or a mapping of keys to
forms, where a key that ends with `?` may be missing or null, and `*` stands for keys that are not named."""


def fits(value: object, form: Form) -> bool:
    """Whether a JSON value has this form."""
    if isinstance(form, Mapping):
        return isinstance(value, dict) and _keys_fit(value, form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(fits, value, form))
    if isinstance(form, frozenset):
        return isinstance(value, str) and value in form
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and form.fullmatch(value) is not None
    if isinstance(value, bool):
        return form is object or bool in _types(form)
    return isinstance(value, form) or (isinstance(value, int) and float in _types(form))


def _keys_fit(value: Mapping[str, object], form: Mapping[str, Form]) -> bool:
    named = {key.removesuffix("?"): key for key in form if key != "*"}
    if any(name not in value and not key.endswith("?") for name, key in named.items()):
        return False
    for name, inner in value.items():
        key = named.get(name, "*")
        if not (inner is None and key.endswith("?")) and not fits(inner, form.get(key, object)):
            return False
    return True


def _types(form: Form) -> tuple[type, ...]:
    return get_args(form) or (form,)


STAMP = re.compile(r"\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-6]\d(\.\d+)?Z?")
FAILURES = frozenset(get_args(FailureClass)) - {"succeeded"}
STATES = frozenset(
    {
        "rendered",
        "submitted",
        "running",
        "stopping",
        "lost",
        "succeeded",
        "failed",
        "interrupted",
        "cancelled",
    }
)
"Of a run. `rendered`: written by `launcher render --out`, and not started since."

ABOUT: Form = {
    "id?": str,
    "created?": str,
    "workdir?": str,
    "job?": {"name?": str, "command?": list, "env?": dict, "batch?": dict, "steps?": int},
    "cluster?": {
        "name?": str,
        "scheduler?": str,
        "paths?": {"runs?": str, "python?": str},
        "login?": str,
        "ssh?": {"hosts": [str]},
        "runpod?": dict,
    },
    "sweep?": {"id": str},
}
"run.json. Of the cluster's sections, more is checked where the profile is read again."

STATE: Form = {
    "state": STATES,
    "reason?": str,
    "time?": str,
    "failure?": str,
    "attempt?": int,
}
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

_RECIPE: Form = {"micro_batch_size": int, "grad_accum": int}
_CHANGE: Form = {
    "reason?": str,
    "changes?": {"*": (object, object)},
    "in_process?": bool,
    "seconds?": float,
}
_AT: Form = {"phase?": str, "step?": int, "rank?": int}

_EVENTS: Mapping[str, Form] = {
    "attempt": {"attempt": int, "recipe": _RECIPE},
    "ended": {"attempt": int, "failure": str, "reason": str},
    "downgrade": {**_CHANGE, **_AT},
    "climb": {**_CHANGE, **_AT},
    "retry": {"reason": str},
    "probe": {"micro_batch_size": int, "planned?": int, "asked?": int, "seconds": float},
    "handover": {"attempt": int, "step": int, "bytes": int},
    "handover-skipped": {"reason": str, "step?": int},
    "resumed": {"step": int},
    "data-changed": {"reason": str},
    "checkpoint": {"step": int},
    "checkpoint-failed": {"step": int, "reason": str},
    "stopping": {"reason": str},
    "waiting": {"reason": str},
    "submitting": {"submission?": int},
    "submitted": {"handle?": str},
    "resubmitted": {"handle?": str},
    "finished": {
        "state?": str,
        "reason?": str,
        "last_state?": {"step": int, "reason": str, "checkpoint": int},
    },
}


def is_event(value: object) -> bool:
    """Whether a line of events.jsonl is one: what is not listed has a name and a time."""
    if not fits(value, {"event": str, "time": STAMP}):
        return False
    assert isinstance(value, dict)
    return fits(value, _EVENTS.get(value["event"], {}))
