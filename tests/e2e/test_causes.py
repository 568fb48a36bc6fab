"""Scripts whose out-of-memory error is followed, caught or hidden by something else."""

from __future__ import annotations

import pytest

from launcher.spec.verdict import EXIT_CODES
from tests.corpus.surrounding_output import IGNORED, THREAD, WANDB
from tests.lab import Lab, events, verdicts

pytestmark = pytest.mark.e2e

ONE_RANK = {"gpus_per_node": 0, "ranks_per_node": 1}
START = """\
import os, sys, time
micro, rank = int(os.environ["LAUNCHER_MICRO_BATCH_SIZE"]), int(os.environ["RANK"])
WORDS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which "
    "1.21 GiB is free."
)
def forward():
    if micro > 4:
        raise RuntimeError(WORDS)
"""
TRAINED = """\
forward()
print("trained with", micro, os.environ["LAUNCHER_GRAD_ACCUM"])
"""


def prints_at_exit(text: str) -> str:
    return (
        f"import atexit\natexit.register(lambda: micro > 4 and print({text!r}, file=sys.stderr))\n{TRAINED}"
    )


CAUGHT = """\
try:
    forward()
except RuntimeError as error:
    print("ERROR train.py:88 training failed:", error)
    print("saving nothing")
    print("elapsed: 12.3 s")
    print("bye")
    sys.exit(1)
print("trained with", micro, os.environ["LAUNCHER_GRAD_ACCUM"])
"""
HANGS = """\
try:
    forward()
except RuntimeError as error:
    print("training failed:", error, flush=True)
    time.sleep(600)
print("trained with", micro, os.environ["LAUNCHER_GRAD_ACCUM"])
"""
WORKER = """\
import signal, time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if micro > 4 and index == 4:
            while not os.path.exists("taken"):  # a tensor that is on its way would be lost with its own error
                time.sleep(0.02)
            os.kill(os.getpid(), SIGNAL)
        return torch.zeros(1)
try:
    for number, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)):
        if number == 1:
            open("taken", "w").close()
finally:
    if micro > 4:
        print("wandb: bye\\n" * 25, file=sys.stderr)
print("trained with", micro, os.environ["LAUNCHER_GRAD_ACCUM"])
"""
RECOVERED = {
    "wandb": prints_at_exit(WANDB),
    "exception ignored": prints_at_exit(IGNORED),
    "thread": prints_at_exit(THREAD),
    "caught and logged": CAUGHT,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "caught and logged" else pytest.mark.slow) for name in RECOVERED],
)
def test_memory_that_ran_out_is_the_cause_whatever_is_printed_after_it(lab: Lab, name: str) -> None:
    lab.script(START + RECOVERED[name])
    done = lab.cli("run", str(lab.job(command="python train.py", resources=ONE_RANK, recipe="auto")))
    assert done.returncode == 0 and "trained with 4 2" in done.stdout, done.stdout + done.stderr
    failed, _ = verdicts(lab.newest())
    assert (failed["failure"], failed["confidence"]) == ("gpu-oom", "likely")
    decisive = failed["seen"][0]
    assert decisive["place"].startswith("rank-000.") and "CUDA out of memory" in decisive["text"]
    assert failed["memory"]["requested"] == 2 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(("number", "kind"), [("signal.SIGKILL", "host"), ("signal.SIGBUS", "shared")])
def test_a_dead_worker_of_a_loader_is_host_memory(lab: Lab, number: str, kind: str) -> None:
    lab.script(START + WORKER.replace("SIGNAL", number))
    job = lab.job(command="python train.py", resources=ONE_RANK, recipe="auto")
    done = lab.cli("run", str(job))
    failed = verdicts(lab.newest())[0]
    assert (failed["failure"], failed["memory"]["kind"]) == ("host-oom", kind), done.stdout + done.stderr
    # No recipe gives /dev/shm more space.
    assert done.returncode == (0 if kind == "host" else EXIT_CODES["host-oom"])


def test_memory_that_ran_out_in_a_program_that_finished_is_no_failure(lab: Lab) -> None:
    lab.script(START + CAUGHT.replace("sys.exit(1)", "sys.exit(0)"))
    done = lab.cli("run", str(lab.job(command="python train.py", resources=ONE_RANK, recipe="auto")))
    assert done.returncode == 0 and [one["failure"] for one in verdicts(lab.newest())] == ["succeeded"]


@pytest.mark.slow
def test_a_script_that_hangs_after_its_failure_is_ended_and_judged(lab: Lab) -> None:
    lab.script(START + HANGS)
    job = lab.job(command="python train.py", resources=ONE_RANK, recipe="auto", stall_timeout=20)
    done = lab.cli("run", str(job))
    assert done.returncode == 0 and "trained with 4 2" in done.stdout, done.stdout + done.stderr
    assert verdicts(lab.newest())[0]["failure"] == "gpu-oom"
    assert [event["seconds"] for event in events(lab.newest(), "stalled")] == [20]


ONE_OF_FOUR = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if rank == 3:
    forward()
