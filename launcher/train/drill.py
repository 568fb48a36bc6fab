"""Fire drills: memory runs out where one says so. To see what a run does then, and for tests."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from launcher.spec.drill import DRILLS, Drill, parse_drills
from launcher.train.rank import Rank, SetupError
from launcher.train.where import Where


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
    try:
        drills = parse_drills(os.environ.get(DRILLS, ""), rank.world)
    except ValueError as error:
        raise SetupError(f"{DRILLS}: {error}") from None
    mine = [
        drill
        for drill in drills
        if drill.rank in (None, rank.number) and drill.attempt in (None, rank.attempt.number)
    ]
    return Drills(mine, where, rank.recipe.micro_batch_size) if mine else None
