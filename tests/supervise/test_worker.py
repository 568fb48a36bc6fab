"""What the worker gives a rank that torchrun does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SAY = """
import os
print(os.environ.get("GLIBC_TUNABLES", "none")[:22], os.environ["RANK"], os.environ["MASTER_PORT"])
"""
HUGE = "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    ("facts", "env", "heap"),
    [
        ({"job": {"task": "m:T"}, "gpus_per_node": 0}, {}, HUGE),
        ({"job": {"task": "m:T"}, "gpus_per_node": 0}, {"GLIBC_TUNABLES": "the user's"}, "the user's"),
        ({"job": {"task": "m:T"}, "gpus_per_node": 1}, {}, "none"),
        ({"job": {"command": ["x"]}, "gpus_per_node": 0}, {}, "none"),
    ],
)
def test_a_task_on_the_cpu_has_its_heap_in_huge_pages(
    tmp_path: Path, facts: dict[str, object], env: dict[str, str], heap: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(facts))
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_RUN_ID": "r", "LAUNCHER_ATTEMPT": "0"}
    outside = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    subprocess.run(
        [sys.executable, "-m", "launcher.supervise.worker", "--alone", "--", sys.executable, "-c", SAY],
        env={**outside, **place, "LAUNCHER_RENDEZVOUS_PORT": "61007", **env},
        check=True,
    )
    said = (tmp_path / "attempts/000/logs/node-00/rank-000.out").read_text()
    assert said.partition(" ")[2].strip() == f"{heap} 0 61007"
