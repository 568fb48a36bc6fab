"""Memory runs out everywhere, in three parts.

phases    Each sharding or mesh x phase x ranks x nodes, through real supervisors, to the end. A cell is
          compared with a run that begins with the recipe that fits: the same parameters at the end (fp32, to
          the rounding of the steps before the failure), every step done, no process left, in time. Several
          nodes are several supervisors on this machine, which share nothing but the run directory.
models    Each model of tests/train/zoo x place in its own code x ranks x step x probe x sharding, in groups
          of ranks without a supervisor. A cell is compared bit for bit with the run that changed its recipe
          before the step: parameters, optimizer states, buffers, randomness, attributes, the task's state.
restarts  Two cells of each model that a group cannot repeat in process, through a real supervisor. Parameters
          and buffers at the end are compared bit for bit.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from launcher.rundir.files import read_json_lines
from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import handover_folder
from launcher.spec.recipe import SHARDED, Recipe
from launcher.supervise.process import processes_of
from launcher.train.checkpoints.export import export

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "train"))

sys.path.insert(0, str(ROOT / "benchmarks"))


from cells import FAILING, Cell, cells_of, differences, results, whole_that_knew
from cells import STEPS as MODEL_STEPS
from launcher.spec.events import Downgrade, Resumed, Retry, StateNotSaved
from zoo import MODELS, Model
from zoo.failing import VARIABLE

STEPS, FAILS, BATCH, MICRO = 6, 4, 16, 4
TOLERANCE = 1e-5
"Of a parameter's largest value: the first steps added up their samples in another order."
SECONDS = 400.0
"A cell that takes longer hangs."

SHARDINGS = {
    "one device": {"sharding": "none"},
    "ddp": {"sharding": "ddp"},
    "zero1": {"sharding": "zero1"},
    "fsdp": {"sharding": "fsdp"},
    "fsdp-keep": {"sharding": "fsdp-keep"},
    "hybrid": {"sharding": "hybrid"},
    "cpu offload": {"sharding": "fsdp", "offload": "cpu"},
}
MESHES = {
    "tensor 2": {"sharding": "none", "tensor": 2},
    "ddp 2 x tensor 2": {"sharding": "ddp", "tensor": 2},
    "fsdp 2 x tensor 2": {"sharding": "fsdp", "tensor": 2},
    "pipeline 2 x zero1 2": {"sharding": "zero1", "pipeline": 2},
    "pipeline 2 x fsdp 2": {"sharding": "fsdp", "pipeline": 2},
    "zero-bubble pipeline 2": {"sharding": "none", "pipeline": 2, "schedule": "zero-bubble"},
    "interleaved pipeline 2": {"sharding": "none", "pipeline": 2, "virtual_stages": 2},
    "interleaved pipeline 2 x fsdp 2": {"sharding": "fsdp", "pipeline": 2, "virtual_stages": 2},
}
"Every failure on them is a restart, and there is no probe."
ALLOCATIONS = {
    "probe": 5, "init": 3, "data": 3, "forward": 4, "backward": 5, "optimizer": 6, "evaluation": 2,
    "checkpoint": 1,
}  # fmt: skip
RANKS = {"one device": 1, "hybrid": 4, **{name: 4 for name in MESHES if "x" in name.split()}}
"Two if left out."
STEP = {"probe": None, "init": None, "checkpoint": 5}
"Where memory runs out, if not in step FAILS."
WHO = ("all", "first", "last")

PhaseCell = tuple[str, str, str, int]
"(sharding, phase, ranks that fail, nodes)"


LEGEND = """# Memory that runs out under each sharding and mesh

Memory runs out on all ranks, the first or the last one, in the probe (shardings), init and checkpoint
(meshes), data, forward, backward, optimizer and evaluation of the fourth of six steps, through real
supervisors on CPU ranks. "In process" is the same attempt. "Other restart" is one without a complete
step to go on from (init), or with one rank of `ddp` or `hybrid` in the middle of its update."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="all if left out")
    parser.add_argument("--nodes", type=int, action="append", choices=(1, 2), help="of `phases`")
    parser.add_argument("--only", default="", help="cells whose names hold this text")
    parser.add_argument("--at-once", type=int, default=2, help="supervised cells that run at the same time")
    parser.add_argument("--save", action="store_true", help="write results/oom-matrix.json and .md")
    options = parser.parse_args()
    sections = {part: PARTS[part](options) for part in options.part or PARTS}
    for part, rows in sections.items():
        wrong = [row for row in rows if row["problems"]]
        print(f"{part}: {len(rows)} cells, {len(wrong)} with problems; {_ways(rows)}")
    if options.save:
        target = ROOT / "benchmarks" / "results" / "oom-matrix.json"
        report = json.loads(target.read_text()) if target.exists() else {}
        report |= {part: _section(part, rows, report.get(part, {})) for part, rows in sections.items()}
        target.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
        text = table(report["phases"]["cells"])
        target.with_suffix(".md").write_text(f"{LEGEND}\n\n{text}\n")
    return 1 if any(row["problems"] for rows in sections.values() for row in rows) else 0


