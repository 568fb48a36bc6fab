"""`launcher why` stays short and keeps the cause, whatever the run looks like."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli.follow import follow_run
from launcher.cli.main import app
from launcher.diagnosis.lines import lines_of
from launcher.report.why import MAX_LINES, why
from launcher.report.why_log import judged_log, why_log
from launcher.rundir.files import replace_json
from launcher.rundir.layout import RunDir
from launcher.schedulers.local import LocalScheduler
from launcher.schedulers.rundir import status_of
from launcher.spec.records import StateRecord
from launcher.spec.verdict import REMEDY, Verdict
from tests.report.written_run import eventful


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "demo-1")


def explained(run: RunDir, state: str, reason: str, *, resumable: bool = True) -> list[str]:
    return why(run, status_of(run, "", StateRecord(state=state, reason=reason), resumable=resumable))


def judged(run: RunDir, number: int, then: str = "", **fields) -> None:
    attempt = run.attempt(number)
    attempt.path.mkdir(parents=True)
    replace_json(attempt.verdict, {**Verdict(**fields).model_dump(), "then": then})


def test_a_lost_run_that_cannot_be_resumed_is_not_said_to_be(run: RunDir) -> None:
    assert "do        launcher resume demo-1" in explained(run, "lost", "gone")
    assert explained(run, "lost", "gone", resumable=False) == [
        "demo-1 is lost: gone",
        "cause     node-failed, before the first attempt",
    ]


def test_a_verbose_failure_after_many_others_still_fits(run: RunDir) -> None:
    for number in range(6):
        lines = tuple(f"line {n} " + "x" * 500 for n in range(20))
        judged(
            run, number, "stopped " * 100, failure="user-error", reason="r", rank=3, node=1,
            phase="forward", step=9, exit_code=1, exception="ValueError: " + "y" * 900,
            last_lines=lines, evidence=("e",) * 50,
        )  # fmt: skip
    shown = explained(run, "failed", "")
    assert len(shown) <= MAX_LINES < 15
    assert all(len(line) < (720 if line.startswith(("exception", "done")) else 200) for line in shown)
    assert shown[1].startswith("cause     user-error: r (attempt 5)")
    assert any(line.startswith("do        fix the error") for line in shown)


def test_what_to_do_about_a_long_message_is_not_cut_off(run: RunDir) -> None:
    """DDP's message about parameters without a gradient has 1,100 characters and advises its argument."""
    message = f"RuntimeError: Expected to have finished{' words' * 200}\n{REMEDY}In the job file, set x: true"
    judged(run, 0, failure="user-error", reason="r", exception=message)
    [line] = [line for line in explained(run, "failed", "") if line.startswith("exception")]
    assert line.endswith("... | In the job file, set x: true") and len(line) < 720


def test_a_snapshot_of_the_rank_that_ran_out_of_memory_is_named(run: RunDir) -> None:
    judged(run, 0, failure="gpu-oom", reason="r", rank=3)
    path = run.attempt(0).snapshot(3, None, "pickle")
    path.parent.mkdir()
    assert "snapshot" not in "\n".join(explained(run, "failed", ""))
    path.touch()
    assert f"snapshot  {path}" in explained(run, "failed", "")


def test_the_exception_is_not_repeated_by_the_lines_before_it(run: RunDir) -> None:
    lines = ("loading shard 7", "Traceback (most recent call last):", "ValueError: bad token")
    judged(run, 0, failure="user-error", reason="r", exception="ValueError: bad token", last_lines=lines)
    text = "\n".join(explained(run, "failed", ""))
    assert text.count("bad token") == 1 and "loading shard 7" in text


def test_a_first_attempt_that_went_on_lower_is_not_said_to_have_met_nothing(run: RunDir) -> None:
    judged(run, 0, failure="succeeded", reason="r")
    assert explained(run, "succeeded", "") == ["demo-1 succeeded in its first attempt: nothing failed."]
    run.event("downgrade", in_process=True)
    [told] = explained(run, "succeeded", "")
    assert told == "demo-1 succeeded in its first attempt; memory ran out on the way:"


def test_what_follows_a_success_is_told_as_what_it_is(run: RunDir) -> None:
    """The run was resumed for more steps."""
    judged(run, 0, failure="succeeded", reason="r")
    assert explained(run, "running", "") == ["demo-1 is running: nothing has failed so far."]
    assert explained(run, "failed", "no such module") == ["demo-1 is failed: no such module"]
    judged(run, 1, failure="succeeded", reason="r")
    assert explained(run, "succeeded", "") == ["demo-1 succeeded: nothing failed."]


def test_a_run_whose_steps_did_not_change_the_model_is_said_to_have_skipped_them(run: RunDir) -> None:
    judged(run, 0, failure="succeeded", reason="r")
    for step in (3, 4, 4):  # the next attempt may skip a step again
        run.event("step-left-out", step=step, reason="not finite: loss nan, gradient norm nan")
    skipped = "skipped   2 steps, the last one step 4: not finite: loss nan, gradient norm nan"
    assert explained(run, "succeeded", "") == [
        "demo-1 succeeded in its first attempt: no attempt failed.",
        skipped,
    ]
    judged(run, 1, failure="node-failed", reason="lost")
    judged(run, 2, failure="succeeded", reason="r")
    assert skipped in explained(run, "succeeded", "")


