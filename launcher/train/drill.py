"""Fire drills: let a chosen allocation fail, to see how a run reacts, and for tests."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from launcher.spec.fire_drill import DRILLS, Drill, parse_drills
from launcher.train.phase import Where
from launcher.train.rank import Rank, SetupError


@dataclass
class Drills:
    """The drills of this rank that have not taken place yet."""

    coming: list[Drill]
    where: Where
    micro_batch: int
    "Micro-batch at the start; `where.micro_batch` replaces it once it has changed."
    _seen: dict[Drill, int] = field(default_factory=dict)
    "Number of matching allocations in this step, by drill."
    _step: int | None = None

    def strikes(self) -> str | None:
        """Return the text of the drill that fails this allocation, or None. Call it once per allocation."""
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
        """Return the texts of drills for `attempt` that have not taken place by the end of training.

        Drills for earlier attempts are not included: this attempt cannot know whether they took place.
        """
        return [drill.text for drill in self.coming if (drill.attempt or 0) == attempt]


def read_drills(rank: Rank, where: Where) -> Drills | None:
    """Return the drills that the environment sets for this rank, or None. Raises SetupError."""
    try:
        drills = parse_drills(os.environ.get(DRILLS, ""), rank.world)
    except ValueError as error:
        raise SetupError(f"{DRILLS}: {error}") from None
    own = [
        drill
        for drill in drills
        if drill.rank in (None, rank.number) and drill.attempt in (None, rank.attempt.number)
    ]
    return Drills(own, where, rank.recipe.micro_batch_size) if own else None
