"""Submitting to Slurm: launcher next to sbatch by hand, submitit's executor and TorchX, on two real clusters.

One takes any job, one enforces associations, limits and QOS, so that launcher asks slurmdbd as well.
Seconds until the command that submits is back (a new process each time, as from a shell), and until the own
code of the job runs: plain Python, or the first rank of one or two. launcher starts the ranks of a node
without torchrun; everybody else is given it, as their users do. `cold`: with nothing kept of the last hour.
Median of N rounds, in which all take turns. For scale: slurm_scale.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.slurm.cluster import Cluster, missing, slurm_version  # noqa: E402
from tests.slurm.shape import Shape  # noqa: E402

PAYLOAD = """\
import os, sys, time
new = f"{sys.argv[1]}.{os.getpid()}"
open(new, "w").write(str(time.time()))
try:
    os.link(new, sys.argv[1])  # the first rank's time stays
except FileExistsError:
    pass
"""
SBATCH = """#!/bin/bash
#SBATCH --partition=main --nodes=1 --ntasks=1 --output=/dev/null
srun {command} {folder}/payload.py "$1"
"""
# As a user of submitit writes it.
SUBMITIT = """
import subprocess, sys, submitit
executor = submitit.SlurmExecutor(folder=f"{sys.argv[1]}/submitit")
executor.update_parameters(partition="main", nodes=1, ntasks_per_node=1)
executor.submit(subprocess.check_call, sys.argv[2:])
"""
PLAIN, TORCHRUN, TWO = "python", *(f"torchrun --standalone --nproc-per-node={ranks}" for ranks in (1, 2))


SITES = {"plain": False, "enforced": True}
SUBMIT_SECONDS = {"plain": 0.25, "enforced": 0.3}


def started(folder: Path, enforced: bool) -> Cluster:
    """With an account of the user's where accounts are enforced."""
    cluster = Cluster(folder)
    folder.mkdir()
    enforce = ("associations", "limits", "qos") if enforced else ()
    cluster.start(Shape(nodes=2, gpus_per_node=0, enforce=enforce))
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    for words in (["account", "bench"], ["user", user, "account=bench"]) if enforced else ():
        subprocess.run(
            ["sacctmgr", "-iQ", "add", *words], env={**os.environ, **cluster.env()}, capture_output=True
        )
    return cluster


