"""Scripts that know nothing of launcher run out of memory: by what they read, or whatever they are told."""

from __future__ import annotations

import pytest

from launcher.spec.verdict import EXIT_CODES
from tests.lab import Lab, events, verdicts

pytestmark = pytest.mark.e2e

# One rank, 4 samples. What it prints at last hides its traceback: only torchelastic's file has the exception.
READS_ITS_ENVIRONMENT = """\
import atexit, mmap, os, resource
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    size, accumulate = (int(os.environ["LAUNCHER_" + name]) for name in ("MICRO_BATCH_SIZE", "GRAD_ACCUM"))
    held, address_space = 2**30 * size, resource.RLIMIT_AS
    used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(address_space, (used + 5 * 2**30, resource.getrlimit(address_space)[1]))
    mmap.mmap(-1, held)
    print("fits", size, accumulate, os.environ["LAUNCHER_GLOBAL_BATCH"])

atexit.register(lambda: print("bye\\n" * 30))
main()
"""
READS_NOTHING = """\
raise RuntimeError(
    "CUDA out of memory. Tried to allocate 6.26 GiB. GPU 5 has a total capacity of 47.40 GiB of which "
    "139.56 MiB is free."
)
"""
READS_ITS_ENVIRONMENT_BUT_FAILS_ALIKE = """\
import os, sys
print("CUDA out of memory. Falling back to less", flush=True)
size = int(os.environ["LAUNCHER_MICRO_BATCH_SIZE"])
free = {8: 5.25, 4: 61.25, 2: 120.25}
if size in free:
    print("epoch 1", "epoch 2", sep="\\n", flush=True)
    sys.exit(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total "
        f"capacity of 79.10 GiB of which {free[size]} MiB is free."
    )
print("epoch 1", flush=True)
sys.exit("train.py: error: data/val.jsonl not found")
"""
ONE_RANK = {"gpus_per_node": 0, "ranks_per_node": 1}


def job(lab: Lab, script: str) -> str:
    lab.script(script)
    path = lab.job(command="python train.py", batch={"global": 8}, resources=ONE_RANK, recipe="auto")
    return str(path)


@pytest.mark.slow
def test_a_script_is_lowered_by_its_environment(lab: Lab) -> None:
    done = lab.cli("run", job(lab, READS_ITS_ENVIRONMENT))
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    failed, last = verdicts(run)
    assert (failed["failure"], failed["confidence"]) == ("host-oom", "certain")
    assert failed["exception"] == "OSError: [Errno 12] Cannot allocate memory"
    assert failed["memory"]["kind"] == "host"
    assert last["failure"] == "succeeded" and "fits 4 2 8" in done.stdout


def test_a_script_is_lowered_until_it_fits_and_the_error_that_ends_it_then_is_its_own(lab: Lab) -> None:
    done = lab.cli("run", job(lab, READS_ITS_ENVIRONMENT_BUT_FAILS_ALIKE))
    assert done.returncode == EXIT_CODES["user-error"], done.stdout + done.stderr
    failures = [verdict["failure"] for verdict in verdicts(lab.newest())]
    assert failures == ["gpu-oom", "gpu-oom", "gpu-oom", "user-error"]


@pytest.mark.slow
def test_a_script_that_nothing_reaches_is_left_after_three_attempts_with_the_reason(lab: Lab) -> None:
    path = job(lab, READS_NOTHING)
    done = lab.cli("run", path)
    assert done.returncode == EXIT_CODES["gpu-oom"]
    run = lab.newest()
    assert len(verdicts(run)) == 3 and len(events(run, "downgrade")) == 2
    assert verdicts(run)[-1]["memory"]["requested"] == int(6.26 * 2**30)
    why = lab.cli("why").stdout
    assert "the same failure with micro-batch 8, 4, 2, each time asking for 6.26 GiB with as much free" in why
    assert "memory    6.26 GiB requested, 139.6 MiB of 47.4 GiB free" in why
    assert "history   2 restarts" in why and "do        let the command itself need less" in why

    done = lab.cli("run", path, "--no-downgrade")
    assert done.returncode == EXIT_CODES["gpu-oom"]
    [verdict] = verdicts(lab.newest())
    assert "forbidden" in verdict["then"] and "micro-batch 8 -> 4" in verdict["then"]
