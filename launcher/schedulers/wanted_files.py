"""Which files to fetch of a run that is on another host."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.rundir.file_table import LOG_FOLDERS


@dataclass(frozen=True)
class Wanted:
    """What to fetch besides the records. None selects all ranks or nodes."""

    logs: bool = False
    ranks: frozenset[int] | None = None
    nodes: frozenset[int] | None = None

    def covers(self, path: str) -> bool:
        """Return whether a round trip fetches `path` (relative to the run) if it is new."""
        parts = path.split("/")
        if not set(LOG_FOLDERS) & set(parts[:-1]):
            return True
        if not self.logs:
            return False
        ranks = self.ranks is None or any(parts[-1].startswith(f"rank-{rank:03d}.") for rank in self.ranks)
        nodes = self.nodes is None or any(f"node-{node:02d}" in parts for node in self.nodes)
        return ranks and nodes

    @property
    def condition(self) -> str:
        """The selection as conditions of `find`."""
        chosen = []
        for numbers, test in ((self.ranks, "-name 'rank-{:03d}.*'"), (self.nodes, "-path '*/node-{:02d}/*'")):
            if numbers is not None:
                either = " -o ".join(test.format(number) for number in sorted(numbers)) or "-false"
                chosen.append(rf"\( {either} \)")
        if not chosen:
            return ""
        inside = " -o ".join(f"-path '*/{name}/*'" for name in LOG_FOLDERS)
        return rf"\( ! \( {inside} \) -o {' '.join(chosen)} \)"