def _ways(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {way: sum(row["way"] == way for row in rows) for way in sorted({row["way"] for row in rows})}


def table(cells: list[dict[str, Any]]) -> str:
    """Return the cells of `phases` by sharding or mesh and number of nodes."""
    lines = [
        "| sharding or mesh | nodes | cells | in process | restart from the last step | other restart "
        "| weights differ by at most |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for sharding, nodes in itertools.product(SHARDINGS | MESHES, (1, 2)):
        own = [cell for cell in cells if cell["cell"][0] == sharding and cell["cell"][3] == nodes]
        if not own:
            continue
        ways = ["in process", "restart, from shared-memory"]
        numbers = [sum(cell["way"] == way for cell in own) for way in ways]
        far = max(cell["distance"] for cell in own)
        columns = [sharding, nodes, len(own), *numbers, len(own) - sum(numbers), f"{far:.1e}"]
        lines.append(f"| {' | '.join(map(str, columns))} |")
    return "\n".join(lines)


def _section(part: str, rows: list[dict[str, Any]], before: dict[str, Any]) -> dict[str, Any]:
    command = shlex.join(["python", "benchmarks/oom_matrix.py", *sys.argv[1:]])
    made = {
        "command": command,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "ways": _ways(rows),
    }
    if part == "phases":
        again = [row["cell"] for row in rows]
        kept = [row for row in before.get("cells", []) if row["cell"] not in again]
        cells = [*kept, *({**row, "command": command} for row in rows)]
        return made | {"ways": _ways(cells), "tolerance": TOLERANCE, "cells": cells}
    models = {row["model"]: [one for one in rows if one["model"] == row["model"]] for row in rows}
    summary = {
        model: {"cells": len(own), "problems": sum(bool(one["problems"]) for one in own), "ways": _ways(own)}
        for model, own in models.items()
    }
    return made | {"summary": summary, "cells with problems": [row for row in rows if row["problems"]]}


def phases(options: argparse.Namespace) -> list[dict[str, Any]]:
    cells = [
        cell
        for cell in itertools.product(SHARDINGS | MESHES, ALLOCATIONS, WHO, options.nodes or (1, 2))
        if possible(*cell) and options.only in " ".join(map(str, cell))
    ]
    with tempfile.TemporaryDirectory() as folder:
        expected = {(s, n): known(Path(folder), s, n) for s, n in sorted({(c[0], c[3]) for c in cells})}
        with ThreadPoolExecutor(options.at_once) as pool:
            jobs = [pool.submit(tried, Path(folder), cell, expected[cell[0], cell[3]]) for cell in cells]
            return [job.result() for job in jobs]


def models(options: argparse.Namespace) -> list[dict[str, Any]]:
    every = [cell for model in MODELS for cell in cells_of(model) if options.only in str(cell)]
    rows = []
    for row in results(every):
        rows.append(row)
        said(row["cell"], row)
    return rows


def restarts(options: argparse.Namespace) -> list[dict[str, Any]]:
    every = [
        cell
        for model in MODELS
        for cell in (
            Cell(model, "ddp", "backward", "last", "middle", "always"),
            Cell(model, "fsdp", "forward", "last", "first", "never"),
        )
        if options.only in str(cell)
    ]
    with tempfile.TemporaryDirectory() as folder:
        # Forked ranks first: a process with threads cannot fork safely.
        expected = [
            whole_that_knew(Path(folder) / f"knew {at}", cell, FAILING[cell.step], cell.fits)
            for at, cell in enumerate(every)
        ]
        with ThreadPoolExecutor(options.at_once) as pool:
            return list(pool.map(restarted, [Path(folder)] * len(every), every, expected))


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "phases": phases,
    "models": models,
    "restarts": restarts,
}


def restarted(folder: Path, cell: Cell, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One cell of a model of the zoo, through a supervisor."""
    model, where = MODELS[cell.model], folder / cell.folder
    row: dict[str, Any] = {
        "cell": str(cell),
        "model": cell.model,
        "documented": cell.restarts,
        "problems": [],
    }
    if model.coupled:
        return row | {"way": "skipped: a smaller micro-batch is another objective"}
    asked = cell.asked
    job = {
        "task": model.task,
        "batch": {"global": asked.micro_batch_size * asked.grad_accum * cell.world},
        "steps": MODEL_STEPS,
        "resources": {"gpus_per_node": 0, "ranks_per_node": cell.world},
        "recipe": asked.model_dump(),
        "train": {**model.job.get("train", {}), "probe": cell.probe},
        # Some of the models are found to couple samples; the rung is given all the same.
        "retries": {"lower_micro_batch": True},
        "env": {VARIABLE: str(cell.fails)},
    }
    began, problems = time.perf_counter(), row["problems"]
    try:
        run, codes = launched(where, job, plan=partial(give_rung, rung=cell.fits))
        row |= told(run)
        problems += left_behind(run)
        if any(codes):
            problems.append(f"exit codes {codes}: {verdict(run)}")
        else:
            problems += of_a_restart(run, model, expected, row)
    except (subprocess.TimeoutExpired, OSError, RuntimeError, AssertionError) as error:
        problems.append(f"{type(error).__name__}: {error}")
        row.setdefault("way", "?")
    row["seconds"] = round(time.perf_counter() - began, 1)
    said(row["cell"], row)
    return row


def of_a_restart(
    run: RunDir, model: Model, expected: dict[str, torch.Tensor], row: dict[str, Any]
) -> list[str]:
    """What is wrong with a run that came to its end."""
    problems = []
    if row["steps"] != list(range(1, MODEL_STEPS + 1)):
        problems.append(f"steps {row['steps']}")
    if "restart" not in row["way"] or "in process" in row["way"]:
        problems.append(f"went on by {row['way']}")
    differ = differences(parameters(run, MODEL_STEPS), expected)
    if not model.forgets:
        problems += differ
    elif differ and not any(isinstance(one, StateNotSaved) for one in run.read_events()):
        resumed = [one.step for one in run.read_events() if isinstance(one, Resumed)]
        # It is told after the third step of an attempt; these runs have three in all.
        if MODEL_STEPS - max(resumed, default=0) >= 3:
            problems.append("attributes began anew, and nothing says so")
    return problems


def verdict(run: RunDir) -> str:
    """The exception of the last attempt's ranks."""
    errors = sorted(run.attempts()[-1].path.glob("errors/*.json"))
    return "; ".join(json.loads(one.read_text())["exception"][:200] for one in errors)


def give_rung(run: RunDir, rung: Recipe) -> None:
    """The only one: what the run goes on with is known before."""
    plan = json.loads(run.plan.read_text())
    plan["ladder"] = [rung.model_dump(mode="json")]
    run.plan.write_text(json.dumps(plan))


def said(cell: str, row: dict[str, Any]) -> None:
    seconds = row.get("seconds", 0.0)
    print(f"{cell:72} {row['way']:44} {seconds:5.1f} s  {'; '.join(row['problems'])}", flush=True)


def possible(sharding: str, phase: str, who: str, nodes: int) -> bool:
    if sharding in MESHES:
        return phase != "probe" and RANKS.get(sharding, 2) // nodes % MESHES[sharding].get("tensor", 1) == 0
    if phase in ("init", "checkpoint"):
        return False  # tests/train/test_recovery.py and tests/e2e/test_handover.py have them
    if sharding == "one device":
        return nodes == 1 and who == "all"
    return sharding != "hybrid" or nodes == 2


def known(folder: Path, sharding: str, nodes: int) -> dict[str, torch.Tensor]:
    """Parameters of the run that begins with the micro-batch that fits."""
    run, _ = launched(folder / f"{sharding} {nodes}", job_of(sharding, nodes, MICRO // 2, ""), nodes)
    return parameters(run, STEPS)


def tried(folder: Path, cell: PhaseCell, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    sharding, phase, who, nodes = cell
    at = STEP.get(phase, FAILS)
    step = "" if at is None else f"step={at},"
    # Where no micro-batch helps, what follows is another attempt with another recipe.
    plan = {"init": parameters_to_host, "optimizer": states_to_host, "checkpoint": states_to_host}.get(phase)
    until = "attempt=0" if plan else f"micro_batch={MICRO}"
    drill = f"rank={who},{step}phase={phase},allocation={ALLOCATIONS[phase]},{until}"
    where = folder / " ".join(map(str, cell))
    began = time.perf_counter()
    problems: list[str] = []
    row: dict[str, Any] = {"cell": list(cell)}
    try:
        run, codes = launched(where, job_of(sharding, nodes, MICRO, drill), nodes, plan)
        if any(codes):
            problems.append(f"exit codes {codes}")
        else:
            row["distance"] = distance(parameters(run, STEPS), expected)
            if row["distance"] > TOLERANCE:
                problems.append(f"parameters differ by {row['distance']:.1e}")
        problems += left_behind(run)
        row |= told(run)
        if row["steps"] != list(range(1, STEPS + 1)):
            problems.append(f"steps {row['steps']}")
        if row["way"] == "nothing failed":
            problems.append("nothing failed")
        if row["done_twice"] and "from shared-memory" in row["way"]:
            problems.append(f"steps {row['done_twice']} were done twice")
    except (subprocess.TimeoutExpired, OSError, RuntimeError, AssertionError) as error:
        problems.append(f"{type(error).__name__}: {error}")
        row.setdefault("way", "?")
    row |= {"seconds": round(time.perf_counter() - began, 1), "problems": problems}
    said(" / ".join(map(str, cell)), row)
    return row


def told(run: RunDir) -> dict[str, Any]:
    """How the run went on, and which steps its metrics have."""
    events = run.read_events()
    lowered = [one for one in events if isinstance(one, Downgrade | Retry)]
    in_process = [one for one in lowered if isinstance(one, Downgrade) and one.in_process]
    kinds = ["in process" if one in in_process else "restart" for one in lowered]
    sources = [one.from_ or "checkpoint" for one in events if isinstance(one, Resumed)]
    steps = Counter(line["step"] for line in read_json_lines(run.metrics))
    return {
        "way": ", ".join([*kinds, *(f"from {source}" for source in sources)]) or "nothing failed",
        "steps": sorted(steps),
        "done_twice": [step for step, times in steps.items() if times > 1],
        "seconds_in_process": [one.seconds for one in in_process if one.seconds is not None],
    }


def left_behind(run: RunDir) -> list[str]:
    found = [f"process {one.pid}" for one in processes_of(run.path)]
    if handover_folder(run, 0).parent.exists():
        found.append("shared memory")
    return found


def job_of(sharding: str, nodes: int, micro: int, drill: str) -> dict[str, Any]:
    ranks = RANKS.get(sharding, 2)
    return {
        "task": "in_parts:InParts" if sharding in MESHES else "ragged:Ragged",
        "args": {"layers": 4} if sharding in MESHES else {},
        "batch": {"global": BATCH},
        "steps": STEPS,
        "resources": {"nodes": nodes, "gpus_per_node": 0, "ranks_per_node": ranks // nodes},
        "recipe": {
            "precision": "fp32",
            "optimizer": "adamw",
            "micro_batch_size": micro,
            **(SHARDINGS | MESHES)[sharding],
        },
        "train": {"checkpoint_every": 5, "eval_every": 2, "probe": "always", "lr": 1e-2},
        "env": {"TRAIN_MEMORY_FAIL": drill},
    }


def launched(
    folder: Path, job: dict[str, Any], nodes: int = 1, plan: Callable[[RunDir], None] | None = None
) -> tuple[RunDir, list[int]]:
    """To its end; the exit code of each node's supervisor. `plan`: changes the plan before the start."""
    job = {"name": "cell", "workdir": str(ROOT / "tests" / "train"), **job}
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
        "XDG_CACHE_HOME": str(folder.parent),  # cells of the same recipe share its trace
    }
    render = [sys.executable, "-m", "launcher", "render", "job.yaml", "-c", "here.yaml", "--out", "run"]
    subprocess.run(render, cwd=folder, env=env, check=True, capture_output=True)
    run = RunDir(folder / "run")
    if plan is not None:
        plan(run)
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


def states_to_host(run: RunDir) -> None:
    """Give the rung that an estimate would have found for the optimizer's step."""
    recipe = json.loads(run.plan.read_text())["recipe"]
    give_rung(run, Recipe.model_validate({**recipe, "offload": "cpu-optimizer"}))


def parameters_to_host(run: RunDir) -> None:
    """Give a rung with fewer parameters on the device, which only FSDP can do."""
    recipe = json.loads(run.plan.read_text())["recipe"]
    sharding = recipe["sharding"] if recipe["sharding"] in SHARDED else "fsdp"
    give_rung(run, Recipe.model_validate({**recipe, "sharding": sharding, "offload": "cpu"}))


def address() -> str:
    """Of this machine, but not loopback, which several nodes could not share."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family.name == "AF_INET" and not one.address.startswith("127."):
                return str(one.address)
    raise SystemExit("this machine has no network address but loopback")


def parameters(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    out = run.path / "exported"
    export(run.checkpoints / f"step-{step:08d}", out)
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
