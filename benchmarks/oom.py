"""What running out of memory costs: launcher's probe, recovery in process and restart, next to other ways.

One model and one memory budget, on the CPU, for all: the largest micro-batch does not fit, a smaller one
does. Each way is held against the same way when it knows the answer in advance: seconds of the whole run,
optimizer steps done twice or never, and the difference of the last loss. The budget lies between the measured
peaks of the micro-batch that fits and of the next larger one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
LR = 3e-4


@dataclass(frozen=True)
class Setting:
    """What is trained: micro-batches of `fits` samples fit into the budget, twice as many do not."""

    task: str
    args: dict[str, Any]
    batch: int
    fits: int
    steps: int
    gpus: int = 0
    precision: str = "fp32"


CPU = Setting(
    "launcher.tasks.gpt:PydocGPT", {"layers": 4, "dim": 128, "heads": 4, "context": 128}, 16, 4, steps=20
)
MODEL = {"task": CPU.task, "args": CPU.args}
BATCH, FITS, STEPS = CPU.batch, CPU.fits, CPU.steps
LATE = STEPS // 2
"The step in which the failure is injected, where it is not the budget's own."

PLENTY = 2**40

Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/oom-cpu.json")
    options = parser.parse_args()
    budget = measured_budget()
    print(f"budget {budget / MIB:.1f} MiB: {FITS} samples at once fit, {2 * FITS} do not\n")
    rows = [compare(name, *pair, options.rounds) for name, pair in ways(budget).items()]
    goals = goals_of({row["way"]: row for row in rows})
    for text, value, met in goals:
        print(f"{text}: {value}  {'met' if met else 'MISSED'}")
    report = {
        "command": f"python benchmarks/oom.py {' '.join(sys.argv[1:])}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("gpu-launcher", "torch", "accelerate", "lightning")}
        | {"python": platform.python_version()},
        "budget_bytes": budget,
        "ways": rows,
        "goals": [{"goal": text, "measured": value, "met": met} for text, value, met in goals],
    }
    if options.save:
        target = ROOT / "benchmarks" / "results" / "oom-cpu.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
    return 0 if all(met for _, _, met in goals) else 1


Way = Callable[[], Found]


def ways(budget: int) -> dict[str, tuple[Way, Way]]:
    """Name -> (the run, the same run that knows the answer)."""

    def ours(micro: int, limit: int = budget, **more: Any) -> Way:
        return lambda: run_launcher(limit, micro, **more)

    def late(rank: str, phase: str) -> str:
        return f"rank={rank},step={LATE},phase={phase},micro_batch={2 * FITS}"

    two = {"ranks": 2, "limit": PLENTY}  # the failure is injected: the budget is that of one rank
    found = {
        "launcher: probe, as planned": (ours(FITS, probe="always"), ours(FITS)),
        "launcher: probe, two rungs lower": (ours(BATCH, probe="always"), ours(FITS)),
        "launcher: in process": (ours(BATCH), ours(FITS)),
        "launcher: in process, fsdp, one rank of two": (
            ours(2 * FITS, sharding="fsdp", fail=late("last", "backward"), **two),
            ours(FITS, sharding="fsdp", **two),
        ),
        "launcher: restart, ddp, one rank of two": (
            ours(2 * FITS, sharding="ddp", fail=late("last", "backward"), **two),
            ours(FITS, sharding="ddp", **two),
        ),
        "shell loop": (lambda: run_shell_loop(budget, BATCH), lambda: run_shell_loop(budget, FITS)),
    }
    for peer in ("accelerate", "lightning"):
        if importlib.util.find_spec(peer) is None:
            print(f"{peer} is left out: it is not installed")
            continue
        found[peer] = (
            lambda peer=peer: run_peer(budget, peer, BATCH),  # type: ignore[misc]
            lambda: run_shell_loop(budget, FITS),
        )
    return found


def compare(name: str, way: Way, knowing: Way, rounds: int) -> Found:
    runs = [(way(), knowing()) for _ in range(rounds)]
    overhead = statistics.median(one["seconds"] - other["seconds"] for one, other in runs)
    one, other = runs[-1]
    row = {
        "way": name,
        "overhead_seconds": round(overhead, 2),
        "of_seconds": round(statistics.median(other["seconds"] for _, other in runs), 2),
        "steps_repeated": one["repeated"],
        "steps_missing": STEPS - one["distinct"],
        "samples_per_step": one["samples"],
        "loss": one["loss"],
        "loss_difference": abs(one["loss"] - other["loss"]),
        **{
            key: statistics.median(run[key] for run, _ in runs)
            for key in ("recovery_seconds", "step_seconds", "start_seconds", "restart_seconds")
            if all(key in run for run, _ in runs)
        },
    }
    print(
        f"{name:45} +{row['overhead_seconds']:6.2f} s of {row['of_seconds']:.1f}  "
        f"steps repeated {row['steps_repeated']}, missing {row['steps_missing']}  "
        f"samples a step {row['samples_per_step']}  loss off by {row['loss_difference']:.1e}",
        flush=True,
    )
    return row


def goals_of(rows: dict[str, Found]) -> list[tuple[str, str, bool]]:
    probe, within = rows["launcher: probe, as planned"], rows["launcher: in process, fsdp, one rank of two"]
    restart = rows["launcher: restart, ddp, one rank of two"]
    asked, step = probe["recovery_seconds"], probe["step_seconds"]
    ours = [row for name, row in rows.items() if name.startswith("launcher")]
    lost = sum(row["steps_missing"] for row in ours)
    ratio = restart["restart_seconds"] / restart["start_seconds"]
    return [
        ("probe, one confirmation, against a step", f"{asked:.3f} s of {step:.3f} s", asked < step),
        (
            "recovery in process, without the repeated step",
            f"{within['recovery_seconds']:.3f} s",
            within["recovery_seconds"] < 1,
        ),
        ("restart against the bare start of the ranks", f"{ratio:.2f} x", ratio < 1.3),
        ("steps lost", str(lost), not lost),
    ]


def measured_budget() -> int:
    """Bytes between the peaks of FITS samples at once and of twice as many."""
    peaks = [run_launcher(PLENTY, size)["peak"] for size in (FITS, 2 * FITS)]
    return round(sum(peaks) / 2)


def run_launcher(budget: int, micro: int, **how: Any) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        seconds, run = launch(Path(folder), CPU, budget, micro, **how)
        return {"seconds": seconds, **story_of(run, CPU)}


def launch(
    folder: Path,
    setting: Setting,
    budget: int,
    micro: int,
    *,
    ranks: int = 1,
    sharding: str = "none",
    probe: str = "never",
    fail: str | None = None,
) -> tuple[float, Path]:
    """Run through the command line and the supervisor, as a user's run; return its seconds and directory."""
    env = {"TRAIN_MEMORY_BUDGET": f"{budget}"}
    if fail is not None:
        env["TRAIN_MEMORY_FAIL"] = fail
    job = {
        "name": "oom",
        "task": setting.task,
        "args": setting.args,
        "workdir": str(ROOT),
        "batch": {"global": setting.batch},
        "steps": setting.steps,
        "resources": {"gpus_per_node": 1} if setting.gpus else {"gpus_per_node": 0, "ranks_per_node": ranks},
        "recipe": {
            "precision": setting.precision, "optimizer": "adamw", "sharding": sharding,
            "micro_batch_size": micro,
        },
        "train": {"checkpoint_every": None, "probe": probe, "lr": LR},
        "env": env,
    }  # fmt: skip
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    seconds = timed([sys.executable, "-m", "launcher", "run", str(path), "-c", "local"], str(folder))
    [run] = (folder / "runs").iterdir()
    return seconds, run


