"""Logs: merge and print beside `sort -m`, capture and follow beside torchrun's own `--tee 3`.

    python benchmarks/logs.py --save                  1,024 ranks of 10,000 lines (1.1 GB), some minutes
    python benchmarks/logs.py --ranks 64 --lines 1000 --chatty 20000

`sort -m` gets its fastest honest settings: bytes compared (LC_ALL=C), all files in one pass
(--batch-size), the file limit raised for it. Both print to /dev/null and read from the page cache; runs
alternate, the best of each counts (the machine may have other users; CPU seconds are told beside). Where
lines are equal on all ranks, ours prints fewer lines than `sort`, because it folds them. The goals of the
merge are judged from a million lines on: below, starting Python is what one measures.
"""

from __future__ import annotations

import argparse
import importlib.metadata
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
import threading
import time
from pathlib import Path
from typing import Any

from launcher.logs.show import LogOptions, show_logs
from launcher.rundir.layout import RunDir
from launcher.rundir.time import stamp

ROOT = Path(__file__).resolve().parents[1]
GOAL_RATIO, GOAL_MIB, GOAL_DELAY = 0.6, 300, 0.5

SHOW = """
import sys
from pathlib import Path
from launcher.logs.show import LogOptions, show_logs
from launcher.rundir.layout import RunDir
with open("/dev/null", "wb", buffering=0) as out:
    show_logs(RunDir(Path(sys.argv[1])), LogOptions(fold=sys.argv[2] == "fold"), out, sys.argv[3] == "colour")
"""

