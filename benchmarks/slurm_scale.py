"""Arrays of 1,000 tasks and jobs of 256 nodes, on as many simulated nodes under the real controller.

Both wait in the queue, as they would most of the time: 256 supervisors with eight ranks each would need more
memory than one machine has. The logs that are followed are written here, by a thread in the ranks' place.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.rundir.layout import RunDir  # noqa: E402
from launcher.rundir.time import now  # noqa: E402
from tests.slurm.cluster import Cluster, missing, slurm_version  # noqa: E402
from tests.slurm.shape import Shape  # noqa: E402

LAUNCHER = [sys.executable, "-m", "launcher"]
RANKS = 8


class Scale:
    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        self.env = {
            **os.environ, **cluster.env(), "PYTHONPATH": str(ROOT), "COLUMNS": "120", "TZ": "UTC",
            "XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache"),
        }  # fmt: skip
        # An installed package comes with its bytecode; a checkout keeps it only where it may.
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)
        self.rows: list[dict[str, Any]] = []

    def profile(self, name: str, **slurm: Any) -> str:
        fields = {
            "name": name, "scheduler": "slurm", "max_nodes": 1000,
            "paths": {"python": sys.executable, "runs": str(self.folder / "runs")},
            "slurm": {"partition": "main", "gpu_request": "none", **slurm},
        }  # fmt: skip
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(fields))
        return str(path)

    def job(self, nodes: int) -> str:
        path = self.folder / f"job-{nodes}.yaml"
        resources = {"gpus_per_node": 0, "nodes": nodes, "ranks_per_node": RANKS}
        job = {"name": "scale", "command": ["true"], "batch": {"global": nodes * RANKS}, "env": {"TASK": "?"}}
        path.write_text(json.dumps({**job, "resources": resources}))
        return str(path)

    def timed(self, what: str, command: list[str]) -> str:
        """What it prints; remembers its time, and the most memory of it or a child."""
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{said[-3000:]}")
        cpu, mib = usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024
        row = {"what": what, "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "mib": mib}
        self.rows.append(row)
        print(f"{what:40} {seconds:8.2f} s, {cpu:7.2f} s of CPU {mib:6} MiB", flush=True)
        return said

    def runs(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "runs").iterdir() if (path / "run.json").exists())

    def array(self, tasks: int) -> None:
        waits = self.profile("waits", extra={"begin": "now+1hour"})
        values = ",".join(map(str, range(tasks)))
        raw = ["sbatch", "--parsable", "--begin=now+1hour", f"--array=0-{tasks - 1}", "--wrap", "true"]
        plain = self.timed(f"sbatch, array of {tasks}", raw).strip()
        sweep = ["submit", self.job(1), "-c", waits, "--sweep", f"env.TASK={values}"]
        said = self.timed(f"launcher submit, array of {tasks}", [*LAUNCHER, *sweep])
        (whole,) = (line.split()[-1] for line in said.splitlines() if line.startswith("all of them: "))
        last = self.runs()[-1]
        self.timed(f"squeue, two arrays of {tasks}", ["squeue", "-r", "-h"])
        self.timed(f"launcher list, {tasks} jobs", [*LAUNCHER, "list", "--limit", "0"])
        self.timed("launcher status of one task", [*LAUNCHER, "status", last])
        self.timed("launcher logs of one task", [*LAUNCHER, "logs", last])
        self.timed("launcher cancel of one task", [*LAUNCHER, "cancel", last])
        self.timed(f"scancel, array of {tasks}", ["scancel", plain])
        self.timed(f"launcher status, sweep of {tasks}", [*LAUNCHER, "status", whole])
        self.timed(f"launcher cancel, sweep of {tasks}", [*LAUNCHER, "cancel", whole])
        assert not subprocess.run(["squeue", "-h"], env=self.env, capture_output=True, check=True).stdout

    def nodes(self, count: int) -> dict[str, Any]:
        before = set(self.runs())
        waits = self.profile("waits", extra={"begin": "now+1hour"})
        self.timed(f"launcher submit, {count} nodes", [*LAUNCHER, "submit", self.job(count), "-c", waits])
        (run,) = set(self.runs()) - before
        self.timed(f"launcher status, {count} nodes", [*LAUNCHER, "status", run])
        stop = threading.Event()
        ranks = threading.Thread(target=write_logs, args=(RunDir(self.folder / "runs" / run), count, stop))
        ranks.start()
        time.sleep(3)
        found = self.follow(run)
        stop.set()
        ranks.join()
        self.timed(f"launcher logs, {count * RANKS} ranks", [*LAUNCHER, "logs", run])
        self.timed(f"launcher cancel, {count} nodes", [*LAUNCHER, "cancel", run])
        return {"nodes": count, "ranks": count * RANKS, **found}

    def follow(self, run: str, seconds: float = 10) -> dict[str, Any]:
        """The most memory and file handles of `launcher logs -f` while all ranks write a line a second."""
        out = self.folder / "followed"
        with open(out, "wb") as file:
            process = subprocess.Popen(
                [*LAUNCHER, "logs", run, "-f"], cwd=self.folder, env=self.env, stdout=file, stderr=file
            )
        peak, handles, proc = 0, 0, Path(f"/proc/{process.pid}")
        end = time.monotonic() + seconds
        while time.monotonic() < end and process.poll() is None:
            fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
            peak = max(peak, int(fields["VmHWM"].split()[0]) // 1024)
            handles = max(handles, len(os.listdir(proc / "fd")))
            time.sleep(0.05)
        cpu = sum(map(int, (proc / "stat").read_text().rpartition(")")[2].split()[11:13]))
        process.terminate()
        process.wait()
        lines = out.read_bytes().count(b"\n")
        print(f"launcher logs -f: {peak} MiB, {handles} file handles, {lines} lines in {seconds:.0f} s")
        share = round(cpu / os.sysconf("SC_CLK_TCK") / seconds, 2)
        return {"follow_mib": peak, "follow_handles": handles, "follow_lines": lines, "follow_cpus": share}


def write_logs(run: RunDir, nodes: int, stop: threading.Event) -> None:
    """A line of each rank every second."""
    attempt, step = run.attempt(0), 0
    files = [
        attempt.rank_log(node, node * RANKS + rank, "out") for node in range(nodes) for rank in range(RANKS)
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    while not stop.wait(1):
        step += 1
        for rank, file in enumerate(files):
            with open(file, "a") as log:
                log.write(f"{now()} step {step} loss {rank / 7:.4f}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/slurm-scale.json")
    options = parser.parse_args()
    if why := missing():
        print(f"left out: {why}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(folder / "cluster")
    cluster.folder.mkdir()
    began = time.perf_counter()
    cluster.start(Shape(nodes=options.nodes, gpus_per_node=0))
    print(f"{options.nodes} simulated nodes are idle after {time.perf_counter() - began:.0f} s")
    try:
        scale = Scale(folder, cluster)
        scale.array(options.tasks)
        found = scale.nodes(options.nodes)
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
    report = {
        "command": "python benchmarks/slurm_scale.py --save",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "slurm": ".".join(map(str, slurm_version()))},
        "tasks": options.tasks,
        "verbs": scale.rows,
        "job": found,
    }
    if options.save:
        target = ROOT / "benchmarks" / "results" / "slurm-scale.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {target.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
