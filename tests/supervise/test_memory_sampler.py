"""The memory of a command's rank is that of its processes together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher.rundir.files import read_json_lines
from launcher.rundir.time import seconds_of
from launcher.supervise.memory_sampler import MemorySampler
from tests.lab import wait_for

MIB = 2**20
HELD = 96 * MIB
# Its child says when it holds the memory, and ends with the standard input.
PARENT = f"""
import subprocess, sys
child = "held = bytearray({HELD}); print('held', flush=True); input()"
subprocess.run([sys.executable, "-c", child])
"""


def test_the_memory_of_descendants_counts_and_the_file_ends_with_the_rank(tmp_path: Path) -> None:
    path = tmp_path / "memory" / "rank-000.jsonl"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", PARENT], **pipes) as rank:
        assert rank.stdout.readline() == "held\n"
        sampler = MemorySampler(path, rank.pid, ranks=1, gpus=True)  # without NVML there is no `used`
        wait_for(lambda: path.exists() and len(read_json_lines(path)) >= 2, "samples")
        rank.communicate("\n")
    sampler.close()
    lines = read_json_lines(path)
    assert [line["sample"] for line in lines[:2]] == [1, 2]
    assert HELD < lines[0]["rss"] < HELD + 100 * MIB
    assert all(0 <= line["cpu"] <= 100 for line in lines[1:]), "it waits for its input"
    assert seconds_of(lines[0]["time"]) < seconds_of(lines[1]["time"])