# One rank: through our capture, or alone for torchrun to tee. Writes what it measured beside the logs.
CHATTY = """
import os, sys, time
count, pause, result = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
line = "loss 2.345678 grad_norm 0.9876 lr 3.000e-04 tokens/s 123456 mem 38.2 GiB"
start = time.perf_counter()
for step in range(count):
    print(f"{time.time():.6f} step {step} {line}", flush=True)
    if pause: time.sleep(pause)
open(f"{result}/program-{os.environ['RANK']}", "w").write(str(time.perf_counter() - start))
"""
CAPTURE = """
import os, resource, subprocess, sys
from pathlib import Path
from launcher.logs.capture import RankCapture
from launcher.rundir.layout import RunDir
rank, result = int(os.environ["RANK"]), sys.argv[3]
log = RunDir(Path(result)).attempt(0).rank_log
with RankCapture(log(0, rank, "out"), log(0, rank, "err"), [b"not-in-any-line"]) as capture:
    program = [sys.executable, os.environ["CHATTY"], *sys.argv[1:]]
    child = subprocess.Popen(program, stdout=-1, stderr=-1, bufsize=0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    code = capture.pump(child)
    after = resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
open(f"{result}/capture-{rank}", "w").write(str(cpu))
sys.exit(code)
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--lines", type=int, default=10_000, help="per rank")
    parser.add_argument("--chatty", type=int, default=200_000, help="lines per rank for capture")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--folder", help="where the files lie; left out, memory (/dev/shm) or the temporary folder"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/logs.json")
    options = parser.parse_args()
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="launcher-logs-", dir=options.folder or shm))
    try:
        results = {
            "merge, lines all different": merge(folder / "different", options, 0.0),
            "merge, one line in ten equal on all ranks": merge(folder / "equal", options, 0.1),
            "capture of 2 ranks": capture(folder, options.chatty),
            "follow": delays(folder),
        }
    finally:
        shutil.rmtree(folder)
    report = {
        "command": " ".join(["python benchmarks/logs.py", *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "results": results,
    }
    print(json.dumps({key: report[key] for key in ("command", "machine", "versions")}, indent=2))
    if options.save:
        target = ROOT / "benchmarks" / "results" / "logs.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
    return 0 if all(met for result in results.values() for met in result.get("goals", {}).values()) else 1


def merge(folder: Path, options: argparse.Namespace, equal: float) -> dict[str, Any]:
    run = RunDir(folder)
    size = write_ranks(run, options.ranks, options.lines, equal)
    files = [str(run.attempt(0).rank_log(0, rank, "out")) for rank in range(options.ranks)]
    raise_file_limit(options.ranks + 100)
    batch = f"--batch-size={options.ranks + 6}"
    ours = [sys.executable, "-c", SHOW, str(folder)]
    commands = {
        "sort -m": ["sort", "-m", batch, *files],
        "launcher logs": [*ours, "fold", "plain"],
        "launcher logs, colour": [*ours, "fold", "colour"],
        "launcher logs, not folded": [*ours, "nofold", "plain"],
    }
    best: dict[str, tuple[float, float, float]] = {}
    for _ in range(options.repeat):
        for name, command in commands.items():
            best[name] = min(best.get(name, (1e9, 0.0, 0.0)), measure(command))
    shutil.rmtree(folder)
    total = options.ranks * options.lines
    result: dict[str, Any] = {"lines": total, "bytes": size, "best of": options.repeat}
    print(f"\n{total:,} lines of {options.ranks} ranks, {size / 1e6:,.0f} MB, {equal:.0%} equal on all ranks")
    for name, (wall, cpu, peak) in best.items():
        shown = " ".join(commands[name][:3] if name == "sort -m" else ["show_logs", *commands[name][4:]])
        result[name] = {
            "command": ("LC_ALL=C " if name == "sort -m" else "") + shown + " > /dev/null",
            "seconds": round(wall, 3),
            "cpu_seconds": round(cpu, 3),
            "lines_per_second": round(total / wall),
            "peak_rss_mib": round(peak),
            "speed_of_sort": round(best["sort -m"][0] / wall, 3),
        }
        print(f"{name:28}{wall:8.2f} s {cpu:8.2f} s CPU {total / wall / 1e6:7.2f} M lines/s {peak:6.0f} MiB"
              f"  {best['sort -m'][0] / wall:5.0%} of sort -m")  # fmt: skip
    if not equal and total >= 1_000_000:
        mine = result["launcher logs"]
        result["goals"] = {
            f"speed >= {GOAL_RATIO:.0%} of sort -m": mine["speed_of_sort"] >= GOAL_RATIO,
            f"peak RSS < {GOAL_MIB} MiB": mine["peak_rss_mib"] < GOAL_MIB,
        }
        print(result["goals"])
    return result


def write_ranks(run: RunDir, ranks: int, lines: int, equal: float) -> int:
    """Each rank logs every 0.1 s on average, in its own rhythm. Returns the bytes written."""
    start, size = 1_795_250_000, 0
    seconds = [stamp(start + second)[:20] for second in range(lines // 5 + 2)]
    for rank in range(ranks):
        path = run.attempt(0).rank_log(0, rank, "out")
        path.parent.mkdir(parents=True, exist_ok=True)
        chance = random.Random(rank).random
        at, written = 0.0, []
        for step in range(lines):
            at += chance() * 0.2
            clock = f"{seconds[int(at)]}{int(at % 1 * 1e6):06d}Z"
            if equal and step % round(1 / equal) == 0:
                text = (
                    f"step {step}: checkpoint window opens, gradients are clipped at norm 1.0 on every rank"
                )
            else:
                text = (
                    f"step {step} loss {chance() * 5:.6f} grad_norm {chance():.4f} lr 3.000e-04 "
                    f"tokens/s {chance() * 1e5:.0f} mem 38.2 GiB"
                )
            written.append(f"{clock} {text}\n")
        size += path.write_bytes("".join(written).encode())
    return size


def measure(command: list[str]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds, peak MiB of one process that prints to /dev/null."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"})
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[:3]} failed with {process.returncode}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def torchrun(folder: Path, ours: bool, count: int, pause: float) -> tuple[list[str], dict[str, str]]:
    """Two chatty ranks, with our capture between torchrun and them or with torchrun's own tee."""
    program, wrapper = folder / "chatty.py", folder / "capture.py"
    program.write_text(CHATTY)
    wrapper.write_text(CAPTURE)
    result = folder / ("ours" if ours else "tee")
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += [] if ours else ["--tee", "3", "--log-dir", str(result / "logs")]
    command += [str(wrapper if ours else program), str(count), str(pause), str(result)]
    return command, {**os.environ, "CHATTY": str(program), "OMP_NUM_THREADS": "1"}


