"""This node's place among the nodes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.options import Options
from launcher.doctor.values import Expected
from launcher.rundir.files import read_record
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.rundir.progress import newest
from launcher.spec import variables
from launcher.spec.events import AttemptStarted, SupervisorStarted

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """What a node knows before it measures anything."""

    run: RunDir
    attempt: AttemptDir
    node: int
    host: str
    "Address at which the other nodes reach node 0."
    port: int
    "Port of the ranks' rendezvous later in the run. It is free until then."
    expected: Expected
    options: Options | None
    "None in the run of an ordinary job."
    between_attempts: bool = False
    "Whether an attempt of an ordinary job has ended and another one will follow."

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """Read the environment that start.sh provides. Raises KeyError."""
        run = RunDir(Path(environ[variables.RUN_DIR]))
        about, plan = run.read_about(), read_record(run.plan)
        return cls(
            run=run,
            attempt=run.started(environ),
            node=int(environ.get(variables.NODE_RANK, "0")),
            host=environ.get(variables.RENDEZVOUS_HOST) or LOOPBACK,
            port=int(environ.get(variables.RENDEZVOUS_PORT, "0")),
            expected=Expected.of(about, plan),
            options=Options.of_command(about.job.command or ()),
            between_attempts=variables.ONLY_CHECK in environ,
        )

    @property
    def trained(self) -> bool:
        """Whether the run has trained a step on these nodes, as far as it records its steps."""
        numbers: list[int] = []
        for event in self.run.read_events():
            if isinstance(event, SupervisorStarted):
                numbers = []
            elif isinstance(event, AttemptStarted):
                numbers.append(event.attempt)
        return newest(self.run, "attempt") in numbers

    @property
    def leads(self) -> bool:
        return self.node == 0

    @property
    def local_ranks(self) -> dict[int, int]:
        """This node's global ranks, each with its local rank."""
        per = self.expected.ranks_per_node
        return {self.node * per + local: local for local in range(per)}
