"""Results of FSDP's self-test, shared by ranks that are forked from a process that has imported this module.

The self-test takes a second of CPU time on each rank, half of a short run. The first rank of a set-up
runs it; later ones read its result. `tests/train/drains.py` and ranks that start afresh always run it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from launcher.rundir.files import replace_json
from launcher.train.rank import Rank
from launcher.train.recovery import selftest

FOLDER = "SELF_TESTS"
"The environment variable that names the folder of a test run's results; tests/conftest.py sets it."
Run = Callable[[Rank, DeviceMesh], "str | None"]


def shared(folder: str, run: Run, rank: Rank, mesh: DeviceMesh) -> str | None:
    which = (rank.recipe.sharding, rank.recipe.offload, *mesh.shape, rank.local, rank.per_node)
    file = Path(folder, f"{'-'.join(map(str, which))}.json")
    if not file.exists():
        replace_json(file, {"problem": run(rank, mesh)})
    problem: str | None = json.loads(file.read_text())["problem"]
    return problem


if FOLDER in os.environ:
    alone = selftest.self_test
    selftest.self_test = functools.wraps(alone)(functools.partial(shared, os.environ[FOLDER], alone))
