"""The data of a visible run, which is read repeatedly."""

from __future__ import annotations

from functools import cached_property

from launcher.report.run_report import capacity_of_rank
from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir
from launcher.top.progress import Progress
from launcher.top.rank_lines import Rank, RankLines


class Live:
    """The data of a visible run. Call `read` to update it."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.progress, self.first_rank = Progress(run), RankLines(run, most=1)
        self.ranks: RankLines | None = None

    def read(self) -> None:
        self.progress.read()
        self.first_rank.read()

    @cached_property
    def capacity(self) -> int | None:
        """Memory that a rank may use, in bytes."""
        return capacity_of_rank(self.run.read_about(), read_record(self.run.plan))

    def all_ranks(self) -> dict[int, Rank]:
        self.ranks = self.ranks or RankLines(self.run)
        self.ranks.read()
        return self.ranks.ranks
