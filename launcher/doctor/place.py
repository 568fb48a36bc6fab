"""This node among the nodes of a doctor's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.options import Options
from launcher.doctor.values import Expected
from launcher.rundir.files import read_record
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.spec import variables

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """What this node knows before it measures anything."""

    run: RunDir
    attempt: AttemptDir
    node: int
    host: str
    "Address of node 0, as the other nodes reach it."
    port: int
    "Port at which the ranks of the run meet afterwards. It is free until then."
    expected: Expected
    options: Options | None
    "None in the run of an ordinary job."

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """Read the environment that start.sh has. Raises KeyError."""
        run = RunDir(Path(environ[variables.RUN_DIR]))
        about, plan = read_record(run.run), read_record(run.plan)
        return cls(
            run=run,
            attempt=run.started(environ),
            node=int(environ.get(variables.NODE_RANK, "0")),
            host=environ.get(variables.RENDEZVOUS_HOST) or LOOPBACK,
            port=int(environ.get(variables.RENDEZVOUS_PORT, "0")),
            expected=Expected.of(about, plan),
            options=Options.of_command(about.get("job", {}).get("command") or ()),
        )

    @property
    def leads(self) -> bool:
        return self.node == 0

    @property
    def local_ranks(self) -> dict[int, int]:
        """The ranks of this node, over all nodes, with the local rank of each."""
        per = self.expected.ranks_per_node
        return {self.node * per + local: local for local in range(per)}
