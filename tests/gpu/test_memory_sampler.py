"""The GPU memory of a command's rank, by NVML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir.files import read_json_lines
from launcher.supervise.memory_sampler import MemorySampler
from tests.lab import wait_for

pytestmark = pytest.mark.gpu

GIB = 2**30
HOLDS = """
import torch
held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
print("held", flush=True)
input()
"""


def test_what_a_process_holds_on_its_gpu_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "rank-000.jsonl"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDS], **pipes) as rank:
        assert rank.stdout.readline() == "held\n"
        sampler = MemorySampler(path, rank.pid, ranks=1, gpus=True)
        wait_for(lambda: path.exists() and read_json_lines(path), "a sample")
        rank.communicate("\n")
    sampler.close()
    first = read_json_lines(path)[0]
    assert GIB <= first["used"] < 3 * GIB and 0 <= first["utilization"] <= 100
