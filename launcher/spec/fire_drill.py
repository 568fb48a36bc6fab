"""Simulated OOMs that a job's `env:` asks for: a memory budget on the CPU, and fire drills.

`TRAIN_MEMORY_FAIL="rank=last,step=2,phase=backward,allocation=3,micro_batch=8"`; separate several by `;`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from launcher.spec.quantities import parse_bytes
from launcher.spec.verdict import Phase

BUDGET = "TRAIN_MEMORY_BUDGET"
DRILLS = "TRAIN_MEMORY_FAIL"
PHASES: tuple[str, ...] = get_args(Phase)
_KEYS = (
    "rank: all, first, last or a number (default all); step: a number (default any, counted from 1); "
    f"phase: {', '.join(PHASES)}; allocation: its index in that phase of that step (default 1); "
    "micro_batch: smallest micro-batch for which it fails; attempt: a number (default any, counted from 0)"
)


@dataclass(frozen=True)
class Drill:
    """One simulated OOM. It happens once per process, so that the repeated step succeeds."""

    text: str
    phase: str
    rank: int | None = None
    "None: all ranks."
    step: int | None = None
    allocation: int = 1
    micro_batch: int = 0
    attempt: int | None = None
    "None: any attempt."


def env_problems(env: Mapping[str, object], ranks: int = sys.maxsize) -> Iterator[tuple[str, str]]:
    """Yield (variable, message) for invalid drills and budgets in `env:`, of a job with `ranks` ranks.

    Without `ranks`, every rank may exist.
    """
    try:
        parse_budget(str(env.get(BUDGET, "")))
    except ValueError as error:
        yield BUDGET, str(error)
    try:
        parse_drills(str(env.get(DRILLS, "")), ranks)
    except ValueError as error:
        yield DRILLS, str(error)


def counts_allocations(env: Mapping[str, str], gpus_per_node: int) -> bool:
    """Return whether the ranks count each allocation: for drills, and for a budget on the CPU."""
    return bool(env.get(DRILLS, "").strip("; ")) or (gpus_per_node == 0 and bool(env.get(BUDGET)))


def parse_budget(text: str) -> int | None:
    """Return the budget in bytes, or None if `text` is empty. Raises ValueError."""
    if not text:
        return None
    budget = int(parse_bytes(text))
    if budget < 1:
        raise ValueError(f"{text!r} is too little memory; write for example 8GiB")
    return budget


def parse_drills(text: str, world: int) -> list[Drill]:
    """Return the drills of a run with `world` ranks. Raises ValueError."""
    return [_parse(part.strip(), world) for part in text.split(";") if part.strip()]


def _parse(text: str, world: int) -> Drill:
    values: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in ("rank", "step", "phase", "allocation", "micro_batch", "attempt"):
            raise _wrong(text, f"{key!r} is not a key")
        if key in values:
            raise _wrong(text, f"{key} is given twice")
        values[key] = value
    if values.get("phase") not in PHASES:
        raise _wrong(text, f"{values['phase']!r} is not a phase" if "phase" in values else "phase is missing")
    return Drill(
        text=text,
        phase=values["phase"],
        rank=_rank(text, values.get("rank", "all"), world),
        step=_number(text, "step", values["step"]) if "step" in values else None,
        allocation=_number(text, "allocation", values.get("allocation", "1")),
        micro_batch=_number(text, "micro_batch", values["micro_batch"]) if "micro_batch" in values else 0,
        attempt=_number(text, "attempt", values["attempt"], least=0) if "attempt" in values else None,
    )


def _rank(text: str, value: str, world: int) -> int | None:
    named = {"all": None, "first": 0, "last": world - 1}
    if value in named:
        return named[value]
    if not value.isdecimal() or int(value) >= world:
        raise _wrong(text, f"rank {value!r} is not one of the {world}")
    return int(value)


def _number(text: str, key: str, value: str, least: int = 1) -> int:
    if not value.isdecimal() or int(value) < least:
        raise _wrong(text, f"{key} is {value!r}, not a number from {least} on")
    return int(value)


def _wrong(text: str, what: str) -> ValueError:
    return ValueError(f"{what} in {text!r}. {_KEYS}")
