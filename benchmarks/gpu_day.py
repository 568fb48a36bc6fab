"""A day on a GPU: measure what is predicted, in stages, the most valuable first.

    gpu_day.py 1 --seconds 570      the cases of stage 1 that have no result yet, for at most 570 seconds
    gpu_day.py 1 --rehearsal        the same path on the CPU, in tiny; results go to a temporary folder

Each case is a process of its own with a time limit. Its result is a line of gpu-day-STAGE.jsonl, written as
soon as it is known, so a command that is cut off loses only the case that runs. A case is done when it has a
result for the same GPU, the same code of launcher and the same question. CONTRIBUTING.md says how to go about
such a day; gpu_day_report.py makes the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from gpu_day_case import FILE, STAGES, Case, read  # noqa: E402

from launcher.rundir.files import append_json, read_json, read_json_lines  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
REHEARSED = "cpu (rehearsal)"
MARK = "GPU_DAY_CASE"
"Variable of a case's processes, by which those that outlive it are found."
ALLOCATOR = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")
LEAST = 20.0
"Seconds that must be left to begin another case."

Row = dict[str, Any]


class Machine(NamedTuple):
    device: str
    memory: int
    "Bytes of the GPU."
    torch: str

    @property
    def on_gpu(self) -> bool:
        return self.device != REHEARSED


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.rehearsal:
        file, machine = _rehearsed_cases(options.results), Machine(REHEARSED, 0, _torch())
    else:
        file, machine = FILE, _machine()
    stages = [options.stage] if options.stage else list(STAGES)
    places = {RESULTS, options.results} if machine.on_gpu else {options.results}
    code = code_of(ROOT / "launcher")
    about = {
        **machine._asdict(),
        "shared": options.shared,
        "code": code,
        "commit": _commit(),
        "python": platform.python_version(),
    }
    deadline = time.monotonic() + options.seconds
    failed = 0
    for stage in stages:
        known = [row for place in places for row in read_json_lines(_file(place, stage))]
        cases = [one for one in read(file) if one.stage == stage and options.only in one.name]
        left = [one for one in cases if options.again or not is_done(one, known, about, options)]
        print(f"stage {stage}: {STAGES[stage].title}; {len(left)} of {len(cases)} cases left", flush=True)
        until = min(deadline, time.monotonic() + STAGES[stage].seconds)
        for row in measured(left, machine, until):
            append_json(_file(options.results, stage), {**row, **about})
            failed += row["status"] in ("failed", "timed out")
            print(_line(row), flush=True)
    print(f"results: {options.results}; {failed} cases failed or took too long")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", nargs="?", type=int, choices=STAGES, help="all in their order if left out")
    parser.add_argument("--seconds", type=float, default=570.0, help="time limit of this command")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this text")
    parser.add_argument("--results", type=Path, help="folder for new results; benchmarks/results if left out")
    parser.add_argument("--rehearsal", action="store_true", help="tiny cases on the CPU")
    parser.add_argument("--shared", action="store_true", help="others use the GPU: times do not count")
    parser.add_argument("--retry", action="store_true", help="cases that failed or took too long, too")
    parser.add_argument("--any-code", action="store_true", help="results of other code count as well")
    parser.add_argument("--again", action="store_true", help="all cases, whether they have a result or not")
    options = parser.parse_args()
    if options.rehearsal:
        options.results = (options.results or Path(tempfile.mkdtemp(prefix="gpu-day-"))).resolve()
        if options.results.is_relative_to(RESULTS):
            parser.error("a rehearsal does not write to benchmarks/results")
    else:
        options.results = options.results or RESULTS
    options.results.mkdir(parents=True, exist_ok=True)
    return options


def measured(cases: Sequence[Case], machine: Machine, until: float) -> Iterator[Row]:
    """Carry out one case after the other. The process of the next one starts while one is measured."""
    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(Worker(machine)) if cases else None
        for number, case in enumerate(cases):
            left = until - time.monotonic()
            if ready is None or left < LEAST:
                print(f"{len(cases) - number} cases are left for the next command", flush=True)
                return
            worker = ready
            ready = stack.enter_context(Worker(machine)) if number + 1 < len(cases) else None
            row = worker.carry_out(case, min(case.seconds, left))
            worker.end()
            if row["status"] == "timed out" and left < case.seconds:
                row["status"] = "cut off"  # by the command's limit: the next command begins it again
            yield row


class Worker:
    """A process that has imported everything and waits for one case."""

    def __init__(self, machine: Machine) -> None:
        self.on_gpu = machine.on_gpu
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-day-case-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        environ = {
            **os.environ,
            **ALLOCATOR,
            MARK: str(self.folder),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "XDG_STATE_HOME": str(self.folder),
            **({} if self.on_gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        }
        with open(self.folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks" / "gpu_day_work.py"), str(self.folder)],
                cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def carry_out(self, case: Case, seconds: float) -> Row:
        """Return the case with what was measured, predicted and measured side by side."""
        began = time.monotonic()
        line = json.dumps({"work": case.work, "asked": case.asked, "on_gpu": self.on_gpu})
        try:
            self.process.communicate(f"{line}\n".encode(), timeout=seconds)
            status = "failed" if self.process.returncode else "measured"
        except subprocess.TimeoutExpired:
            status = "timed out"
        found = read_json(self.folder / "measured.json") or {}
        if "absent" in found:
            status = "absent"
        row = {
            "case": case.name,
            "stage": case.stage,
            "work": case.work,
            "status": status,
            "seconds": round(time.monotonic() - began, 2),
            "predicted": case.predicted,
            "measured": found,
            "asked": case.asked,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if status in ("failed", "timed out"):
            said = (self.folder / "output").read_text(errors="replace")[-3000:]
            row["output"] = said.replace(f"{ROOT}/", "").replace(f"{sys.prefix}/", "")
        return row

    def end(self) -> None:
        """End every process of the case, and remove its files."""
        if self.process.poll() is None:  # one that has just begun shows no environment yet
            os.killpg(self.process.pid, signal.SIGKILL)
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.environ().get(MARK) == str(self.folder):
                    one.kill()
        self.process.wait()
        self._folder.cleanup()


def is_done(case: Case, known: Sequence[Row], about: Row, options: argparse.Namespace) -> bool:
    """Whether there is a result for the same question on the same GPU, by the same code."""
    ended = ("measured", "absent") if options.retry else ("measured", "absent", "failed", "timed out")
    same = ("device",) if options.any_code else ("device", "code")
    return any(
        (row["case"], row["asked"]) == (case.name, case.asked)
        and row["status"] in ended
        and all(row[name] == about[name] for name in same)
        for row in known
    )


def code_of(package: Path) -> str:
    """Return a digest of the package's source, which needs no repository around it."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _rehearsed_cases(folder: Path) -> Path:
    file = folder / "cases.jsonl"
    if not file.exists():
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_day_cases.py"), "--rehearsal", str(file)]
        subprocess.run(command, check=True)
    return file


def _machine() -> Machine:
    """Ask another process, so that this one holds no memory of the GPU."""
    text = (
        "import json, torch; print(json.dumps([torch.cuda.get_device_name(0), "
        "torch.cuda.get_device_properties(0).total_memory, torch.__version__]))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-1000:]}\nno CUDA device here; --rehearsal runs on the CPU")
    return Machine(*json.loads(done.stdout))


def _torch() -> str:
    from importlib.metadata import version

    return version("torch")


def _file(folder: Path, stage: int) -> Path:
    return folder / f"gpu-day-{stage}.jsonl"


def _line(row: Row) -> str:
    told = {name: value for name, value in row["measured"].items() if isinstance(value, int | float | str)}
    return f"{row['seconds']:6.1f} s  {row['status']:9}  {row['case']}  {told}"


if __name__ == "__main__":
    raise SystemExit(main())
