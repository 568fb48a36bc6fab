"""One submission makes one job, whatever the controller answers. The commands are small programs in PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.api.sweep_values import combinations, field_of, split
from launcher.schedulers.base import UnclearError
from launcher.schedulers.login import LocalLogin
from launcher.schedulers.slurm.jobs import NotSubmittedError, sbatch_command, submit
from launcher.spec.errors import UsageError

LOST = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
DOWN = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, squeue: str = "true") -> Path:
    """Gives the file with a line for each call of sbatch."""
    calls = folder / "calls"
    for name, text in {
        "sbatch": f'echo call >>"{calls}"; n=$(wc -l <"{calls}"); {sbatch}',
        "squeue": squeue,
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return calls


def test_a_lost_answer_makes_no_second_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = commands(tmp_path, monkeypatch, f'echo "{LOST}" >&2; exit 1', 'echo "7|other"; echo "8|my-run"')
    assert submit(LocalLogin(), sbatch_command("job.sbatch"), "my-run") == "8"
    assert calls.read_text().count("call") == 1


@pytest.mark.parametrize(
    "row",
    [
        "8|(null)|/runs/my-run/scripts/job.sbatch 2",
        "8|a site's | own words|/runs/my-run/plans/002/scripts/job.sbatch 2",
        "8||/runs/sweeps/my-run/array.sbatch 1",
        "8||/runs/my-run/submitit/.submission_file_0f.sh 1",
    ],
)
def test_a_job_without_our_comment_is_found_by_its_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    commands(tmp_path, monkeypatch, f'echo "{LOST}" >&2; exit 1', f'echo "{row}"')
    assert submit(LocalLogin(), sbatch_command("job.sbatch"), "my-run") == "8"


def test_a_lost_answer_of_a_job_that_was_not_queued_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = f'if [ "$n" -gt 1 ]; then echo 9; else echo "{LOST}" >&2; exit 1; fi'
    calls = commands(tmp_path, monkeypatch, sbatch, 'echo "7|other"')
    assert submit(LocalLogin(), sbatch_command("job.sbatch"), "my-run") == "9"
    assert calls.read_text().count("call") == 2


def test_a_controller_that_is_down_is_tried_again_and_then_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = commands(tmp_path, monkeypatch, f'echo "{DOWN}" >&2; exit 1', "exit 1")
    with pytest.raises(NotSubmittedError, match="accepts no jobs at the moment"):
        submit(LocalLogin(), sbatch_command("job.sbatch"), "my-run", patience=1)
    assert calls.read_text().count("call") >= 2


def test_a_job_of_an_earlier_submission_is_not_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = f'if [ "$n" -gt 1 ]; then echo 9; else echo "{LOST}" >&2; exit 1; fi'
    commands(tmp_path, monkeypatch, sbatch, 'echo "8|my-run"')
    assert submit(LocalLogin(), sbatch_command("job.sbatch", 2), "my-run", earlier={"8"}) == "9"


def test_of_two_controllers_the_first_may_have_taken_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"sbatch: error: Zero Bytes were transmitted or received\n{DOWN}"
    commands(tmp_path, monkeypatch, f'echo "{said}" >&2; exit 1', "echo gone >&2; exit 1")
    with pytest.raises(UnclearError):
        submit(LocalLogin(), sbatch_command("job.sbatch"), "my-run", patience=1)


def test_without_any_answer_the_doubt_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = commands(tmp_path, monkeypatch, f'echo "{LOST}" >&2; exit 1', "echo gone >&2; exit 1")
    with pytest.raises(UnclearError, match="may or may not be in its queue"):
        submit(LocalLogin(), sbatch_command("job.sbatch"), "my-run", patience=1)
    assert calls.read_text().count("call") == 1


def test_a_refusal_is_final_and_in_slurms_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "sbatch: error: invalid partition specified: gpu"
    calls = commands(tmp_path, monkeypatch, f'echo "{said}" >&2; exit 1')
    with pytest.raises(NotSubmittedError, match=r"^sbatch: invalid partition specified: gpu$"):
        submit(LocalLogin(), sbatch_command("job.sbatch"), "my-run")
    assert calls.read_text().count("call") == 1


def test_the_job_sees_nothing_of_a_job_that_submits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, f'env -0 >"{tmp_path}/env"; echo 1')
    mine = {
        "SLURM_CPUS_PER_TASK": "8",
        "SBATCH_PARTITION": "x",
        "SRUN_CPUS_PER_TASK": "8",
        "LAUNCHER_RUN_DIR": "/r",
    }
    for name, value in {**mine, "SLURM_CONF": "/c", "ODD": "a\nSLURM_JOB_ID=1 $(id) '"}.items():
        monkeypatch.setenv(name, value)
    submit(LocalLogin(), sbatch_command("job.sbatch"), "my-run")
    items = [item.partition("=") for item in (tmp_path / "env").read_text().split("\0")]
    env = {name: value for name, _, value in items}
    assert not mine.keys() & env.keys()
    assert (env["SLURM_CONF"], env["ODD"]) == ("/c", "a\nSLURM_JOB_ID=1 $(id) '")


def test_a_sweep_is_the_product_of_its_values() -> None:
    assert combinations([field_of("lr=1,2"), field_of("seed=0,1")]) == [
        ("lr=1", "seed=0"),
        ("lr=1", "seed=1"),
        ("lr=2", "seed=0"),
        ("lr=2", "seed=1"),
    ]
    assert split("[1, 2],{a: 1, b: 2},'x,y'") == ["[1, 2]", "{a: 1, b: 2}", "'x,y'"]


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=1,,2", "lr=1,1", "=1"])
def test_a_sweep_without_values_or_with_one_twice_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--sweep"):
        combinations([field_of(text)])
