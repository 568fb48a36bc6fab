"""Carries out one case of a day on a GPU, in a process of its own: `gpu_day_work.py FOLDER`.

The process imports what it needs, then waits for the case on stdin, as JSON. The next one starts while a
case is measured, so that imports take no time of the GPU. FOLDER/measured.json has what was measured so far.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch

from launcher.rundir.files import read_json_lines, replace_json
from launcher.rundir.layout import RunDir
from launcher.spec.events import Downgrade, Retry
from launcher.train.error_report import leave
from launcher.train.rank import Rank, join_ranks
from tests.memory import measured_steps
from tests.memory.cases import peak
from tests.train.loss_curves import distance
from tests.train.runs import job, one_rank, prepare, recipe

GIGA = 1e9
WARM_UP = 5
"Steps whose time does not count: kernels are loaded, chosen and compiled in them."
Fields = dict[str, Any]
TESTED = re.compile(r"\[gw\d+\].* (PASSED|FAILED|ERROR|SKIPPED) (\S+)")
"A line of pytest-xdist with -v."


class AbsentError(Exception):
    """What a case needs is not installed."""


class Place:
    """Where a case is carried out, and where its measured values go."""

    def __init__(self, folder: Path, on_gpu: bool) -> None:
        self.folder, self.on_gpu = folder, on_gpu
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")

    def write(self, measured: Fields) -> None:
        replace_json(self.folder / "measured.json", measured)

    def rank(self) -> Rank:
        """The only rank of a run, joined."""
        run = prepare(self.folder / "run", job(), gpus_per_node=int(self.on_gpu))
        attempt = run.attempt(0)
        attempt.path.mkdir(parents=True)
        attempt.recipe.write_text(recipe().model_dump_json())
        rank = one_rank(run, device=self.device)
        join_ranks(rank)
        return rank


def step(asked: Fields, place: Place) -> Fields:
    measure = measured_steps.on_gpu if place.on_gpu else measured_steps.on_cpu
    found = measure(place.rank(), asked)
    alone = asked["ranks"] == 1
    allocated = {"allocated": peak(found["peaks"])} if found["failed"] is None else {}
    warm = found["seconds"][WARM_UP:]
    seconds = {"step_seconds": statistics.median(warm)} if warm else {}
    return {
        **allocated,
        "reserved": found["reserved"],
        **_outside(place),
        "phases": found["peaks"],
        "fits": found["failed"] is None,
        "failed_in": found["failed"],
        "steps": len(found["seconds"]),
        # With peers that are pretended, collectives take no time and values mean nothing.
        **(seconds if alone else {}),
        **({"losses": [found["losses"][0], found["losses"][-1]]} if alone and found["losses"] else {}),
    }


def _outside(place: Place) -> Fields:
    """Bytes of this process on the GPU that its allocator does not count: the CUDA context, with kernels."""
    if not place.on_gpu:
        return {}
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    used = dict(re.findall(r"(\d+), (\d+)", said)).get(str(os.getpid()))
    held = torch.cuda.memory_reserved(place.device)
    return {} if used is None else {"outside_allocator": int(used) * 2**20 - held}


def oom(asked: Fields, place: Place) -> Fields:
    """One way to go on after memory ran out, beside the run that knew: seconds, steps, loss and weights."""
    from oom import Setting, launch, story_of
    from oom_matrix import distance as of_weights
    from oom_matrix import parameters

    setting, cap = Setting(**asked["setting"]), asked["cap"]
    way, _, sharding = asked["way"].partition(", ")
    how: Fields = {"sharding": sharding} if sharding in ("fsdp", "ddp") else {}
    micro = {"probe, as planned": setting.fits, "probe, two rungs lower": 4 * setting.fits}
    probe = "always" if way == "probe" else "never"
    stories, weights = [], []
    for name, size, probed in (
        ("way", micro.get(asked["way"], 2 * setting.fits), probe),
        ("knew", setting.fits, "never"),
    ):
        folder = place.folder / name
        folder.mkdir()
        seconds, path = launch(folder, setting, cap, size, probe=probed, **how)
        run = RunDir(path)
        events = [one.kind for one in run.read_events() if isinstance(one, Downgrade | Retry)]
        stories.append({"seconds": round(seconds, 2), "lowered": events, **story_of(path, setting)})
        weights.append(parameters(run, setting.steps))
        place.write({name: stories[-1]})
    one, other = stories
    return {
        "steps_missing": setting.steps - one["distinct"],
        "steps_repeated": one["repeated"],
        "loss_difference": abs(one["loss"] - other["loss"]) / other["loss"],
        "weights": of_weights(*weights),
        "overhead_seconds": round(one["seconds"] - other["seconds"], 2),
        "way": one,
        "knew": other,
    }


def fragments(asked: Fields, place: Place) -> Fields:
    """Videos of unequal length with and without segments that grow: what the allocator holds unused."""
    fields = {
        "name": "fragments",
        "task": "launcher.tasks.video:VideoLanguageModel",
        "args": {"shape": "tiny", "max_frames": 48},
        "workdir": str(ROOT),
        "batch": {"global": 64},
        "steps": 60,
        "resources": {"gpus_per_node": 1},
        "recipe": {"precision": "bf16-mixed", "optimizer": "adamw", "sharding": "none",
                   "micro_batch_size": 64, "expandable_segments": asked["expandable"]},
        "train": {"checkpoint_every": None},
    }  # fmt: skip
    (place.folder / "job.yaml").write_text(json.dumps(fields))
    # The recipe decides how the allocator works, not what this process was given.
    plain = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    command = [sys.executable, "-m", "launcher", "run", "job.yaml", "-c", "local"]
    subprocess.run(command, cwd=place.folder, env=plain, check=True, stdin=subprocess.DEVNULL)
    [path] = (place.folder / "runs").iterdir()
    lines = read_json_lines(RunDir(path).attempt(0).memory(0))
    most, held = (max(line[name] for line in lines) for name in ("peak", "reserved"))
    return {
        "peak": most,
        "reserved": held,
        "unused_share": 1 - most / held,
        "retries": lines[-1]["num_alloc_retries"],
        "ooms": lines[-1]["num_ooms"],
    }


def curve(asked: Fields, place: Place) -> Fields:
    """The loss curve of a recipe beside another one's."""
    from tests.train import matrix

    rank, nvme = place.rank(), str(place.folder)
    asked = {"job": matrix.JOB, "job against": matrix.JOB, **asked}
    ours = matrix.curve(rank, asked["recipe"], asked["job"], nvme_dir=nvme)
    place.write({"losses": ours})
    theirs = matrix.curve(rank, asked["against"], asked["job against"], nvme_dir=nvme)
    return {"distance": distance(ours, theirs), "losses": ours, "against": theirs}


