"""What a run is, by its own records and Slurm's together."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from launcher.api.prepare import prepared
from launcher.api.resume import resume
from launcher.cli.runs import cancel
from launcher.diagnosis.collector import Collector
from launcher.report.why import why
from launcher.rundir.files import read_record, replace_json
from launcher.rundir.layout import AttemptDir, RunDir
from launcher.rundir.time import now
from launcher.schedulers.base import Cancelled, PreparedSweep, SchedulerError
from launcher.schedulers.lookup import states_of
from launcher.schedulers.registry import opened
from launcher.schedulers.slurm.handle import handle_of, job_of
from launcher.schedulers.slurm.records import NO_ACCOUNTING, JobRecord, Records
from launcher.schedulers.slurm.run_state import status_from_slurm
from launcher.schedulers.slurm.scheduler import SlurmScheduler
from launcher.schedulers.slurm.submission import Submission
from launcher.spec.events import Event
from launcher.supervise.host import this_process
from tests.schedulers.slurm.fake_queue import SQUEUE, Queue


def a_run(folder: Path, **state: Any) -> RunDir:
    run = RunDir(folder / "run")
    run.path.mkdir()
    about = {"id": "run", "job": {"name": "j", "steps": 9}, "cluster": {"name": "c", "scheduler": "slurm"}}
    replace_json(run.submitted, about)
    replace_json(run.state, state)
    run.event("submitted", handle="slurm:c:7")
    return run


def slurm(state: str, **more: Any) -> Records:
    return Records({"7": JobRecord(id="7", state=state, **more)})


RUNNING = {"state": "running", "attempt": 1}
AGAIN = {"state": "interrupted", "failure": "time-limit", "requeue": True}


@pytest.mark.parametrize(
    ("own", "word", "expected"),
    [
        ({"state": "submitted"}, "PENDING", ("submitted", None)),
        ({"state": "submitted"}, "RUNNING", ("running", None)),
        (RUNNING, "RUNNING", ("running", None)),
        (RUNNING, "COMPLETING", ("running", None)),
        (RUNNING, "PENDING", ("submitted", None)),
        (RUNNING, "NODE_FAIL", ("failed", "node-failed")),
        (RUNNING, "OUT_OF_MEMORY", ("failed", "host-oom")),
        (RUNNING, "TIMEOUT", ("interrupted", "time-limit")),
        (RUNNING, "CANCELLED", ("cancelled", "cancelled")),
        (AGAIN, "COMPLETING", ("stopping", None)),
        (AGAIN, "PENDING", ("submitted", None)),
        (AGAIN, "FAILED", ("interrupted", "time-limit")),  # scancel --batch
        (AGAIN, "CANCELLED", ("cancelled", "cancelled")),
        ({"state": "succeeded", "failure": "succeeded"}, "RUNNING", ("succeeded", "succeeded")),
        ({**AGAIN, "requeue": False}, "COMPLETED", ("interrupted", "time-limit")),
    ],
)
def test_slurm_has_the_word_where_the_supervisor_has_not_had_the_last_one(
    tmp_path: Path, own: dict[str, Any], word: str, expected: tuple[str, str | None]
) -> None:
    status = status_from_slurm(a_run(tmp_path, **own), "7", slurm(word), "")
    assert (status.state, status.failure) == expected


def test_what_a_job_does_while_no_supervisor_of_it_runs_is_said(tmp_path: Path) -> None:
    run = a_run(tmp_path, **RUNNING)

    def reason(word: str) -> str:
        return status_from_slurm(run, "7", slurm(word), "").reason

    assert (reason("RUNNING"), reason("COMPLETING")) == (
        "", "job 7 is ending: some of its processes are still there"
    )  # fmt: skip
    run.event("job", handle="slurm:c:7", start=1)
    assert reason("RUNNING") == "job 7 has begun; its supervisor has not"
    with open(run.supervisor_lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits = "job 7 waits until the supervisor of an earlier start, which still runs, has ended"
        assert reason("RUNNING") == waits
        run.event("started")
        assert reason("RUNNING") == ""


MEMORY = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
HOST = "DataLoader worker (pid 7) is killed by signal: Killed."
STEPS = ["step 1 loss 3.1", "step 2 loss 3.0"]


def begun(run: RunDir, *printed: str, exits: bool = False) -> AttemptDir:
    """An attempt whose supervisor died: rank 0 has printed this, and (`exits`) its worker wrote it down."""
    attempt = run.attempt(0)
    stamp = "2024-03-12T10:11:12.131415Z"
    log = attempt.rank_log(0, 0, "err")
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"{stamp} {line}\n" for line in printed))
    attempt.rank_log(0, 0, "out").write_text("")
    if exits:
        collector = Collector()
        collector.feed("err", "".join(f"{line}\n" for line in printed).encode(), 1, 9.0)
        clues = [clue._asdict() for clue in collector.clues()]
        attempt.exit(0).parent.mkdir()
        replace_json(attempt.exit(0), {"rank": 0, "node": 0, "exit_code": 1, "time": 9.5, "clues": clues})
    return attempt


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize(
    ("word", "printed", "failure", "confidence"),
    [
        ("OUT_OF_MEMORY", STEPS, "host-oom", "certain"),
        ("OUT_OF_MEMORY", [HOST], "host-oom", "certain"),
        ("OUT_OF_MEMORY", ["Connection closed by peer [10.0.0.7]:1"], "host-oom", "certain"),
        ("TIMEOUT", STEPS, "time-limit", "certain"),
        ("TIMEOUT", ["KeyError: 'x'"], "time-limit", "certain"),
        ("TIMEOUT", [MEMORY], "gpu-oom", "likely"),
        ("TIMEOUT", ["OSError: [Errno 28] No space left on device"], "disk-full", "likely"),
        ("NODE_FAIL", ["Connection closed by peer [10.0.0.7]:1"], "node-failed", "certain"),
        ("PREEMPTED", STEPS, "preempted", "certain"),
        ("CANCELLED", STEPS, "cancelled", "certain"),
        ("CANCELLED", ["KeyError: 'x'"], "user-error", "likely"),
        ("FAILED", [MEMORY], "gpu-oom", "likely"),
        ("FAILED", STEPS, "unknown", "guess"),
    ],
)
def test_slurm_s_record_and_the_output_give_one_verdict_where_the_supervisor_died_with_its_job(
    tmp_path: Path, word: str, printed: list[str], failure: str, confidence: str, *, exits: bool
) -> None:
    run = a_run(tmp_path, **RUNNING)
    attempt = begun(run, *printed, exits=exits)
    status = status_from_slurm(run, "7", slurm(word, end=datetime(2024, 3, 12, tzinfo=timezone.utc)), "")
    told = read_record(attempt.verdict)
    assert (status.failure, told["failure"], told["confidence"]) == (failure, failure, confidence)
    assert f"Slurm: 7 {word}" in told["evidence"] and "job 7" in status.reason
    said = "\n".join(why(run, status))
    assert f"cause     {failure}" in said and f"Slurm: 7 {word}" in said
    if failure in ("gpu-oom", "disk-full"):
        assert "rank-000.err:1" in said
    before = attempt.verdict.read_bytes()
    status_from_slurm(run, "7", slurm(word), "")
    assert attempt.verdict.read_bytes() == before


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    run = a_run(tmp_path, **RUNNING)
    attempt = begun(run, *("x" * 1000 for _ in range(2000)), MEMORY)
    status_from_slurm(run, "7", slurm("FAILED"), "")
    assert read_record(attempt.verdict)["failure"] == "gpu-oom"


def test_a_verdict_that_the_supervisor_wrote_stays(tmp_path: Path) -> None:
    run = a_run(tmp_path, **RUNNING)
    attempt = begun(run, MEMORY)
    replace_json(attempt.verdict, {"failure": "user-error", "reason": "its own", "then": ""})
    assert status_from_slurm(run, "7", slurm("OUT_OF_MEMORY"), "").failure == "host-oom"
    assert read_record(attempt.verdict)["reason"] == "its own"


def test_what_slurm_says_of_the_end_is_kept_for_when_it_has_forgotten(tmp_path: Path) -> None:
    run = a_run(tmp_path, **RUNNING)
    first = status_from_slurm(run, "7", slurm("NODE_FAIL"), "")
    assert status_from_slurm(run, "7", Records(), "") == status_from_slurm(
        run, None, Records(), "the controller is down"
    )
    assert (first.state, first.reason) == (run.read_state().state, run.read_state().reason)
    assert [event.kind for event in run.read_events()].count("finished") == 1


def test_a_controller_that_does_not_answer_loses_no_run(tmp_path: Path) -> None:
    status = status_from_slurm(
        a_run(tmp_path, **RUNNING), "7", Records(), "Slurm's controller does not answer"
    )
    assert status.state == "running"
    assert "does not answer" in status.reason


def test_a_job_that_slurm_has_forgotten_without_an_end_is_lost(tmp_path: Path) -> None:
    status = status_from_slurm(a_run(tmp_path, **RUNNING), "7", Records(accounting=NO_ACCOUNTING), "")
    assert (status.state, status.ended, status.resumable) == ("lost", True, True)


def test_a_job_that_was_cancelled_in_the_queue_and_is_forgotten_is_cancelled(tmp_path: Path) -> None:
    run = a_run(tmp_path, state="submitted")
    forgotten = Records(accounting=NO_ACCOUNTING)
    assert status_from_slurm(run, "7", forgotten, "").state == "lost"
    run.cancel.write_text("1\n")
    assert status_from_slurm(run, "7", Records(), "Slurm does not answer").state == "submitted"
    run.event("job", handle="slurm:c:7")
    assert status_from_slurm(run, "7", forgotten, "").state == "lost", "nobody knows how far it came"
    run.event("requeued", handle="slurm:c:8", reason="time-limit", linked=True)
    status = status_from_slurm(run, "8", forgotten, "")
    assert (status.state, status.failure, run.read_state().state) == (
        "cancelled",
        "cancelled",
        "cancelled",
    )


@pytest.mark.parametrize(
    ("task", "accounting", "has_begun", "expected"),
    [
        ("7_2", "", False, "cancelled"),
        ("7_2", "", True, "lost"),
        ("7_2", NO_ACCOUNTING, False, "lost"),
        ("8_2", "", False, "lost"),
    ],
    ids=["cancelled", "begun", "may have ended long ago", "of another array"],
)
def test_a_task_that_has_left_its_waiting_array_was_cancelled(
    tmp_path: Path, task: str, accounting: str, has_begun: bool, expected: str
) -> None:
    run = a_run(tmp_path, state="submitted")
    if has_begun:
        run.event("job", handle=f"slurm:c:{task}")
    known = Records({"7_1": JobRecord(id="7_1", state="PENDING")}, accounting=accounting)
    assert status_from_slurm(run, task, known, "").state == expected


@pytest.mark.parametrize(
    ("state", "then", "said", "kept"),
    [
        ("PENDING", "CANCELLED", "taken out of the queue", "cancelled"),
        ("PENDING", "RUNNING", "asked to write a checkpoint", "submitted"),  # it began at that moment
        ("RUNNING", "RUNNING", "asked to write a checkpoint", "submitted"),
    ],
)
def test_cancel_says_what_it_did(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    then: str,
    said: str,
    kept: str,
) -> None:
    run = a_run(tmp_path, state="submitted")
    replace_json(run.run, {**run.read_about().as_json(), "job": {"name": "j", "task": "tasks.py"}})
    queue = Queue(tmp_path)
    queue.has(_7=state)
    if state == "RUNNING":
        run.event("job", handle="slurm:c:7")
    for name in ("scancel", "sinfo", "sacctmgr"):
        (queue.bin / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{queue.sent}\n')
        (queue.bin / name).chmod(0o755)
    with open(queue.bin / "scancel", "a") as scancel:
        scancel.write(f"sed -i s/{state}/{then}/ {queue.lines}\n")
    monkeypatch.setenv("PATH", f"{queue.bin}:{os.environ['PATH']}")
    opened.clear()
    cancel(str(run.path))
    assert said in capsys.readouterr().out
    assert "scancel --state=PENDING 7" in queue.sent.read_text()
    assert run.read_state().state == kept


def test_a_run_that_has_stopped_before_cancel_looks_again_was_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path, state="submitted")
    run.event("job", handle="slurm:c:7")
    queue = Queue(tmp_path)
    queue.has(_7="RUNNING")
    end = json.dumps({"state": "cancelled", "failure": "cancelled"})
    (queue.bin / "scancel").write_text(f"#!/bin/sh\necho '{end}' >{run.state}\n")
    (queue.bin / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{queue.bin}:{os.environ['PATH']}")
    assert SlurmScheduler().cancel_all([run], run.id) == Cancelled(asked=1)


@pytest.mark.parametrize("refused", [False, True])
def test_a_run_whose_disk_is_full_is_cancelled_by_slurm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    run = a_run(tmp_path, state="running")
    run.event("job", handle="slurm:c:7")
    queue = Queue(tmp_path)
    queue.has(_7="RUNNING")
    refuses = "echo no >&2; exit 1" if refused else ""
    (queue.bin / "scancel").write_text(f'#!/bin/sh\necho "$@" >>{queue.sent}\n{refuses}\n')
    (queue.bin / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{queue.bin}:{os.environ['PATH']}")
    full = OSError(errno.ENOSPC, "No space left on device", str(run.cancel))
    monkeypatch.setattr("launcher.schedulers.store.write_requests_to_stop", Mock(side_effect=full))
    if refused:
        with pytest.raises(SchedulerError, match=r"cannot write .*No space left on device; scancel: no"):
            SlurmScheduler().cancel(run)
    else:
        SlurmScheduler().cancel(run)
    assert queue.sent.read_text().splitlines()[-1] == "7"


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_cancel_that_slurm_refuses_is_heeded_by_a_run_that_has_begun_and_else_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_begun: bool
) -> None:
    run = a_run(tmp_path, state="submitted")
    queue = Queue(tmp_path)
    queue.has(_7="RUNNING" if has_begun else "PENDING")
    for name in ("scancel", "sinfo", "sacctmgr"):
        (queue.bin / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{queue.sent}\necho no >&2\nexit 1\n')
        (queue.bin / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{queue.bin}:{os.environ['PATH']}")
    scheduler = SlurmScheduler()
    if has_begun:
        run.event("job", handle="slurm:c:7")
        scheduler.cancel(run)
        assert "scancel: no; run has begun, and stops anyway" in capsys.readouterr().err
        assert run.cancel.exists()
        return
    for _ in range(2):
        with pytest.raises(SchedulerError, match="scancel: no; run has not begun and was not cancelled"):
            scheduler.cancel(run)
        assert not run.cancel.exists()
    assert queue.sent.read_text().count("scancel --state=PENDING 7") == 2, "neither is the second request"


@pytest.mark.parametrize(
    ("chosen", "asked"),
    [
        ([0, 1, 2, 3], [["scancel", "--state=PENDING", "12"], ["scancel", "12_[0,1,2,3]"]]),
        ([0, 1], [["scancel", "12_[1]"], ["scancel", "12_[0,1]"]]),
        ([0], [["scancel", "12_[0]"]]),
        ([3], [["scancel", "12_[3]"], ["scancel", "12_[3]"]]),
    ],
)
def test_of_a_sweep_only_the_chosen_runs_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: list[int], asked: list[list[str]]
) -> None:
    """Task 0 has begun, the others wait. The first request takes these out of the queue."""
    queue, runs = Queue(tmp_path), []
    for task in range(4):
        run = RunDir(a_run(tmp_path, state="submitted").path.rename(tmp_path / f"run-{task}"))
        run.event("submitted" if task else "job", handle=f"slurm:c:12_{task}")
        runs.append(run)
    rows = [SQUEUE.format(id=f"12_{task}", state="PENDING", run=f"run-{task}") for task in range(4)]
    pending = 'case "$*" in *--states=PENDING*) printf "12_%s\\n" 1 2 3;; *) cat "$0.rows";; esac'
    (queue.bin / "squeue.rows").write_text("\n".join(rows))
    (queue.bin / "squeue").write_text(f"#!/bin/sh\n{pending}\n")
    (queue.bin / "scancel").write_text(f'#!/bin/sh\necho scancel "$@" >>{queue.sent}\n')
    (queue.bin / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{queue.bin}:{os.environ['PATH']}")
    scheduler = SlurmScheduler()
    for _ in range(2):
        scheduler.cancel_all([runs[task] for task in chosen], "these runs")
    calls = queue.sent.read_text().splitlines() if queue.sent.exists() else []
    assert [call.split() for call in calls] == asked


def test_a_run_that_moves_to_a_linked_job_while_it_is_cancelled_is_taken_out_of_the_queue_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, queue = a_run(tmp_path, state="running"), Queue(tmp_path)
    run.event("job", handle="slurm:c:7")
    queue.has(_7="RUNNING")
    moved = json.dumps({"time": now(), "event": "requeued", "handle": "slurm:c:8", "reason": "time-limit"})
    (queue.bin / "moved").write_text(f"{moved}\n")
    moves = f'cat "{queue.bin}/moved" >>"{run.events}"; : >"{queue.bin}/moved"'
    (queue.bin / "scancel").write_text(f'#!/bin/sh\necho "$@" >>{queue.sent}\n{moves}\n')
    (queue.bin / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{queue.bin}:{os.environ['PATH']}")
    SlurmScheduler().cancel(run)
    assert queue.sent.read_text() == "--state=PENDING 7\n--state=PENDING 8\n"


def test_the_handle_is_that_of_the_latest_job(tmp_path: Path) -> None:
    run = a_run(tmp_path, **RUNNING)
    run.event("requeued", handle="slurm:c:8", reason="preempted", linked=True)
    assert handle_of(run, job_of(run)) == "slurm:c:8"


def test_accounting_that_does_not_answer_loses_no_run(tmp_path: Path) -> None:
    status = status_from_slurm(
        a_run(tmp_path, **RUNNING), "7", Records(accounting="accounting does not answer"), ""
    )
    assert (status.state, status.resumable) == ("running", False)
    assert "accounting does not answer" in status.reason


@pytest.mark.parametrize("begins", [False, True], ids=["waits", "begins while it is looked for"])
def test_after_a_lost_answer_the_job_is_looked_for_before_another_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    job = '{"time": "2026-11-28T12:00:00Z", "event": "job", "handle": "slurm:c:9"}'
    begin = f"echo '{job}' >>{tmp_path}/run/events.jsonl" if begins else ":"
    queue = f'case "$*" in *%F*) {begin}; printf "7|run\\n9|run\\n8|other\\n";; *) exit 1;; esac'
    sacct = 'echo "sacct: error: Slurm accounting storage is disabled" >&2; exit 1'
    for name, text in {"squeue": queue, "sacct": sacct, "sbatch": f"touch {tmp_path}/sent; echo 10"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    run = a_run(tmp_path, state="submitted")
    run.event("submitting")
    scheduler = SlurmScheduler()
    assert job_of(run) is None
    assert scheduler.statuses([run])[0].handle == "slurm:c:9", "7 is the job before"
    with pytest.raises(SchedulerError, match="still in the queue"):
        scheduler.resume(run)
    assert not (tmp_path / "sent").exists()
    run.event("refused")
    assert handle_of(run, job_of(run)) == f"slurm:c:{9 if begins else 7}"


def test_a_run_of_a_sweep_that_was_resumed_has_the_job_of_its_own_not_a_task_of_the_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path)
    queue.lines.write_text("8|many|\n9|run|\n")
    monkeypatch.setenv("PATH", f"{queue.bin}:{os.environ['PATH']}")
    run = a_run(tmp_path, state="submitted")
    replace_json(run.submitted, {**run.read_about().as_json(), "sweep": {"id": "many", "task": 1}})
    run.event("submitting")
    assert SlurmScheduler().statuses([run])[0].handle == "slurm:c:9"
    queue.lines.write_text("8|many|\n")
    assert SlurmScheduler().statuses([run])[0].handle == "slurm:c:8_1"


def test_of_two_runs_without_an_answer_each_has_a_handle_of_its_own(tmp_path: Path) -> None:
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        run = RunDir(a_run(tmp_path / name, state="submitted").path.rename(tmp_path / name / name))
        run.event("submitting")
        runs.append(run)
    handles = [handle_of(run, job_of(run)) for run in runs]
    assert handles == ["slurm:c:run/first", "slurm:c:run/second"]
    assert status_from_slurm(runs[1], None, Records(), "its controller is down").handle == handles[1]


def test_a_run_is_known_from_any_folder_before_sbatch_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(f'#!/bin/sh\ncp "{tmp_path}/state/launcher/roots" "{tmp_path}/then"; echo 12\n')
    sbatch.chmod(0o755)
    (tmp_path / "bin" / "srun").symlink_to(sbatch)  # submitit looks for it
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    job = {"name": "j", "command": ["true"], "batch": {"global": 1}, "resources": {"gpus_per_node": 0}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (tmp_path / "c.yaml").write_text(json.dumps({"name": "c", "scheduler": "slurm", "slurm": {}}))
    ready = prepared(tmp_path / "job.yaml", str(tmp_path / "c.yaml"), [])[1]
    scheduler = SlurmScheduler()
    assert scheduler.handle(scheduler.submit(ready)) == "slurm:c:12"
    assert (tmp_path / "then").read_text() == f"{tmp_path}/runs\n"


DOWN = "sbatch: error: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize("at", ["before sbatch", "between two tries", "in sbatch", "killed before sbatch"])
def test_an_interrupted_submission_leaves_no_run_unless_slurm_may_have_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    queue = Queue(tmp_path)
    monkeypatch.setenv("PATH", f"{queue.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    job = {"name": "j", "command": ["true"], "batch": {"global": 1}, "resources": {"gpus_per_node": 0}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (tmp_path / "c.yaml").write_text(json.dumps({"name": "c", "scheduler": "slurm", "slurm": {}}))
    (queue.bin / "sbatch").write_text(f"#!/bin/sh\necho '{DOWN}' >&2; exit 1\n")
    ready = prepared(tmp_path / "job.yaml", str(tmp_path / "c.yaml"), [])[1]
    scheduler, run = SlurmScheduler(), RunDir(Path(ready.run_dir))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=interrupted)
    with monkeypatch.context() as patch:
        if at == "between two tries":
            patch.setattr("launcher.schedulers.slurm.jobs.time", clock)
        elif at == "in sbatch":
            patch.setattr("launcher.schedulers.slurm.jobs._submit_once", interrupted)
        else:
            patch.setattr(Submission, "_through_submitit", interrupted)
        if at == "killed before sbatch":
            patch.setattr(scheduler, "remove", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            scheduler.submit(ready)
    if at in ("before sbatch", "between two tries"):
        assert not run.path.exists()
        return
    status = states_of([run])[run]
    if at == "in sbatch":
        assert (status.state, status.failure) == ("lost", "node-failed")
        assert "Slurm has no job of this run" in status.reason
        return
    assert status.state == "submitted" and "still sending" in status.reason, "this process might go on"
    with pytest.raises(SchedulerError, match="still sending"):
        resume(run)
    ended = subprocess.Popen(["true"])
    ended.wait()
    replace_json(run.state, {**run.read_state().as_json(), "submitter": {**this_process(), "pid": ended.pid}})
    status = states_of([run])[run]
    assert (status.state, status.failure) == ("failed", None) and "it was not submitted" in status.reason
    assert not status.resumable and "launcher resume" not in "".join(why(run, status))
    with pytest.raises(SchedulerError, match="submit it again"):
        resume(run)
    with monkeypatch.context() as patch:
        patch.setattr("launcher.schedulers.slurm.jobs.time", clock)
        for state in ("submitted", "cancelled"):
            replace_json(run.state, {"state": state})
            with pytest.raises(KeyboardInterrupt):
                scheduler.resume(run)
            assert run.read_state().state == state
    (queue.bin / "sbatch").write_text("#!/bin/sh\necho 12\n")
    scheduler.resume(run)
    assert scheduler.handle(run) == "slurm:c:12" and run.read_state().state == "submitted"


def sweep_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, runs: int
) -> tuple[SlurmScheduler, PreparedSweep]:
    """Prepare a sweep of a job in `folder`, which becomes the current one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.chdir(folder)
    job = {"name": "j", "command": ["true"], "batch": {"global": 1}, "resources": {"gpus_per_node": 0}}
    (folder / "job.yaml").write_text(json.dumps(job))
    (folder / "c.yaml").write_text(json.dumps({"name": "c", "scheduler": "slurm", "slurm": {}}))
    scheduler = SlurmScheduler()
    ready = [prepared(folder / "job.yaml", str(folder / "c.yaml"), [])[1] for _ in range(runs)]
    return scheduler, scheduler.prepare_sweep("many", [(one, ("seed=1",)) for one in ready])


def test_a_sweep_whose_folder_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, sweep = sweep_in(tmp_path, monkeypatch, runs=1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "sweeps").write_text("a file in its place")
    with pytest.raises(SchedulerError, match=r"cannot write .*/runs/sweeps/many: "):
        scheduler.submit_sweep(sweep)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["sweeps"]


def test_a_sweep_that_is_interrupted_before_slurm_is_asked_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, sweep = sweep_in(tmp_path, monkeypatch, runs=2)
    recorded: list[RunDir] = []

    def append(run: RunDir, event: Event) -> None:
        if recorded:
            raise KeyboardInterrupt
        recorded.append(run)
        record(run, event)

    record = RunDir.append
    monkeypatch.setattr(RunDir, "append", append)
    with pytest.raises(KeyboardInterrupt):
        scheduler.submit_sweep(sweep)
    assert len(recorded) == 1 and list((tmp_path / "runs").glob("j-*")) == []
