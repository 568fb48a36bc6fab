"""`make slurm`: a cluster to try launcher on, and what to type."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from ruamel.yaml import YAML

from tests.slurm.cluster import ROOT, Cluster, ClusterError, missing
from tests.slurm.shape import Shape

FOLDER = Path(tempfile.gettempdir()) / f"launcher-slurm-{os.getuid()}"
"Not in the checkout: the path of a socket may have 107 characters."
SHAPE = Shape(nodes=4, gpus_per_node=0)


def main() -> int:
    cluster = Cluster(FOLDER)
    if sys.argv[1:] == ["stop"]:
        cluster.stop()
        return 0
    if why := missing():
        print(f"no Slurm here: {why}", file=sys.stderr)
        return 1
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    cluster.stop()
    try:
        cluster.start(SHAPE)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    profile = {
        "name": "try",
        "scheduler": "slurm",
        "max_nodes": SHAPE.nodes,
        "paths": {"python": sys.executable, "runs": str(ROOT / "runs")},
        "slurm": {"partition": "main", "gpu_request": "none"},
    }
    YAML().dump(profile, FOLDER / "try.yaml")
    launcher = Path(sys.executable).with_name("launcher")
    print(f"""
Four nodes, n1 to n4; partitions main, short, scavenge (a job in main preempts it), scavenge-cancel. Type:

  export SLURM_CONF={FOLDER}/slurm.conf
  {launcher} submit examples/llama-tiny.yaml -c {FOLDER}/try.yaml --set resources.nodes=2 --follow

Then what you like: sinfo, squeue, {launcher} status. A node dies:
  {sys.executable} -m tests.slurm.cluster crash {FOLDER} n1    (start-node: back again)
The end: make slurm-stop""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
