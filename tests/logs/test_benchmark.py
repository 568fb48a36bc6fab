"""The benchmark of the logs runs, scaled down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_runs_scaled_down() -> None:
    command = [
        sys.executable,
        "benchmarks/logs.py",
        "--ranks",
        "8",
        "--lines",
        "100",
        "--chatty",
        "1000",
        "--repeat",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of sort -m" in done.stdout
    assert "longest" in done.stdout
