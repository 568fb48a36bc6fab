"""Time and memory of `launcher plan --json`: the first plan of a model, and the next one.

Run it while nothing else runs: the first plan uses two cores. The CPU time is also shown, because other
programs change it less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WARM, MEMORY = 1.0, 1.0
"Goals for the next plan in seconds, and for the most memory of any plan in GiB."
AUTO = ("--set", "recipe=auto")
LOOK_EVERY = 0.5
"Seconds between two readings of a plan's memory. Each stops the plan for milliseconds."

# (what, example, cluster, options, goal for the first plan in seconds)
CASES = (
    ("7B, recipe: auto", "llama-7b", "runpod-a6000", AUTO, 10.0),
    ("70B, recipe: auto", "llama-70b", "runpod-8xh100", AUTO, 15.0),
    ("405B, recipe: auto", "llama-405b", "slurm-h100", AUTO, 15.0),
    ("70B, QLoRA, recipe: auto", "llama-70b-qlora", "runpod-a6000", AUTO, None),
    ("405B in stages", "llama-405b-stages", "slurm-h100", (), None),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of the names of cases; all without")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/plans.json")
    options = parser.parse_args()
    results = []
    for what, example, cluster, more, goal in CASES:
        if options.cases and not any(part in what for part in options.cases):
            continue
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (_plan(example, cluster, more, cache) for _ in ("first", "next"))
        met = goal is None or (cold.seconds <= goal and warm.seconds <= WARM and cold.memory <= MEMORY)
        figures = {
            "first": round(cold.seconds, 2),
            "first, CPU time": round(cold.cpu, 2),
            "next": round(warm.seconds, 2),
            "GiB": round(cold.memory, 2),
        }
        results.append({"what": what, **figures, "goal": goal, "met": met if goal else None})
        verdict = "" if goal is None else f"  goal {goal:g} s, {WARM:g} s: {'met' if met else 'MISSED'}"
        print(
            f"{what:26} first {cold.seconds:6.2f} s ({cold.cpu:.2f} s of CPU time), "
            f"next {warm.seconds:5.2f} s, {cold.memory:.2f} GiB{verdict}",
            flush=True,
        )
    report = {
        "command": "python benchmarks/plans.py --save",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "versions": {name: version(name) for name in ("gpu-launcher", "torch")}
        | {"python": platform.python_version()},
        "results": results,
    }
    print(report["machine"], report["versions"])
    if options.save:
        target = ROOT / "benchmarks" / "results" / "plans.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
    return 1 if any(one["met"] is False for one in results) else 0


class Used(NamedTuple):
    seconds: float
    cpu: float
    "User CPU time of all its processes in seconds."
    memory: float
    "The most memory of all its processes together in GiB; shared pages count once."


def _plan(example: str, cluster: str, more: tuple[str, ...], cache: str) -> Used:
    job = str(ROOT / "examples" / f"{example}.yaml")
    command = [sys.executable, "-m", "launcher", "plan", job, "-c", cluster, *more, "--json"]
    env = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
    began, memory, looked = time.monotonic(), 0.0, 0.0
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
        if (passed := time.monotonic() - began) > looked + LOOK_EVERY:
            memory, looked = max(memory, _memory(process.pid)), passed
        time.sleep(0.02)
    seconds = time.monotonic() - began
    _, status, used = ended
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return Used(seconds, used.ru_utime, memory)


def _memory(pid: int) -> float:
    total = 0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *children):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except OSError:  # one of them has just ended
        return 0.0
    return total / 2**20


if __name__ == "__main__":
    sys.exit(main())
