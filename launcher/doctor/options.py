"""The options of a doctor's run. They travel as arguments of the command that its ranks execute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.doctor.values import START, Level


@dataclass(frozen=True)
class Options:
    level: Level = "standard"
    tune: bool = False
    "Search for faster settings even if nothing is broken."

    @property
    def thorough(self) -> bool:
        return self.level == "thorough"

    @property
    def command(self) -> list[str]:
        """Return the command of a run with these options."""
        return ["python", "-m", START, f"--{self.level}", *(["--tune"] if self.tune else [])]

    @classmethod
    def of_command(cls, command: Sequence[str]) -> Options | None:
        """Return the options of a run from its job's command; None if it is not a doctor's run."""
        levels: tuple[Level, ...] = ("quick", "standard", "thorough")
        for level in levels:
            for tune in (False, True):
                if list(command) == (options := cls(level, tune)).command:
                    return options
        return None