def has_torch() -> bool:
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        print("\ntorch is not installed: capture and follow are left out")
        return False
    return True


def capture(folder: Path, count: int) -> dict[str, Any]:
    """Lines a second that a program gets rid of, each flushed by itself, as fast as it can."""
    if not has_torch():
        return {}
    result: dict[str, Any] = {"lines per rank": count}
    print(f"\ncapture: 2 ranks print {count:,} lines each, every line flushed")
    for ours in (True, False):
        command, env = torchrun(folder, ours, count, 0.0)
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        base = folder / ("ours" if ours else "tee")
        seconds = max(float((base / f"program-{rank}").read_text()) for rank in range(2))
        name = "launcher capture" if ours else "torchrun --tee 3"
        result[name] = {"seconds": round(seconds, 3), "lines_per_second_and_rank": round(count / seconds)}
        text = f"{name:28}{seconds:8.2f} s {count / seconds:12,.0f} lines/s and rank"
        if ours:
            cpu = max(float((base / f"capture-{rank}").read_text()) for rank in range(2))
            result[name]["cpu_seconds_of_the_capture_per_rank"] = round(cpu, 3)
            text += f"  {cpu:.2f} s CPU of the capture"
            logs = [RunDir(base).attempt(0).rank_log(0, rank, "out").read_bytes() for rank in range(2)]
            assert all(log.count(b"\n") == count for log in logs), "lines are missing"
        print(text)
    return result


def delays(folder: Path) -> dict[str, Any]:
    """From the program's clock when it prints to ours when the line is shown."""
    if not has_torch():
        return {}
    result: dict[str, Any] = {}
    print("\nfollow: 2 ranks print a line every 20 ms; delay until it is shown")
    for ours in (True, False):
        command, env = torchrun(folder, ours, 150, 0.02)
        seen: list[float] = []
        if ours:
            done = threading.Event()
            arguments = (RunDir(folder / "ours"), LogOptions(follow=True), _Clocked(seen), False, done.is_set)
            thread = threading.Thread(target=show_logs, args=arguments)
            thread.start()
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            done.set()
            thread.join()
        else:
            clocked = _Clocked(seen)
            with subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            ) as process:
                assert process.stdout is not None
                while data := os.read(process.stdout.fileno(), 65536):
                    clocked.write(data)
        name = "launcher logs --follow" if ours else "torchrun --tee 3"
        result[name] = {
            "lines": len(seen),
            "median_seconds": round(statistics.median(seen), 3),
            "max_seconds": round(max(seen), 3),
        }
        print(
            f"{name:28} median {statistics.median(seen):.3f} s, longest {max(seen):.3f} s, {len(seen)} lines"
        )
    result["goals"] = {
        f"delay < {GOAL_DELAY} s": result["launcher logs --follow"]["max_seconds"] < GOAL_DELAY
    }
    print(result["goals"])
    return result


class _Clocked:
    """Takes lines `... 1795250000.123456 step ...` and notes how old they are."""

    def __init__(self, seen: list[float]) -> None:
        self.seen = seen

    def write(self, data: bytes) -> int:
        for line in data.split(b"\n"):
            before, step, _ = line.partition(b" step ")
            clock = before.replace(b":", b" ").split(b" ")[-1]
            if step and clock.count(b".") == 1:
                self.seen.append(time.time() - float(clock))
        return len(data)

    def flush(self) -> None:
        pass


def raise_file_limit(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count if hard == -1 else min(count, hard), hard))


def machine() -> dict[str, Any]:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    found["sort"] = subprocess.run(["sort", "--version"], capture_output=True, text=True).stdout.split("\n")[
        0
    ]
    for name in ("gpu-launcher", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    sys.exit(main())