class Bench:
    """A project folder and one cluster."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster, self.count = folder, cluster, 0
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = {
            **os.environ, **cluster.env(), "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache"),
        }  # fmt: skip
        # An installed package comes with its bytecode; a checkout keeps it only where it may.
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)
        (folder / "payload.py").write_text(PAYLOAD)
        (folder / "with_submitit.py").write_text(SUBMITIT)
        for name, command in (("plain", PLAIN), ("torchrun", TORCHRUN), ("two", TWO)):
            text = SBATCH.format(command=command, folder=folder)
            (folder / f"{name}.sbatch").write_text(text)
        profile = {
            "name": "lab", "scheduler": "slurm",
            "paths": {"python": sys.executable, "runs": str(folder / "runs")},
            "slurm": {"partition": "main", "gpu_request": "none"},
        }  # fmt: skip
        (folder / "lab.yaml").write_text(json.dumps(profile))

    def ways(self) -> dict[str, Callable[[Path], list[str]]]:
        folder, python = str(self.folder), sys.executable
        found: dict[str, Callable[[Path], list[str]]] = {
            "sbatch: python": lambda out: ["sbatch", "plain.sbatch", str(out)],
            "sbatch: 1 rank": lambda out: ["sbatch", "torchrun.sbatch", str(out)],
            "sbatch: 2 ranks": lambda out: ["sbatch", "two.sbatch", str(out)],
            "launcher: 1 rank": lambda out: self.launcher(out, 1),
            "launcher: 2 ranks": lambda out: self.launcher(out, 2),
            "launcher: 1 rank, cold": lambda out: self.launcher(out, 1, cold=True),
            "submitit: python": lambda out: [
                *(python, "with_submitit.py", folder, python, f"{folder}/payload.py", str(out))
            ],
            "submitit: 1 rank": lambda out: [
                *(python, "with_submitit.py", folder, *TORCHRUN.split(), f"{folder}/payload.py", str(out))
            ],
        }
        if importlib.util.find_spec("torchx") is None:
            print("torchx is left out: it is not installed")
            return found
        found["torchx: 1 rank"] = lambda out: self.torchx(out, 1)
        found["torchx: 2 ranks"] = lambda out: self.torchx(out, 2)
        return found

    def torchx(self, out: Path, ranks: int) -> list[str]:
        component = ["dist.ddp", "-j", f"1x{ranks}", "--memMB", "3000", "--script", "payload.py", "--"]
        cluster = ["-s", "slurm", "-cfg", "partition=main,time=10"]
        return [sys.executable, "-m", "torchx.cli.main", "run", *cluster, *component, str(out)]

    def launcher(self, out: Path, ranks: int, *, cold: bool = False) -> list[str]:
        if cold:
            shutil.rmtree(self.folder / "cache" / "launcher" / "slurm", ignore_errors=True)
        job = str(self.job(out, ranks))
        return [sys.executable, "-m", "launcher", "submit", job, "-c", "lab.yaml"]

    def job(self, out: Path, ranks: int) -> Path:
        path = out.with_suffix(".yaml")
        job = {
            "name": "bench", "command": ["python", "payload.py", str(out)], "batch": {"global": ranks},
            "resources": {"gpus_per_node": 0, "nodes": 1, "ranks_per_node": ranks},
        }  # fmt: skip
        path.write_text(json.dumps(job))
        return path

    def measure(self, command: Callable[[Path], list[str]]) -> tuple[float, float, float]:
        """Seconds: to the end of the submission, its CPU time, and to the first line of the job's code."""
        self.count += 1
        out = self.folder / f"out-{self.count}"
        words = command(out)
        before, began = cpu_of_children(), time.time()
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True)
        submitted, cpu = time.time() - began, cpu_of_children() - before
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        deadline = time.monotonic() + 120
        while not out.exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(words)}: the job did not start")
            time.sleep(0.02)
        first = float(out.read_text()) - began
        while subprocess.check_output(["squeue", "-h"], env=self.env):  # the next one finds an idle cluster
            time.sleep(0.1)
        time.sleep(1 + random.random())  # Slurm schedules once a second: nobody always meets the same moment
        return submitted, cpu, first

    def interpreter(self) -> float:
        began = time.time()
        subprocess.run([sys.executable, "-c", "pass"], env=self.env, check=True)
        return time.time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/slurm-submit.json")
    options = parser.parse_args()
    if why := missing():
        print(f"left out: {why}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    benches: dict[str, Bench] = {}
    times: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    python = []
    try:
        for site, enforced in SITES.items():
            (folder / site).mkdir()
            benches[site] = Bench(folder / site, started(folder / site / "cluster", enforced))
        for _ in range(options.rounds):  # in turn: what else the machine does hits all alike
            python.append(next(iter(benches.values())).interpreter())
            for site, bench in benches.items():
                for name, command in bench.ways().items():
                    times.setdefault((site, name), []).append(bench.measure(command))
    finally:
        for site in SITES:
            Cluster(folder / site / "cluster").stop()
        shutil.rmtree(folder, ignore_errors=True)
    interpreter = statistics.median(python)
    rows = [{"site": site, **row_of(name, found)} for (site, name), found in times.items()]
    print(f"{'':34} {'submitted':>10} {'of CPU':>10} {'first line':>11}   seconds")
    print(f"{'python -c pass':34} {interpreter:10.3f}")
    for row in rows:
        where = f"{row['site']}, {row['way']}"
        print(f"{where:34} {row['submit_seconds']:10.3f} {row['cpu_seconds']:10.3f}", end="")
        print(f" {row['first_line_seconds']:11.3f}")
    goals = []
    for site in SITES:
        its = {row["way"]: row for row in rows if row["site"] == site}
        goals += [(f"{site}: {text}", value, met) for text, value, met in goals_of(site, its, interpreter)]
    for text, value, met in goals:
        print(f"{text}: {value}  {'met' if met else 'MISSED'}")
    report = {
        "command": "python benchmarks/slurm.py --save",
        "rounds": options.rounds,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": versions(),
        "interpreter_seconds": round(interpreter, 3),
        "ways": rows,
        "goals": [{"goal": text, "measured": value, "met": met} for text, value, met in goals],
    }
    if options.save:
        target = ROOT / "benchmarks" / "results" / "slurm-submit.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
    return 0 if all(met for _, _, met in goals) else 1


def row_of(name: str, found: list[tuple[float, float, float]]) -> dict[str, Any]:
    return {
        "way": name,
        **{
            key: round(statistics.median(times), 3)
            for key, times in zip(
                ("submit_seconds", "cpu_seconds", "first_line_seconds"), zip(*found, strict=True), strict=True
            )
        },
    }


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def goals_of(site: str, rows: dict[str, dict[str, Any]], interpreter: float) -> list[tuple[str, str, bool]]:
    submitted = rows["launcher: 1 rank"]["submit_seconds"]
    most = SUBMIT_SECONDS[site]
    goals = [(f"submission within {most} s", f"{submitted:.2f} s", submitted <= most)]
    for ranks, most in (("1 rank", 1.0), ("2 ranks", 1.1)):
        ours, raw = rows[f"launcher: {ranks}"], rows[f"sbatch: {ranks}"]
        ratio = ours["first_line_seconds"] / (raw["first_line_seconds"] + interpreter)
        text = f"first line, {ranks}, against sbatch + interpreter start, at most {most} x"
        goals.append((text, f"{ratio:.2f} x", ratio <= most))
        if torchx := rows.get(f"torchx: {ranks}"):
            for key, what in (("first_line_seconds", "first line"), ("submit_seconds", "submission")):
                ratio = ours[key] / torchx[key]
                goals.append((f"{what}, {ranks}, against TorchX", f"{ratio:.2f} x", ratio < 1))
    return goals


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "slurm": ".".join(map(str, slurm_version()))}
    for name in ("gpu-launcher", "submitit", "torchx", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
