"""CPU time and memory of `launcher plan --json`: the first plan of a model, and the next one.

The user CPU time counts, because other programs change it least. On a busy machine it is up to twice as long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM, MEMORY = 1.0, 1.0
"Goals for the next plan in seconds, and for the most memory of any plan in GiB."
AUTO = ("--set", "recipe=auto")

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
            (cold, most), (warm, _) = (_plan(example, cluster, more, cache) for _ in ("first", "next"))
        met = goal is None or (cold <= goal and warm <= WARM and most <= MEMORY)
        figures = {"first": round(cold, 2), "next": round(warm, 2), "GiB": round(most, 2)}
        results.append({"what": what, **figures, "goal": goal, "met": met if goal else None})
        verdict = "" if goal is None else f"  goal {goal:g} s, {WARM:g} s: {'met' if met else 'MISSED'}"
        print(f"{what:26} first {cold:6.2f} s, next {warm:5.2f} s, {most:.2f} GiB{verdict}", flush=True)
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


def _plan(example: str, cluster: str, more: tuple[str, ...], cache: str) -> tuple[float, float]:
    """Return the user CPU time of a plan in seconds, and its most memory in GiB."""
    job = str(ROOT / "examples" / f"{example}.yaml")
    command = [sys.executable, "-m", "launcher", "plan", job, "-c", cluster, *more, "--json"]
    env = {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return used.ru_utime, used.ru_maxrss / 2**20


if __name__ == "__main__":
    sys.exit(main())