def story_of(run: Path, setting: Setting) -> Found:
    """What its metrics and events tell."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    found: Found = {
        "loss": lines[-1]["loss"],
        "repeated": len(steps) - len(set(steps)),
        "distinct": len(set(steps)),
        "samples": setting.batch,
        "step_seconds": statistics.median(line["seconds"] for line in lines[1:]),
        "peak": max(line.get("memory_peak", 0) for line in lines),
    }
    lowered = [event["seconds"] for event in events if event["event"] == "downgrade" and "seconds" in event]
    probes = [event["seconds"] for event in events if event["event"] == "probe"]
    if lowered or probes:
        found["recovery_seconds"] = probes[0] if probes else max(lowered)
    starts = [moment(event["time"]) for event in events if event["event"] == "attempt"]
    first_steps = [first_step_of(lines, attempt) for attempt in range(len(starts))]
    found["start_seconds"] = first_steps[0] - starts[0]
    if len(starts) > 1:
        files = (run / "attempts/000/errors").glob("*.json")
        errors = [json.loads(file.read_text())["time"] for file in files]
        found["restart_seconds"] = first_steps[1] - min(errors)
    return found


def first_step_of(lines: list[Found], attempt: int) -> float:
    """When its first step began."""
    first = next(line for line in lines if line["attempt"] == attempt)
    return moment(first["time"]) - float(first["seconds"])


def moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def run_peer(budget: int, way: str, batch: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        seconds = timed(peer_command(way, folder), folder, BUDGET_BYTES=str(budget), arguments=batch)
        return {"seconds": seconds, **steps_of(folder)}


def run_shell_loop(budget: int, batch: int) -> Found:
    """`until python train.py $batch; do batch=$((batch / 2)); done`"""
    with tempfile.TemporaryDirectory() as folder:
        command = " ".join(peer_command("script", folder))
        loop = f"b={batch}; until {command} $b 2>/dev/null; do b=$((b/2)); test $b -gt 0 || exit 1; done"
        seconds = timed(["bash", "-c", loop], folder, BUDGET_BYTES=str(budget), arguments=batch)
        return {"seconds": seconds, **steps_of(folder)}


def peer_command(way: str, folder: str) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / "oom_peers.py"), way, f"{folder}/arguments.json"]


def steps_of(folder: str) -> Found:
    done = json.loads((Path(folder) / "out.json").read_text())
    last = done[-STEPS:]
    return {
        "loss": last[-1]["loss"],
        "repeated": len(done) - STEPS,
        "distinct": len(last),
        "samples": int(last[-1]["samples"]),
    }


def timed(command: list[str], folder: str, arguments: int | None = None, **env: str) -> float:
    if arguments is not None:
        asked = {**MODEL, "batch": arguments, "steps": STEPS, "lr": LR, "out": f"{folder}/out.json"}
        (Path(folder) / "arguments.json").write_text(json.dumps(asked))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": folder, "OMP_NUM_THREADS": "1", **env}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return time.perf_counter() - began


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    raise SystemExit(main())
