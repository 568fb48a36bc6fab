"""Fire drills: memory runs out where one says so. To see what a run does then, and for tests.

`TRAIN_MEMORY_FAIL="rank=last,step=2,phase=backward,allocation=3,micro_batch=8"`; several with
`;` between them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import get_args

from launcher.train.rank import Rank, SetupError
from launcher.train.where import Phase, Where

VARIABLE = "TRAIN_MEMORY_FAIL"
PHASES: tuple[str, ...] = get_args(Phase)
_KEYS = (
    "rank: all, first, last or a number (default all); step: a number (default any, counted from 1); "
    f"phase: {', '.join(PHASES)}; allocation: the how manieth in that phase of that step (default 1); "
    "micro_batch: only while the micro-batch is at least so large; attempt: only in that one, counted from 0"
)


@dataclass(frozen=True)
class Drill:
    """One failure. It happens once in a process; the step that is repeated then has room."""

    text: str
    phase: str
    rank: int | None = None
    "None: all."
    step: int | None = None
    allocation: int = 1
    micro_batch: int = 0
    attempt: int | None = None
    "None: any."


@dataclass
class Drills:
    """Those of this rank that are still to come."""

    coming: list[Drill]
    where: Where
    micro_batch: int
    "At the start; `where.micro_batch` once it has changed."
    _seen: dict[Drill, int] = field(default_factory=dict)
    "How many allocations it has let pass in this step."
    _step: int | None = None

    def strikes(self) -> str | None:
        """To be asked at every allocation. The text of the drill that lets it fail."""
        if self.where.step != self._step:
            self._step, self._seen = self.where.step, {}
        micro_batch = self.where.micro_batch or self.micro_batch
        for drill in self.coming:
            if (
                drill.phase == self.where.phase
                and drill.step in (None, self.where.step)
                and drill.micro_batch <= micro_batch
            ):
                self._seen[drill] = self._seen.get(drill, 0) + 1
                if self._seen[drill] >= drill.allocation:
                    self.coming.remove(drill)
                    self._seen.clear()
                    return drill.text
        return None

    def missed(self, attempt: int) -> list[str]:
        """Texts of those that have not struck, at the end of the training in this attempt. A later attempt
        than theirs does not know: they may have struck in the one before."""
        return [drill.text for drill in self.coming if (drill.attempt or 0) == attempt]


def read_drills(rank: Rank, where: Where) -> Drills | None:
    """What the environment asks of this rank. Raises SetupError."""
    drills = parse_drills(os.environ.get(VARIABLE, ""), rank.world)
    mine = [
        drill
        for drill in drills
        if drill.rank in (None, rank.number) and drill.attempt in (None, rank.attempt.number)
    ]
    return Drills(mine, where, rank.recipe.micro_batch_size) if mine else None


def parse_drills(text: str, world: int) -> list[Drill]:
    """Raises SetupError."""
    return [_parse(part.strip(), world) for part in text.split(";") if part.strip()]


def _parse(text: str, world: int) -> Drill:
    values: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in ("rank", "step", "phase", "allocation", "micro_batch", "attempt"):
            raise _wrong(text, f"{key!r} is not a key")
        if key in values:
            raise _wrong(text, f"{key} stands there twice")
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


def _wrong(text: str, what: str) -> SetupError:
    return SetupError(f"{VARIABLE}: {what} in {text!r}. {_KEYS}")
