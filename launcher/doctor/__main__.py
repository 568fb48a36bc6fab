"""`python -m launcher.doctor`: examine this node. start.sh runs it before the ranks.

For a job of a profile with `checks: doctor`, it is the quick check of the node, and fails if something is
broken. In the doctor's own run it goes on with what the options of the run's command ask for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.doctor.board import Board
from launcher.doctor.examine import examine, worst
from launcher.doctor.measure.folders import QUICK_BYTES, THOROUGH_BYTES, folders_of_run, measure_folder
from launcher.doctor.measure.gpus import measure_gpus
from launcher.doctor.measure.host import measure_host
from launcher.doctor.options import Options
from launcher.doctor.page import page
from launcher.doctor.values import Expected, Measured
from launcher.rundir.files import read_record
from launcher.rundir.layout import RunDir
from launcher.spec import variables

NODE = 0
"Number of the first order, which is not given: every node measures itself."


def main(environ: Mapping[str, str] | None = None) -> int:
    """Return 0, or 1 if the node of an ordinary job is broken."""
    here, job = variables.split(environ or os.environ)
    os.environ.update(job)  # the ranks have the job's variables
    run = RunDir(Path(here[variables.RUN_DIR]))
    node, nodes = int(here.get(variables.NODE_RANK, "0")), int(here.get(variables.NODES, "1"))
    about, plan = read_record(run.run), read_record(run.plan)
    options = Options.of_command(about.get("job", {}).get("command") or ())
    expected = Expected.of(about, plan)
    board = Board(run.started(here).path / "doctor", node, nodes)
    values = measure_node(node, run.path, expected, thorough=options is not None and options.thorough)
    board.answer(NODE, {"values": [value.as_json() for value in values]})
    if options is None:
        return _told(values, expected, node)
    return 0


def measure_node(node: int, run: Path, expected: Expected, *, thorough: bool = False) -> list[Measured]:
    """Measure this node without its neighbours."""
    values = list(measure_host(node, run))
    if expected.gpus_per_node:
        values += measure_gpus(node)
    most = THOROUGH_BYTES if thorough else QUICK_BYTES
    for name, folder in folders_of_run(run, expected.nvme_dir).items():
        values += measure_folder(node, name, folder, most)
    return values


def _told(values: Sequence[Measured], expected: Expected, node: int) -> int:
    """Print what is broken. Return 1 if anything is."""
    found = [one for one in examine(values, expected) if one.verdict != "good"]
    if found:
        print("\n".join(page(f"doctor: node {node}", found, 1)), file=sys.stderr)
    return int(worst(found) == "broken")


if __name__ == "__main__":
    sys.exit(main())