@pytest.mark.parametrize("state", ["submitted", "stopping"])
def test_a_run_that_goes_on_after_a_verdict_has_not_ended_with_it(run: RunDir, state: str) -> None:
    judged(run, 0, failure="preempted", reason="taken away")
    assert any("launcher resume" in line for line in explained(run, "interrupted", ""))
    (told,) = explained(run, state, "")
    assert told.startswith(f"demo-1 is {state}: it") and "resume" not in told and "taken" not in told


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("running", "nothing has failed so far"),
        ("lost", "launcher resume demo-1"),
        ("succeeded", "no attempt"),
    ],
)
def test_a_run_without_a_verdict_says_what_is_known(run: RunDir, state: str, sentence: str) -> None:
    assert sentence in "\n".join(explained(run, state, ""))


def test_a_run_whose_newest_checkpoint_failed_says_so_until_another_is_written(run: RunDir) -> None:
    run.path.mkdir(parents=True)
    run.event("checkpoint", step=2)
    run.event("checkpoint-failed", step=4, reason="checkpoint of step 4 could not be written: disk full")
    told = ["demo-1 is running: checkpoint of step 4 could not be written: disk full"]
    assert explained(run, "running", "") == told
    run.event("checkpoint", step=6)
    assert explained(run, "running", "") == ["demo-1 is running: nothing has failed so far."]


STEPS_AND_MEMORY = """
def main():
    for step in range(40):
        print(f'step {step} loss {3 - step / 100:.3f}')
    raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')
"""
AT_THE_TOP = """
try:
    main()
except Exception:
    import traceback
    traceback.print_exc()
    raise SystemExit(1)
"""


@pytest.mark.parametrize(
    ("end", "how"),
    [("main()\n", ["-m", "train"]), (AT_THE_TOP, ["train.py"])],
    ids=["python -m", "printed before the exit"],
)
def test_a_log_that_python_wrote_alone_is_read_in_the_order_of_events(
    tmp_path: Path, end: str, how: list[str]
) -> None:
    """What its stdout held back stands after the traceback."""
    (tmp_path / "train.py").write_text(STEPS_AND_MEMORY + end)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    log = tmp_path / "log"
    with open(log, "wb") as file:
        subprocess.run(
            [sys.executable, *how],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environ,
            cwd=tmp_path,
            check=False,
        )
    assert log.read_text().splitlines()[-1].startswith("step 39"), "it was buffered"
    with open(log, "rb") as file:
        cause = judged_log(lines_of(file))
    assert cause is not None and (cause.failure, cause.confidence) == ("gpu-oom", "likely")


@pytest.mark.parametrize(
    ("pack", "tool"), [(gzip.compress, "zcat"), (bz2.compress, "bzcat"), (lzma.compress, "xzcat")]
)
def test_a_compressed_log_is_told_with_what_reads_it(
    tmp_path: Path, pack: Callable[[bytes], bytes], tool: str
) -> None:
    log = tmp_path / "a log"
    log.write_bytes(pack(b"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n" * 9))
    said = CliRunner().invoke(app, ["why", "--log", str(log)])
    assert said.exit_code == 2 and f"{tool} '{log}' | launcher why --log -" in said.stderr


@pytest.mark.parametrize(
    ("line", "failure", "remedy"),
    [
        (
            "ValueError: Expected more than 1 value per channel when training, got input size [1, 4096]",
            "user-error",
            "model.batch_norm: true",
        ),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess", "user-error", "spawn"),
        (
            'NotImplementedError: "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for '
            "'BFloat16'",
            "user-error",
            "GradScaler",
        ),
        (
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "user-error",
            "compute capability",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error",
            "nccl-timeout",
            "NCCL_SHM_DISABLE=1",
        ),
        (
            "n1:42:43 [2] misc/shmutils.cc:87 NCCL WARN Error: failed to open shared memory segment /nccl-a",
            "nccl-timeout",
            "NCCL_SHM_DISABLE=1",
        ),
        ("ncclRemoteError: A call failed", "nccl-timeout", "look for the rank that stopped answering"),
        ("AttributeError: 'NoneType' object has no attribute 'scale'", "user-error", "fix the error"),
    ],
)
def test_what_to_do_about_a_known_message_is_said_of_a_log_and_of_a_run(
    run: RunDir, line: str, failure: str, remedy: str
) -> None:
    first, *others = why_log("train.log", judged_log([line.encode()]))
    (do,) = (one for one in others if one.startswith("do        "))
    assert failure in first and remedy in do
    assert ("examine   launcher doctor -c CLUSTER" in others) == (failure == "nccl-timeout")
    judged(run, 0, failure=failure, reason="r", exception=line)
    (told,) = (one for one in explained(run, "failed", "") if one.startswith("do        "))
    assert remedy in told and ("`launcher resume demo-1`" in told) == (failure == "user-error")


def test_a_message_that_follows_from_another_failure_brings_no_advice_of_its_own(run: RunDir) -> None:
    line = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error"
    judged(run, 0, failure="host-oom", reason="r", exception=line)
    assert "NCCL_SHM_DISABLE" not in "\n".join(explained(run, "failed", ""))


def test_skipped_steps_of_a_run_that_succeeded_are_said_by_status_and_to_who_follows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = eventful(tmp_path / "runs" / "gpt-1")
    for step in (12, 13):
        log.event("step-left-out", step=step, reason="not finite: loss nan, gradient norm nan")
    told = "skipped   2 steps, the last one step 13: not finite: loss nan, gradient norm nan"
    assert told in CliRunner().invoke(app, ["status", str(log.run.path)]).output
    assert follow_run(LocalScheduler(), log.run) == 0
    assert told in capsys.readouterr().out.splitlines()
