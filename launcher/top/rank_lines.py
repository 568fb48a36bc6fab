"""The newest memory line of each rank in the last attempt."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from launcher.logs.new_lines import NewLines
from launcher.report.steps import number
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.spec.quantities import GIB

FIRST_BYTES = 8 * 1024
"Bytes to read at first from the end of a rank's file."
MAX_RANKS = 64
"Maximum number of ranks to read. If there are more, the first are read."
POINTS = 64


@dataclass
class Rank:
    """The memory of one rank. `bytes` is its GPU memory if known, or else its process's memory."""

    bytes: float | None = None
    on_gpu: bool = False
    gpu: float | None = None
    "GPU utilization in percent."
    cpu: float | None = None
    "CPU time in percent of one core."
    history: deque[float] = field(default_factory=lambda: deque(maxlen=POINTS))

    def take(self, line: dict[str, Any]) -> None:
        for name in ("used", "reserved", "peak", "allocated", "rss"):
            if (value := number(line.get(name))) is not None:
                self.bytes, self.on_gpu = value, name != "rss"
                self.history.append(value)
                break
        self.gpu, self.cpu = number(line.get("utilization")), number(line.get("cpu"))

    @property
    def short(self) -> str:
        """Memory in at most six characters, such as `12.3G` or `364M`."""
        if self.bytes is None:
            return ""
        mib = self.bytes / 2**20
        return f"{mib:.3g}M" if mib < 999.5 else f"{self.bytes / GIB:.3g}G"


class RankLines:
    """Reads the memory lines of ranks. Each call reads only what was added since the last one."""

    def __init__(self, run: RunDir, most: int = MAX_RANKS) -> None:
        self._run, self._most = run, most
        self._attempt: AttemptDir | None = None
        self._files: dict[int, NewLines] = {}
        self.ranks: dict[int, Rank] = {}

    def read(self) -> None:
        attempts = self._run.attempts()
        if not attempts:
            return
        if attempts[-1] != self._attempt:
            self._attempt, self._files, self.ranks = attempts[-1], {}, {}
        for rank in range(len(self._files), self._most):  # ranks count from 0; new ones may still appear
            path = attempts[-1].memory(rank)
            if not path.exists():
                break
            self._files[rank] = NewLines(path, FIRST_BYTES)
            self.ranks[rank] = Rank()
        for rank, lines in self._files.items():
            for line in lines.read():
                self.ranks[rank].take(line)