def tests(asked: Fields, place: Place) -> Fields:
    """Tests that need a GPU. Those that ended count, also where the time limit cut off the rest."""
    workers = "4" if place.on_gpu else "1"
    command = [sys.executable, "-m", "pytest", *asked["paths"], "-m", "gpu", "-v", "-n", workers]
    ended: dict[str, str] = {}
    with subprocess.Popen(
        [*command, "-p", "no:cacheprovider"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            if found := TESTED.match(line):
                ended[found[2]] = found[1]
                place.write(_counted(ended))
    if running.returncode not in (0, 1):  # a failed test is a result
        raise RuntimeError(f"pytest ended with {running.returncode}")
    return _counted(ended)


def _counted(ended: dict[str, str]) -> Fields:
    failed = sorted(name for name, how in ended.items() if how in ("FAILED", "ERROR"))
    counts = {how.lower(): sum(one == how for one in ended.values()) for how in ("PASSED", "SKIPPED")}
    return {**counts, "failed": len(failed), "failures": failed}


def speed(asked: Fields, place: Place) -> Fields:
    """Tokens per second of a training loop, as benchmarks/train.py measures it."""
    import train
    import train_loops

    loop, model = asked["loop"], asked["model"]
    if loop != "launcher" and loop not in train_loops.LOOPS:
        raise AbsentError(f"benchmarks/train_loops.py has no loop of {loop}")
    if not train.installed(loop):
        raise AbsentError(f"{loop} is not installed")
    found = train.measure(loop, model, argparse.Namespace(device=place.device.type, skip=model["skip"]))
    mfu = {"mfu": found["mfu"]} if "mfu" in found else {}
    return {"step_seconds": found["seconds"], "tokens_per_second": found["speed"],
            "peak_gib": found["peak"], **mfu}  # fmt: skip


def rates(asked: Fields, place: Place) -> Fields:
    """What the hardware does: GB/s, and TFLOP/s of a product in bf16."""
    scale, device = asked["scale"], place.device
    size, side = int(2**31 * scale), int(8192 * scale**0.5)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=place.on_gpu)
    pageable = torch.ones(size, dtype=torch.uint8)
    there, other = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    file = place.folder / "scratch"

    def to_disk() -> None:
        with open(file, "wb") as out:
            out.write(memoryview(pageable.numpy()))
            os.fsync(out.fileno())

    def from_disk() -> None:
        with open(file, "rb") as source:
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            source.readinto(memoryview(pageable.numpy()))

    found: Fields = {}
    for name, call, work in (
        ("matmul", lambda: torch.mm(a, b), 2 * side**3 / 1e3),
        ("device_copy", lambda: there.copy_(other), 2 * size),
        ("to_device", lambda: there.copy_(host, non_blocking=True), size),
        ("to_host", lambda: host.copy_(there, non_blocking=True), size),
        ("host_copy", lambda: host.copy_(pageable), 2 * size),
        ("disk_write", to_disk, size),
        ("disk_read", from_disk, size),
    ):
        found[name] = round(work / _seconds_of(call, place) / GIGA, 3)
        place.write(found)
    return found


def _seconds_of(call: Callable[[], object], place: Place) -> float:
    """Return the median of five calls after one that is not counted."""
    taken = []
    for _ in range(6):
        began = time.perf_counter()
        call()
        if place.on_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


PAIR = """
import sys, torch, torch.distributed as dist
rank, store, on_gpu = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
dist.init_process_group("nccl" if on_gpu else "gloo", init_method="file://" + store, rank=rank, world_size=2)
one = torch.ones(1, device="cuda:0" if on_gpu else "cpu")
dist.all_reduce(one)
assert one.item() == 2
"""


def nccl(asked: Fields, place: Place) -> Fields:
    """Two ranks on one device. NCCL refuses that ("Duplicate GPU detected") unless a version allows it."""
    store = str(place.folder / "store")
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", PAIR, str(rank), store, str(place.on_gpu)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [one.communicate()[0] for one in pair]
    lines = [line[:300] for text in said for line in text.splitlines()]
    words = [line for line in lines if "Error" in line or "Duplicate" in line] or lines[-1:]
    return {"joined": not any(one.returncode for one in pair), "said": words}


def doctor(asked: Fields, place: Place) -> Fields:
    verb = [sys.executable, "-m", "launcher", "doctor"]
    known = subprocess.run([*verb, "--help"], capture_output=True, text=True, check=False)
    if known.returncode:
        raise AbsentError("launcher has no verb `doctor`")
    done = subprocess.run([*verb, "--json"], cwd=place.folder, capture_output=True, text=True, check=False)
    try:
        said = json.loads(done.stdout)
    except ValueError:
        said = (done.stdout + done.stderr)[-4000:]
    return {"exit_code": done.returncode, "said": said}


WORKS: dict[str, Callable[[Fields, Place], Fields]] = {
    work.__name__: work for work in (step, oom, fragments, curve, tests, speed, rates, nccl, doctor)
}


def main(folder: Path) -> None:
    line = sys.stdin.readline()
    if not line:  # nothing is left to measure
        return
    case = json.loads(line)
    place = Place(folder, case["on_gpu"])
    try:
        measured = WORKS[case["work"]](case["asked"], place)
    except AbsentError as why:
        measured = {"absent": str(why)}
    place.write(measured)
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
