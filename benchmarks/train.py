"""Tokens per second of our loop next to other loops that train the same model on the same batches.

On the CPU: a hand-written PyTorch loop, Hugging Face Trainer (accelerate) and Lightning. Our ranks have the
heap that launcher gives them there (supervise/worker.py), the others what a user's process has; "plain,
heap" is the hand-written loop in ours. With --device cuda: a hand-written FSDP2 loop, for Llama shapes in
bf16 with compiled blocks, and the share of the GPU's peak. Each loop is a process of its own. On the CPU
they take turns of a third of a second, all but one stopped: what the machine does meanwhile meets them all
alike, where whole runs one after the other differed by 8 %. With --device cuda they run one after the
other, in rounds; each ratio is taken within one round.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launcher.supervise.worker import CPU_HEAP

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30

CPU = {
    "gpt": {
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 4, "dim": 128, "heads": 4, "context": 128},
        "tokens": 128,
        "batch": 8,
        "steps": 60,
    },
    "gpt-small": {  # steps of some 15 ms, in which a loop's own work shows
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 2, "dim": 64, "heads": 2, "context": 64},
        "tokens": 64,
        "batch": 16,
        "steps": 250,
    },
}
CUDA = {
    name: {
        "task": "launcher.tasks.llama:LanguageModel",
        "args": {"shape": shape, "context": 4096},
        "tokens": 4096,
        "batch": batch,
        "steps": 40,
        "recipe": recipe,
    }
    for name, shape, batch, recipe in (
        ("llama-1b", "1b", 4, {"activations": "keep"}),
        ("llama-7b", "7b", 2, {"activations": "selective"}),
    )
}
PEERS = {"cpu": ("plain", "plain, heap", "trainer", "lightning"), "cuda": ("fsdp2",)}
TURN = 0.35
"Seconds. Some 4 steps of the larger model."
BLOCK = 10
"Turns of each, of which one ratio is taken."
GOALS = {"plain": 0.97, "fsdp2": 0.97, "trainer": 1.0, "lightning": 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--skip", type=int, default=10, help="steps at the beginning that are not measured")
    parser.add_argument(
        "--rounds", type=int, default=10, help="of one run each; on the CPU of ten turns each"
    )
    parser.add_argument("--only", action="append", help="a model of the list")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/train-DEVICE.json")
    options = parser.parse_args()
    options.rounds = options.rounds or (10 if options.device == "cpu" else 5)
    models = CPU if options.device == "cpu" else CUDA
    results = []
    for name in options.only or models:
        results += _compare(name, models[name], options)
    missed = [r for r in results if r["goal"] is not None and r["ratio"] < r["goal"]]
    report = {
        "command": f"python benchmarks/train.py {' '.join(sys.argv[1:])}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "versions": {
            n: _version(n) for n in ("gpu-launcher", "torch", "transformers", "accelerate", "lightning")
        }
        | {"python": platform.python_version()},
        "results": results,
    }
    print(report["machine"], report["versions"])
    if options.save:
        target = ROOT / "benchmarks" / "results" / f"train-{options.device}.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
    return 1 if missed else 0


def _compare(name: str, model: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    loops = ["launcher", *(peer for peer in PEERS[options.device] if installed(peer))]
    rounds = (_in_turns if options.device == "cpu" else _one_by_one)(loops, model, options)
    results = []
    for loop in loops:
        pairs = zip(rounds["launcher"], rounds[loop], strict=True)
        ratios = sorted(ours["speed"] / theirs["speed"] for ours, theirs in pairs)
        ratio = statistics.median(ratios)
        speeds = [measured["speed"] for measured in rounds[loop]]
        goal = GOALS.get(loop)
        result = {
            "model": name,
            "loop": loop,
            "tokens_per_second": round(statistics.median(speeds)),
            "rounds": [round(speed) for speed in speeds],
            "ratio": round(ratio, 3),
            "ratios": [round(one, 3) for one in ratios],
            "goal": goal,
            "peak_gib": max(measured.get("peak", 0) for measured in rounds[loop]) or None,
        }
        results.append(result)
        verdict = "" if goal is None else f"  goal {goal}: {'met' if ratio >= goal else 'MISSED'}"
        spread = f"({ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f})"
        compared = "" if loop == "launcher" else f"  launcher is {ratio:.3f} x {spread}{verdict}"
        print(f"{name:10} {loop:10} {result['tokens_per_second']:>9,} tokens/s{compared}", flush=True)
    return results


def _one_by_one(
    loops: list[str], model: dict[str, Any], options: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    rounds: dict[str, list[dict[str, float]]] = {loop: [] for loop in loops}
    for number in range(options.rounds):
        # Forwards and backwards in turn, so that a drift of the machine favours nobody.
        for loop in loops if number % 2 == 0 else reversed(loops):
            rounds[loop].append(measure(loop, model, options))
    return rounds


def _in_turns(
    loops: list[str], model: dict[str, Any], options: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Each trains without end until it is killed; one line of a file is one step."""
    endless = {**model, "steps": 10**6}
    rounds: dict[str, list[dict[str, float]]] = {loop: [] for loop in loops}
    running: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as top:
        lines = {}
        try:
            for loop in loops:
                folder = Path(top, loop)
                folder.mkdir()
                prepare = _prepare_ours if loop == "launcher" else _prepare_peer
                command, env = prepare(loop, folder, endless, options)
                lines[loop] = folder / ("metrics.jsonl" if loop == "launcher" else "steps")
                with open(folder / "output", "wb") as output:
                    running[loop] = subprocess.Popen(
                        command, cwd=folder, env={**os.environ, **env}, stdout=output, stderr=output
                    )
                while _count(lines[loop]) < options.skip:
                    if running[loop].poll() is not None:
                        raise SystemExit(f"{loop} failed:\n{(folder / 'output').read_text()[-4000:]}")
                    time.sleep(0.05)
                running[loop].send_signal(signal.SIGSTOP)
            for _ in range(options.rounds):
                before, seconds = {loop: _count(lines[loop]) for loop in loops}, dict.fromkeys(loops, 0.0)
                for turn in range(BLOCK):
                    for loop in loops if turn % 2 == 0 else reversed(loops):
                        began = time.perf_counter()
                        running[loop].send_signal(signal.SIGCONT)
                        time.sleep(TURN)
                        running[loop].send_signal(signal.SIGSTOP)
                        seconds[loop] += time.perf_counter() - began
                for loop in loops:
                    steps = _count(lines[loop]) - before[loop]
                    if steps == 0:
                        told = (Path(top, loop) / "output").read_text()[-4000:]
                        raise SystemExit(f"no step of {loop} in {seconds[loop]:.1f} s:\n{told}")
                    rounds[loop].append({"speed": steps * model["batch"] * model["tokens"] / seconds[loop]})
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    return rounds


