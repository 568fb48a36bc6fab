"""How long a verb takes before it does anything, next to importing the peers. Best of N starts."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = [sys.executable, "-m", "launcher"]
JOB = str(ROOT / "templates" / "job" / "job.yaml")

# (what, command, goal in seconds)
CASES = (
    ("python -c pass", [sys.executable, "-c", "pass"], None),
    ("launcher --help", [*LAUNCHER, "--help"], 0.2),
    ("launcher render JOB -c local", [*LAUNCHER, "render", JOB, "-c", "local"], 0.5),
    ("launcher list (50 runs)", [*LAUNCHER, "list", "--limit", "0"], 0.5),
    ("import submitit", [sys.executable, "-c", "import submitit"], None),
    ("import torchx.runner", [sys.executable, "-c", "import torchx.runner"], None),
    ("torchx --help", [sys.executable, "-m", "torchx.cli.main", "--help"], None),
    ("import torch", [sys.executable, "-c", "import torch"], None),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cli.json")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        env = _folder_with_runs(Path(folder), 50)
        for what, command, goal in CASES:
            seconds = _best(command, folder, env, options.starts)
            results.append({"what": what, "seconds": seconds, "goal": goal})
            shown = "not installed" if seconds is None else f"{seconds:.3f} s"
            verdict = (
                ""
                if goal is None or seconds is None
                else f"  goal {goal} s: {'met' if seconds < goal else 'MISSED'}"
            )
            print(f"{what:32} {shown:>14}{verdict}")
    report = {
        "command": "python benchmarks/cli.py --save",
        "starts": options.starts,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {
            name: _version(name)
            for name in ("gpu-launcher", "torch", "torchx", "submitit", "typer", "pydantic")
        }
        | {"python": platform.python_version()},
        "results": results,
    }
    print(report["machine"], report["versions"])
    if options.save:
        target = ROOT / "benchmarks" / "results" / "cli.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
    missed = [r for r in results if r["goal"] and r["seconds"] and r["seconds"] >= r["goal"]]
    return 1 if missed else 0


def _folder_with_runs(folder: Path, count: int) -> dict[str, str]:
    """Ended runs for `launcher list`."""
    for number in range(count):
        run = folder / "runs" / f"bench-{number:04d}"
        run.mkdir(parents=True)
        (run / "run.json").write_text(
            json.dumps({"job": {"name": "bench", "steps": 10}, "created": "2026-01-01T00:00"})
        )
        (run / "state.json").write_text(json.dumps({"state": "succeeded", "attempt": 0}))
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state")}


def _best(command: list[str], folder: str, env: dict[str, str], starts: int) -> float | None:
    times = []
    for _ in range(starts):
        begin = time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        times.append(time.perf_counter() - begin)
        if done.returncode != 0:
            return None
    return round(min(times), 3)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
