"""The options of a doctor's run. They are arguments of the command that its ranks execute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from launcher.doctor.job_needs import JobNeeds
from launcher.doctor.values import START, Level

PROGRAM = ("python", "-m", START)
TUNE = "--tune"


@dataclass(frozen=True)
class Options:
    """The options of a doctor's run."""

    level: Level = "standard"
    tune: bool = False
    "Search for faster settings even if nothing is broken."
    job: JobNeeds | None = None
    "Needs of the job that should start on the nodes."

    @property
    def thorough(self) -> bool:
        return self.level == "thorough"

    @property
    def command(self) -> list[str]:
        """Return the command of a run with these options."""
        extra = [*([TUNE] if self.tune else []), *([self.job.argument] if self.job is not None else [])]
        return [*PROGRAM, f"--{self.level}", *extra]

    @classmethod
    def of_command(cls, command: Sequence[str]) -> Options | None:
        """Return the options of a run from its job's command; None if it is not a doctor's run."""
        program, arguments = tuple(command[:3]), list(command[3:])
        level = next((level for level in get_args(Level) if f"--{level}" in arguments), None)
        if program != PROGRAM or level is None:
            return None
        job = next((argument for argument in arguments if argument.startswith("--job=")), None)
        return cls(level, TUNE in arguments, JobNeeds.of_argument(job) if job is not None else None)