def _count(lines: Path) -> int:
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def measure(loop: str, model: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Run one loop to its end, in a process of its own. `speed` is in tokens per second, `peak` in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        run = _ours if loop == "launcher" else _peer
        ends, peak, more = run(loop, Path(folder), model, options)
    seconds = (ends[-1] - ends[options.skip - 1]) / (len(ends) - options.skip)
    speed = model["batch"] * model["tokens"] / seconds
    return {"speed": speed, "peak": round(peak / GIB, 2), "seconds": seconds, **more}


Prepared = tuple[list[str], dict[str, str]]
"Command and environment."


def _prepare_ours(_: str, folder: Path, model: dict[str, Any], options: argparse.Namespace) -> Prepared:
    """The entrypoint as a user's job runs it, its metrics file included; only the checkpoint is left out."""
    gpus = int(options.device == "cuda")
    recipe = {
        "precision": "bf16-mixed" if gpus else "fp32",
        "optimizer": "adamw",
        "sharding": "fsdp" if gpus else "none",
        "compile": bool(gpus),
        "micro_batch_size": model["batch"],
        "grad_accum": 1,
        **model.get("recipe", {}),
    }
    job = {
        "name": "bench",
        "task": model["task"],
        "args": model["args"],
        "batch": {"global": model["batch"]},
        "steps": model["steps"] + 1,  # the last one, with its checkpoint, is not measured
        "train": {"checkpoint_every": None, "lr": 3e-4},
    }
    attempt = folder / "attempts" / "000"
    attempt.mkdir(parents=True)
    about = {"id": "bench", "job": job, "workdir": ".", "gpus_per_node": gpus}
    (folder / "run.json").write_text(json.dumps(about))
    (attempt / "recipe.json").write_text(json.dumps(recipe))
    return [sys.executable, "-m", "launcher.train"], {
        "LAUNCHER_RUN_DIR": str(folder),
        **({} if gpus else {"GLIBC_TUNABLES": CPU_HEAP}),
    }


Ended = tuple[list[float], float, dict[str, float]]
"When each step ended, the peak in bytes, and what else was measured."


def _ours(loop: str, folder: Path, model: dict[str, Any], options: argparse.Namespace) -> Ended:
    command, env = _prepare_ours(loop, folder, model, options)
    _run(command, folder, **env)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][:-1]
    peak = 0
    if options.device == "cuda":
        memory = (folder / "attempts" / "000" / "memory" / "rank-000.jsonl").read_text().splitlines()
        peak = max(json.loads(line)["peak"] for line in memory)
    shares = [line["mfu"] for line in lines[options.skip :] if "mfu" in line]
    mfu = {"mfu": statistics.median(shares)} if shares else {}
    return [_seconds(line["time"]) for line in lines], peak, mfu


def _prepare_peer(loop: str, folder: Path, model: dict[str, Any], options: argparse.Namespace) -> Prepared:
    arguments = {
        **{key: model[key] for key in ("task", "args", "batch")},
        "device": options.device,
        "steps": model["steps"],
        "lr": 3e-4,
        "accumulation": 1,
        "compile": options.device == "cuda",
        "recipe": model.get("recipe", {}),
        "out": str(folder / "out.json"),
    }
    (folder / "arguments.json").write_text(json.dumps(arguments))
    script = ROOT / "benchmarks" / "train_loops.py"
    name, _, heap = loop.partition(", ")
    env = {"GLIBC_TUNABLES": CPU_HEAP} if heap else {}
    return [sys.executable, str(script), name, str(folder / "arguments.json")], env


def _peer(loop: str, folder: Path, model: dict[str, Any], options: argparse.Namespace) -> Ended:
    command, _ = _prepare_peer(loop, folder, model, options)
    _run(command, folder)
    content = json.loads((folder / "out.json").read_text())
    return content["ends"], content["peak"] or 0, {}


def _run(command: list[str], folder: Path, **env: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def _seconds(stamp: str) -> float:
    whole, micro = stamp.rstrip("Z").split(".")
    return time.mktime(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + int(micro) / 1e6


def installed(peer: str) -> bool:
    needs = {"trainer": ("transformers", "accelerate"), "lightning": ("lightning",)}.get(peer, ())
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{peer} is left out: {', '.join(missing)} is not installed", flush=True)
    return not missing


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    raise SystemExit(main())