dist.all_reduce(torch.ones(1))
print("trained with", micro, os.environ["LAUNCHER_GRAD_ACCUM"])
"""


@pytest.mark.slow
def test_one_rank_of_four_runs_out_while_the_others_wait_for_it(lab: Lab) -> None:
    lab.script(START + ONE_OF_FOUR)
    resources = {"gpus_per_node": 0, "ranks_per_node": 4}
    job = lab.job(command="python train.py", resources=resources, batch={"global": 32}, recipe="auto")
    done = lab.cli("run", str(job))
    assert done.returncode == 0 and "trained with 4 2" in done.stdout, done.stdout + done.stderr
    failed = verdicts(lab.newest())[0]
    assert (failed["failure"], failed["rank"]) == ("gpu-oom", 3)


LEAVES = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if rank == 1:
    sys.exit("shard 1 holds no samples")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_rank_that_leaves_with_words_that_no_pattern_knows_is_named_and_not_the_one_that_misses_it(
    lab: Lab,
) -> None:
    lab.script(START + LEAVES)
    resources = {"gpus_per_node": 0, "ranks_per_node": 2}
    lab.cli("run", str(lab.job(command="python train.py", resources=resources, retries={"same": 0})))
    (failed,) = verdicts(lab.newest())
    assert (failed["failure"], failed["rank"]) == ("unknown", 1)
    assert failed["last_lines"][-1] == "shard 1 holds no samples"  # torch may warn before it
    assert [one["why"] for one in failed["seen"]] == ["follows from another failure"]


def test_why_shows_the_decisive_line_and_what_was_taken_for_a_consequence(lab: Lab) -> None:
    lab.script(START + prints_at_exit(f"{IGNORED}\n{WANDB}"))
    job = lab.job(command="python train.py", resources=ONE_RANK, recipe="auto", retries={"lower": 0})
    assert lab.cli("run", str(job)).returncode == EXIT_CODES["gpu-oom"]
    said = lab.cli("why").stdout
    log = lab.newest().attempt(0).rank_log(0, 0, "err").read_text().splitlines()
    line = next(number for number, text in enumerate(log, 1) if "RuntimeError: CUDA" in text)
    assert f"rank-000.err:{line}" in said
    assert "follows   from another failure" in said and "Exception ignored" in said


TWO_OF_THREE = """\
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
if rank < 2:
    raise ValueError(f"rank {rank}: no such label")
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_what_several_ranks_report_is_one_cause_and_what_a_waiting_rank_reports_follows(lab: Lab) -> None:
    lab.script(TWO_OF_THREE)
    resources = {"gpus_per_node": 0, "ranks_per_node": 3}
    job = lab.job(command="python train.py", resources=resources, batch={"global": 6})
    done = lab.cli("run", str(job))
    assert done.returncode == EXIT_CODES["user-error"], done.stdout + done.stderr
    [failed] = verdicts(lab.newest())
    assert "no such label" in failed["seen"][0]["text"]
    assert [one["why"] for one in failed["seen"][1:]] == ["explained by user-error"], failed["seen"]
    said = lab.cli("why").stdout
    assert "\nfollows   nccl-timeout" in said and "\nalso " not in said


def test_words_of_ones_own_tell_the_class(lab: Lab) -> None:
    lab.script("import sys\nprint('reward server is gone, code 7')\nsys.exit(3)")
    own = [{"pattern": r"server is gone, code \d", "class": "disk-full"}]
    done = lab.cli("run", str(lab.job(command="python train.py", resources=ONE_RANK, failures=own)))
    assert done.returncode == EXIT_CODES["disk-full"]
    [failed] = verdicts(lab.newest())
    words = "printed `reward server is gone, code 7`, which is disk-full by `failures:`"
    assert failed["reason"] == f"rank 0 {words}", "and not that it ran out of disk space"
    wrong = lab.job(command="python train.py", failures=[{"pattern": "(", "class": "disk-full"}])
    refused = lab.cli("run", str(wrong))
    assert refused.returncode == 2 and "is not a regular expression" in refused.stderr


def test_an_exit_code_alone_explains_nothing(lab: Lab) -> None:
    lab.script("import sys\nprint('so far so good')\nsys.exit(3)")
    job = lab.job(command="python train.py", resources=ONE_RANK, retries={"same": 1})
    assert lab.cli("run", str(job)).returncode == EXIT_CODES["unknown"]
    both = verdicts(lab.newest())
    assert [(one["failure"], one["confidence"]) for one in both] == [("unknown", "guess")] * 2
    assert "exit code 3" in both[0]["reason"]


def test_a_guess_is_tried_again_as_often_as_the_budget_allows(lab: Lab) -> None:
    lab.script("import sys\nsys.exit('fatal: the moon is full')")
    job = lab.job(command="python train.py", resources=ONE_RANK, retries={"same": 1})
    lab.cli("run", str(job))
    both = verdicts(lab.newest())
    assert [(one["failure"], one["confidence"]) for one in both] == [("user-error", "guess")] * 2


def test_a_pattern_that_could_take_for_ever_is_refused(lab: Lab) -> None:
    job = lab.job(command="python train.py", failures=[{"pattern": "(a+)+$", "class": "disk-full"}])
    refused = lab.cli("run", str(job))
    assert refused.returncode == 2 and "repeats a repetition" in refused.stderr
