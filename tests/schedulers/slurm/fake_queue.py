"""Slurm's commands as small programs, and the end of a run as its supervisor records it."""

from __future__ import annotations

from pathlib import Path

from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir

TIMES = "2026-11-21T23:00:00|N/A|N/A|1:00"
SQUEUE = f"{{id}}|{{state}}|main|n1|{TIMES}|(null)|(null)|1|1|100M|N/A|(null)|None|{{run}}"


class Queue:
    """Slurm's commands, with a queue that the test writes."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.lines, self.sent = folder / "bin", folder / "queue", folder / "sent"
        self.bin.mkdir()
        self.lines.write_text("")
        for name, text in {
            "sbatch": f'printf "%s\\n" "$@" >>"{self.sent}"; echo 12',
            "squeue": f'cat "{self.lines}"',
            "sacct": 'echo "Slurm accounting storage is disabled" >&2; exit 1',
            "scontrol": "exit 1",
            "srun": "exit 1",
        }.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
            (self.bin / name).chmod(0o755)

    def has(self, **states: str) -> None:
        """`has(_12="RUNNING")`"""
        rows = [SQUEUE.format(id=id_[1:], state=state, run="run") for id_, state in states.items()]
        self.lines.write_text("".join(f"{row}\n" for row in rows))


def ended(run: RunDir, failure: str, reason: str = "why") -> None:
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    replace_json(attempt.verdict, {"failure": failure, "reason": reason, "then": "stop"})
    state = "succeeded" if failure == "succeeded" else "failed"
    replace_json(run.state, {"state": state, "failure": failure, "reason": reason})
