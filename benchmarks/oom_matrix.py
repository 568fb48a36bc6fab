"""Memory runs out everywhere: each sharding x phase x ranks x nodes, through real supervisors, to the end.

Each cell is held against a run that begins with the recipe that fits: the same parameters at the end (fp32,
to the rounding of the steps that were done before the failure), every step done, nobody left behind, in time.
Several nodes are several supervisors on this machine, which share nothing but the run directory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from launcher.runs.files import read_json_lines
from launcher.runs.layout import RunDir
from launcher.runs.shared import handover_folder
from launcher.supervise.process import processes_of
from launcher.train.checkpoints.export import export

ROOT = Path(__file__).resolve().parents[1]
STEPS, FAILS, BATCH, MICRO = 6, 4, 16, 4
TOLERANCE = 1e-5
"Of a parameter's largest value: the first steps added up their samples in another order."
SECONDS = 150.0
"A cell that takes longer hangs."

SHARDINGS = {
    "one device": {"sharding": "none"},
    "ddp": {"sharding": "ddp"},
    "fsdp": {"sharding": "fsdp"},
    "fsdp-keep": {"sharding": "fsdp-keep"},
    "hybrid": {"sharding": "hybrid"},
    "cpu offload": {"sharding": "fsdp", "offload": "cpu"},
}
ALLOCATIONS = {"probe": 5, "data": 3, "forward": 4, "backward": 5, "optimizer": 6, "evaluation": 2}
WHO = ("all", "first", "last")

Cell = tuple[str, str, str, int]
"(sharding, phase, ranks that fail, nodes)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, action="append", choices=(1, 2))
    parser.add_argument("--only", help="cells whose names hold this text")
    parser.add_argument("--at-once", type=int, default=2, help="cells that run at the same time")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/oom-matrix.json")
    options = parser.parse_args()
    cells = [
        cell
        for cell in itertools.product(SHARDINGS, ALLOCATIONS, WHO, options.nodes or (1, 2))
        if possible(*cell) and (options.only or "") in " ".join(map(str, cell))
    ]
    with tempfile.TemporaryDirectory() as folder:
        expected = {(s, n): known(Path(folder), s, n) for s, n in sorted({(c[0], c[3]) for c in cells})}
        with ThreadPoolExecutor(options.at_once) as pool:
            jobs = [pool.submit(tried, Path(folder), cell, expected[cell[0], cell[3]]) for cell in cells]
            rows = [job.result() for job in jobs]
    wrong = [row for row in rows if row["problems"]]
    ways = {way: sum(row["way"] == way for row in rows) for way in sorted({row["way"] for row in rows})}
    print(f"{len(rows)} cells, {len(wrong)} with problems; {ways}")
    if options.save:
        report = {
            "command": f"python benchmarks/oom_matrix.py {' '.join(sys.argv[1:])}",
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "torch": torch.__version__,
            "tolerance": TOLERANCE,
            "ways": ways,
            "cells": rows,
        }
        target = ROOT / "benchmarks" / "results" / "oom-matrix.json"
        target.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
    return 1 if wrong else 0


def possible(sharding: str, phase: str, who: str, nodes: int) -> bool:
    if sharding == "one device":
        return nodes == 1 and who == "all"
    return sharding != "hybrid" or nodes == 2


def known(folder: Path, sharding: str, nodes: int) -> dict[str, torch.Tensor]:
    """Parameters of the run that begins with the micro-batch that fits."""
    run, _ = launched(folder / f"{sharding} {nodes}", sharding, nodes, MICRO // 2, "")
    return parameters(run)


def tried(folder: Path, cell: Cell, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    sharding, phase, who, nodes = cell
    step = "" if phase == "probe" else f"step={FAILS},"
    # In the optimizer's step no micro-batch helps: what follows is another attempt with another recipe.
    until = "attempt=0" if phase == "optimizer" else f"micro_batch={MICRO}"
    drill = f"rank={who},{step}phase={phase},allocation={ALLOCATIONS[phase]},{until}"
    where = folder / " ".join(map(str, cell))
    began = time.perf_counter()
    problems: list[str] = []
    row: dict[str, Any] = {"cell": list(cell)}
    try:
        run, codes = launched(where, sharding, nodes, MICRO, drill)
        if any(codes):
            problems.append(f"exit codes {codes}")
        else:
            row["distance"] = distance(parameters(run), expected)
            if row["distance"] > TOLERANCE:
                problems.append(f"parameters differ by {row['distance']:.1e}")
        problems += left_behind(run)
        row |= told(run)
        if row["steps"] != list(range(1, STEPS + 1)):
            problems.append(f"steps {row['steps']}")
        if row["way"] == "nothing failed":
            problems.append("nothing failed")
    except (subprocess.TimeoutExpired, OSError, RuntimeError, AssertionError) as error:
        problems.append(f"{type(error).__name__}: {error}")
        row.setdefault("way", "?")
    row |= {"seconds": round(time.perf_counter() - began, 1), "problems": problems}
    print(
        f"{' / '.join(map(str, cell)):48} {row['way']:44} {row['seconds']:5.1f} s  {'; '.join(problems)}",
        flush=True,
    )
    return row


def told(run: RunDir) -> dict[str, Any]:
    """How the run went on, and which steps its metrics have."""
    events = run.read_events()
    lowered = [one for one in events if one["event"] in ("downgrade", "retry")]
    kinds = ["in process" if one.get("in_process") else "restart" for one in lowered]
    sources = [one.get("from", "checkpoint") for one in events if one["event"] == "resumed"]
    return {
        "way": ", ".join([*kinds, *(f"from {source}" for source in sources)]) or "nothing failed",
        "steps": sorted({line["step"] for line in read_json_lines(run.metrics)}),
        "seconds_in_process": [
            one["seconds"] for one in lowered if "seconds" in one and one.get("in_process")
        ],
    }


def left_behind(run: RunDir) -> list[str]:
    found = [f"process {one.pid}" for one in processes_of(run.path)]
    if handover_folder(run, 0).parent.exists():
        found.append("shared memory")
    return found


def launched(folder: Path, sharding: str, nodes: int, micro: int, drill: str) -> tuple[RunDir, list[int]]:
    """To its end; the exit code of each node's supervisor."""
    ranks = {"one device": 1, "hybrid": 4}.get(sharding, 2)
    job = {
        "name": "cell",
        "task": "ragged:Ragged",
        "workdir": str(ROOT / "tests" / "train"),
        "batch": {"global": BATCH},
        "steps": STEPS,
        "resources": {"nodes": nodes, "gpus_per_node": 0, "ranks_per_node": ranks // nodes},
        "recipe": {
            "precision": "fp32",
            "optimizer": "adamw",
            "micro_batch_size": micro,
            **SHARDINGS[sharding],
        },
        "train": {"checkpoint_every": 5, "eval_every": 2, "probe": "always", "lr": 1e-2},
        "env": {"TRAIN_MEMORY_FAIL": drill},
    }
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(json.dumps(job))
    (folder / "here.yaml").write_text(
        f"name: here\nscheduler: slurm\nmax_nodes: 2\npaths: {{python: {json.dumps(sys.executable)}}}\n"
        "slurm: {gpu_request: none}\n"
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(folder),
        "XDG_CACHE_HOME": str(folder),
    }
    render = [sys.executable, "-m", "launcher", "render", "job.yaml", "-c", "here.yaml", "--out", "run"]
    subprocess.run(render, cwd=folder, env=env, check=True, capture_output=True)
    run = RunDir(folder / "run")
    if "phase=optimizer" in drill:
        give_another_rung(run)
    command = [sys.executable, "-m", "launcher.supervise", str(run.path), "--nodes", str(nodes)]
    command += ["--rendezvous", address(), "--port-base", str(61000 + hash(str(folder)) % 4000)]
    with open(folder / "log", "w", encoding="utf-8") as log:
        supervisors = [
            subprocess.Popen([*command, "--node-rank", str(node)], env=env, stdout=log, stderr=log)
            for node in range(nodes)
        ]
        try:
            deadline = time.monotonic() + SECONDS
            codes = [one.wait(max(1.0, deadline - time.monotonic())) for one in supervisors]
        finally:
            for one in supervisors:
                one.kill()
    return run, codes


def give_another_rung(run: RunDir) -> None:
    """What an estimate would have found: a smaller micro-batch does not help an optimizer."""
    plan = json.loads(run.plan.read_text())
    offload = "cpu-optimizer" if plan["recipe"]["offload"] == "none" else "cpu"
    rung = {**plan["recipe"], "offload": offload}
    if rung == plan["recipe"]:  # everything is on the host already
        rung |= {"offload": "cpu-optimizer"}
    plan["ladder"] = [rung]
    run.plan.write_text(json.dumps(plan))


def address() -> str:
    """Of this machine, but not loopback, which several nodes could not share."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family.name == "AF_INET" and not one.address.startswith("127."):
                return str(one.address)
    raise SystemExit("this machine has no network address but loopback")


def parameters(run: RunDir) -> dict[str, torch.Tensor]:
    out = run.path / "exported"
    export(run.checkpoints / f"step-{STEPS:08d}", out)
    return {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys() and ours
    found = [
        ((value - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-12)).item()
        for name, value in ours.items()
    ]
    return float(max(found))


if __name__ == "__main__":
    raise SystemExit(main())
