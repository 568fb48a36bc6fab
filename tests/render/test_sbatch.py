"""The body of the batch script under stubs of srun and scontrol: exit codes, signals, hosts, ports."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from launcher.render.quote import RenderError
from launcher.render.values import Target
from launcher.rundir.layout import RunDir
from launcher.rundir.stop import StopRequest, read_stop_request
from launcher.schedulers.rundir import latest_handle
from launcher.spec.cluster import Cluster, Node
from launcher.spec.events import Requeued, Resubmitted, Submitting
from launcher.spec.job import Job
from launcher.spec.verdict import EXIT_CODES, FailureClass
from launcher.supervise.interface import own_address
from tests.lab import PATIENCE
from tests.render import stubs
from tests.render.run import notes, render_run
from tests.render.test_arrives import slurm_reads

CLUSTER = Cluster.model_validate(
    {"name": "s", "scheduler": "slurm", "max_nodes": 4, "slurm": {"signal_seconds": 60}}
)
HOSTS = "127.0.1.1 n1\n10.0.0.1 n1\n10.0.0.2 n2"


def write(folder: Path, stub: stubs.Stubs, cluster: Cluster = CLUSTER, **fields: object) -> Path:
    """Render into `folder/run/scripts`; gives the batch script."""
    job = Job.model_validate({"name": "j", "batch": {"global": 8}, "command": ["true"], **fields})
    run_dir = folder / "run"
    (run_dir / "scripts").mkdir(parents=True, exist_ok=True)
    target = Target(
        job=job,
        cluster=cluster,
        run_id="run",
        run_dir=str(run_dir),
        workdir=str(folder),
        python=str(stub.python),
        nodes=job.resources.nodes,
        ranks_per_node=1,
    )
    for file in render_run(target):
        (run_dir / "scripts" / file.path).write_text(file.text)
    return run_dir / "scripts" / "job.sbatch"


def start(script: Path, stub: stubs.Stubs, /, **env: str) -> subprocess.Popen[bytes]:
    slurm = {"SLURM_JOB_ID": "70007", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1", **env}
    return subprocess.Popen(["bash", str(script)], env=stub.env(**slurm), stderr=subprocess.PIPE, cwd="/")


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=240)
    return process.returncode, errors.decode()


def test_a_profile_needs_no_slurm_section(tmp_path: Path) -> None:
    stub, plain = stubs.make(tmp_path / "stubs"), {"name": "s", "scheduler": "slurm"}
    without = write(tmp_path, stub, Cluster.model_validate(plain)).read_text()
    assert without == write(tmp_path, stub, Cluster.model_validate({**plain, "slurm": {}})).read_text()
    assert "#SBATCH --signal=B:USR2@120" in without


@pytest.mark.parametrize("code", [0, 1, 85, 143])
def test_the_exit_code_of_the_supervisor_survives_srun_and_the_batch_shell(tmp_path: Path, code: int) -> None:
    stub = stubs.make(tmp_path / "stubs")
    got, _ = finish(start(write(tmp_path, stub), stub, STUB_EXIT=str(code)))
    assert got == code


def test_the_code_of_the_first_node_counts_when_srun_ends_the_others(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    srun = (stub.bin / "srun").read_text().replace('exec "$@"', '"$@"\nexit 143')
    (stub.bin / "srun").write_text(srun)
    assert finish(start(script, stub, STUB_EXIT="17"))[0] == 17
    (tmp_path / "run" / "slurm-70007-0.exit").unlink()
    (tmp_path / "run" / "scripts" / "on-node.sh").unlink()
    assert finish(start(script, stub, STUB_EXIT="17"))[0] == 143


@pytest.mark.parametrize(
    ("said", "code", "failure", "reason"),
    [
        (
            "[launcher] hello\n[launcher] secrets: no file /t\nbye",
            2,
            "unknown",
            "secrets: no file /t (exit code",
        ),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0",
            11,
            "host-oom",
            "too little host memory",
        ),
        ("Traceback", 2, "unknown", "ended without a word (exit code 2); see "),
        (
            "srun: Job step aborted\nslurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 13:21:10 ***",
            EXIT_CODES["cancelled"],
            "cancelled",
            "without a warning: slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT 13:21:10 ***",
        ),
        (
            "srun: Job step aborted\nslurmstepd: error: *** STEP 7.1 CANCELLED AT X DUE TO TIME LIMIT ***",
            2,
            "unknown",
            "exit code 2): slurmstepd: error: *** STEP 7.1 CANCELLED AT X DUE TO TIME LIMIT ***; see ",
        ),
        (
            "srun: error: n2: task 1: Killed\nslurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT X ***",
            2,
            "unknown",
            "exit code 2): srun: error: n2: task 1: Killed; see ",
        ),
        (
            "srun: error: n2: task 1: Killed\n[launcher] preempted: the ranks have 9 s to end",
            2,
            "unknown",
            "exit code 2): srun: error: n2: task 1: Killed; see ",
        ),
    ],
)
def test_what_a_node_said_last_is_the_reason_where_no_verdict_came(
    tmp_path: Path, said: str, code: int, failure: str, reason: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    file = tmp_path / "run" / "slurm-70007-0-node-0.out"
    file.write_text(said + "\n")
    assert finish(start(script, stub, STUB_EXIT="2"))[0] == code
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["failure"] == failure and reason in state["reason"]
    assert (str(file) in state["reason"]) == said.startswith("[launcher]")


@pytest.mark.parametrize("requeue", [True, False])
@pytest.mark.parametrize(
    ("killed", "reason"),
    [
        ("supervisor", "the supervisor of node n1 was killed (SIGKILL)"),
        ("srun", "srun or its task on a node was killed (SIGKILL)"),
    ],
)
def test_where_the_supervisor_of_the_first_node_or_srun_was_killed_the_run_goes_on(
    tmp_path: Path, killed: str, reason: str, requeue: bool
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub, requeue=requeue)
    if killed == "srun":
        srun = (stub.bin / "srun").read_text().replace('exec "$@"', "kill -KILL $$")
        (stub.bin / "srun").write_text(srun)
    code, _ = finish(start(script, stub, STUB_EXIT="137"))
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert code == EXIT_CODES["node-failed"]
    assert state["state"] == ("submitted" if requeue else "failed")
    assert "node-failed" in state["reason"]
    assert requeue or state["reason"].endswith(reason)


def test_srun_gets_every_rule_of_the_catalogue(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub, resources={"nodes": 2, "cpus_per_node": 8})
    env = {"SLURM_JOB_NODELIST": "n1,n2", "STUB_HOSTS": HOSTS, "SLURM_CPUS_PER_TASK": "8"}
    code, errors = finish(start(script, stub, SLURM_RESTART_COUNT="2", STUB_ROUTE="10.0.0.1", **env))
    assert code == 0, errors
    called = [item.decode() for item in stub.called("srun")]
    run = tmp_path / "run"
    assert called[1:10] == [
        *["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60", "--export=ALL"],
        *["--unbuffered", "--open-mode=append", f"--output={run}/slurm-%j-2-node-%n.out", "--mpi=none"],
    ]
    assert not any("gpu" in item or "gres" in item for item in called)
    srun_env = Path(f"{stub.out}.srun.env").read_bytes().split(b"\0")
    assert b"SRUN_CPUS_PER_TASK=8" in srun_env
    port = 61000 + (70007 * 31 + 2 * 17) % 4536
    assert stub.python_argv() == [
        *[b"-m", b"launcher.supervise", str(run).encode()],
        *[b"--stop-file", f"{run}/slurm-70007-2.stop".encode(), b"--nodes", b"2", b"--node-rank", b"0"],
        *[b"--rendezvous", b"10.0.0.1", b"--port-base", str(port).encode()],
    ]
    assert 61000 <= port <= 65535


@pytest.mark.parametrize(
    ("hosts", "nodelist", "message"),
    [
        (HOSTS, "", "Slurm names 0 hosts"),
        (HOSTS, "n1", "Slurm names 1 hosts"),
        ("127.0.1.1 n1\n::1 n1\n127.0.0.1 n2", "n1,n2", "no address that another node can reach"),
    ],
)
def test_no_host_or_only_loopback_fails_at_once(
    tmp_path: Path, hosts: str, nodelist: str, message: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub, resources={"nodes": 2})
    code, errors = finish(start(script, stub, SLURM_JOB_NODELIST=nodelist, STUB_HOSTS=hosts))
    assert code == 78
    assert message in errors
    assert not stub.called("srun")


def test_where_the_own_name_is_loopback_and_ip_is_missing_the_routing_table_gives_the_address(
    tmp_path: Path,
) -> None:
    try:
        expected = own_address("192.0.2.1", 9)
    except OSError:
        pytest.skip("this machine has no route to other hosts")
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub, resources={"nodes": 2})
    hosts = "127.0.1.1 n1\n192.0.2.1 n2"
    code, errors = finish(start(script, stub, SLURM_JOB_NODELIST="n1,n2", STUB_HOSTS=hosts))
    assert code == 0, errors
    assert stub.python_argv()[-4:-1] == [b"--rendezvous", expected.encode(), b"--port-base"]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def test_usr2_reaches_the_supervisor_alone_and_the_step_is_waited_for(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    process = start(write(tmp_path, stub), stub, STUB_MODE="wait", STUB_EXIT="85")
    wait_for(stub.out)
    process.send_signal(signal.SIGUSR2)
    process.send_signal(signal.SIGUSR2)
    code, errors = finish(process)
    assert code == 85, errors
    assert Path(f"{stub.out}.signals").read_text() == "told: time-limit"
    assert errors.count("asking for a checkpoint") == 1
    assert b"requeue" not in stub.called("scontrol"), "without an interrupted run there is nothing to requeue"


NEAR = "JobState=RUNNING Restarts=0 RunTime=00:00:30 TimeLimit=00:01:00"
ARRAY = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}


def events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]


def interrupted(
    tmp_path: Path,
    stub: stubs.Stubs,
    signum: signal.Signals = signal.SIGUSR2,
    requeue: bool = True,
    exit_code: int = 16,
    cancel: bool = False,
    **env: str,
) -> str:
    """A run that is asked to stop, and whose supervisor wants to go on; gives what the script said."""
    script = write(tmp_path, stub, requeue=requeue)
    assert ("--requeue" if requeue else "--no-requeue") in slurm_reads(script.read_text())
    process = start(script, stub, STUB_MODE="wait-interrupted", STUB_EXIT="16", **env)
    wait_for(stub.out)
    if cancel:
        (tmp_path / "run" / "cancel").write_text("1\n")
    process.send_signal(signum)
    code, errors = finish(process)
    assert code == exit_code, f"whatever becomes of the requeue, the exit code stays: {errors}"
    return errors


@pytest.mark.parametrize(("array", "id_"), [({}, "70007"), (ARRAY, "9_3")])
def test_an_interrupted_run_goes_back_into_the_queue_under_its_id(
    tmp_path: Path, array: dict[str, str], id_: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    interrupted(tmp_path, stub, STUB_JOB=NEAR, **array)
    assert [item.decode() for item in stub.called("scontrol")][-2:] == ["requeue", id_]
    assert not stub.called("sbatch")
    last = events(tmp_path)[-1]
    assert (last["event"], last["handle"], last["reason"]) == ("requeued", f"slurm:s:{id_}", "time-limit")
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["state"] == "submitted"


def test_a_job_that_forbids_it_is_not_requeued(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    interrupted(tmp_path, stub, requeue=False, STUB_JOB=NEAR)
    assert b"requeue" not in stub.called("scontrol")
    assert not stub.called("sbatch")


@pytest.mark.parametrize(("restarts", "scancelled"), [("0", []), ("1", ["scancel", "70007"])])
def test_a_run_that_was_cancelled_at_the_last_moment_does_not_go_back_into_the_queue(
    tmp_path: Path, restarts: str, scancelled: list[str]
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    (stub.bin / "scancel").symlink_to(stub.bin / "sbatch")
    interrupted(tmp_path, stub, exit_code=18, cancel=True, STUB_JOB=f"{LONG} Restarts={restarts}")
    assert b"requeue" not in stub.called("scontrol") and not stub.called("sbatch")
    assert [item.decode() for item in stub.called("scancel")] == scancelled
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["state"], state["failure"]) == ("cancelled", "cancelled")
    assert (events(tmp_path)[-1]["event"], events(tmp_path)[-1]["state"]) == ("finished", "cancelled")


def test_a_job_that_is_cancelled_does_not_go_back_into_the_queue_when_its_supervisor_is_not_told(
    tmp_path: Path,
) -> None:
    """As on a full disk: scancel's SIGTERM then looks like a preemption."""
    stub = stubs.make(tmp_path / "stubs")
    job = f"JobState=COMPLETING Restarts=0 {LONG} PreemptTime=None"
    interrupted(tmp_path, stub, signal.SIGTERM, exit_code=18, STUB_JOB=job)
    assert b"requeue" not in stub.called("scontrol") and not stub.called("sbatch")
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "cancelled"


@pytest.mark.parametrize(("restarts", "scancelled"), [("0", []), ("1", ["scancel", "70007"])])
def test_a_cancelled_run_that_slurm_has_requeued_by_itself_leaves_the_queue(
    tmp_path: Path, restarts: str, scancelled: list[str]
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    (stub.bin / "scancel").symlink_to(stub.bin / "sbatch")
    job = f"{LONG} Restarts={restarts}"
    process = start(write(tmp_path, stub), stub, STUB_MODE="wait", STUB_EXIT="18", STUB_JOB=job)
    wait_for(stub.out)
    (tmp_path / "run" / "cancel").write_text("1\n")
    (tmp_path / "run" / "state.json").write_text('{"state": "cancelled"}')
    process.send_signal(signal.SIGTERM)
    code, errors = finish(process)
    assert code == 18, errors
    assert [item.decode() for item in stub.called("scancel")] == scancelled


def test_a_run_that_was_cancelled_before_its_job_starts_ends_there(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    (tmp_path / "run" / "cancel").write_text("1\n")
    code, errors = finish(start(script, stub))
    assert code == 18 and not stub.called("srun"), errors
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "cancelled"


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_run_that_has_succeeded_does_not_start_again_when_its_job_is_requeued(
    tmp_path: Path, restarts: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    (tmp_path / "run" / "state.json").write_text('{"state": "succeeded"}')
    code, errors = finish(start(script, stub, SLURM_RESTART_COUNT=restarts))
    assert code == 0, errors
    assert bool(stub.called("srun")) == (restarts == "0"), "a person may start the script again"
    assert (tmp_path / "run" / "events.jsonl").exists() == (restarts == "0")


def test_what_slurm_has_requeued_by_itself_is_not_requeued_again(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    interrupted(tmp_path, stub, signal.SIGTERM, STUB_JOB="JobState=COMPLETING Restarts=1 RunTime=00:00:01")
    assert b"requeue" not in stub.called("scontrol")
    assert not stub.called("sbatch")
    assert events(tmp_path)[-1]["event"] == "requeued"


def test_where_a_requeue_is_refused_the_run_goes_on_in_a_linked_job_with_a_clean_environment(
    tmp_path: Path,
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    mine = {"SLURM_CPUS_PER_TASK": "8", "SBATCH_PARTITION": "x", "SLURM_CONF": "/c", "SLURM_JOB_ACCOUNT": "a"}
    interrupted(tmp_path, stub, STUB_JOB=NEAR, STUB_REQUEUE_EXIT="1", **mine, **ARRAY)
    called = [item.decode() for item in stub.called("sbatch")]
    assert called == ["sbatch", "--parsable", "--account=a", f"{tmp_path}/run/scripts/job.sbatch", "70007-0"]
    env = Path(f"{stub.out}.sbatch.env").read_bytes().split(b"\0")
    names = {item.partition(b"=")[0].decode() for item in env if item}
    assert {name for name in names if name.startswith(("SLURM", "SBATCH", "SRUN"))} == {"SLURM_CONF"}
    last = events(tmp_path)[-1]
    assert (last["event"], last["handle"], last["linked"]) == ("requeued", "slurm:s:70008", True)


def test_a_run_that_cannot_go_on_says_so_and_stays_resumable(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    (stub.bin / "squeue").write_text("#!/bin/sh\n")
    (stub.bin / "squeue").chmod(0o755)
    refusal = 'sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Job violates "policy" (MaxSubmitJobs)'
    (stub.bin / "sbatch").write_text(f"#!/bin/sh\necho '{refusal}' >&2\nexit 1\n")
    errors = interrupted(tmp_path, stub, STUB_JOB=NEAR, STUB_REQUEUE_EXIT="1")
    assert "launcher resume" in errors
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["state"], state["requeue"]) == ("interrupted", False)
    assert state["reason"] == (
        "its time was over; Slurm does not put job 70007 back into the queue, and refused another: "
        + refusal.replace("\n", "; ")
    )


LONG = "RunTime=00:10:00 TimeLimit=1-00:00:00"


@pytest.mark.parametrize(
    ("signum", "job", "reason"),
    [
        (signal.SIGUSR2, NEAR, "time-limit"),
        (signal.SIGUSR2, "", "time-limit"),
        (signal.SIGUSR2, f"JobState=RUNNING Restarts=0 {LONG}", "preempted"),
        (signal.SIGUSR2, f"{NEAR} PreemptTime=2026-11-21T23:10:18", "preempted"),
        (signal.SIGUSR2, f"{NEAR} PreemptTime=None", "time-limit"),
        (signal.SIGTERM, f"JobState=COMPLETING Restarts=0 {LONG} PreemptTime=None", "cancelled"),
        (signal.SIGTERM, f"JobState=CANCELLED Restarts=0 {LONG}", "cancelled"),
        (
            signal.SIGTERM,
            f"JobState=COMPLETING Restarts=0 {LONG} PreemptTime=2026-11-21T23:10:18",
            "preempted",
        ),
        (signal.SIGTERM, "JobState=COMPLETING Restarts=0 RunTime=00:01:02 TimeLimit=00:01:00", "time-limit"),
        (signal.SIGTERM, f"JobState=RUNNING Restarts=0 {LONG}", "preempted"),
        (signal.SIGTERM, "JobState=COMPLETING Restarts=1 RunTime=00:00:00", "preempted"),
    ],
)
def test_the_controller_tells_why_the_job_is_to_stop(
    tmp_path: Path, signum: signal.Signals, job: str, reason: FailureClass
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    process = start(write(tmp_path, stub), stub, STUB_MODE="wait", STUB_EXIT="3", STUB_JOB=job)
    wait_for(stub.out)
    process.send_signal(signum)
    assert finish(process)[0] in (3, EXIT_CODES[reason]), "the supervisor's, or Slurm's word of the job"
    assert Path(f"{stub.out}.signals").read_text() == f"told: {reason}"


def kill_wait(stub: stubs.Stubs) -> None:
    """Slurm kills 30 s after it has asked."""
    more = "'show config') echo 'KillWait = 30 sec';;\n'show job')"
    scontrol = (stub.bin / "scontrol").read_text().replace("'show job')", more)
    (stub.bin / "scontrol").write_text(scontrol)


def test_how_long_there_is_does_not_depend_on_the_clock_of_the_first_node(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    kill_wait(stub)
    (stub.bin / "date").write_text('#!/bin/sh\ncase $* in +%s) echo 5 ;; *) exec /bin/date "$@" ;; esac\n')
    (stub.bin / "date").chmod(0o755)
    job = f"JobState=COMPLETING Restarts=0 {LONG}"
    process = start(write(tmp_path, stub), stub, STUB_MODE="wait", STUB_EXIT="3", STUB_JOB=job)
    wait_for(stub.out)
    process.send_signal(signal.SIGTERM)
    finish(process)
    told = read_stop_request(tmp_path / "run" / "slurm-70007-0.stop")
    assert told == StopRequest("cancelled", left=30)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2])
def test_the_batch_script_is_told_of_a_signal_to_the_step_alone(
    tmp_path: Path, signum: signal.Signals
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub).rename(tmp_path / "slurm_script")
    process = start(script, stub, STUB_MODE="wait", STUB_JOB=f"JobState=RUNNING Restarts=0 {LONG}")
    wait_for(stub.out)
    (on_node,) = (
        one
        for one in psutil.Process(process.pid).children()
        if f"{tmp_path}/run/scripts/on-node.sh" in one.cmdline()
    )
    on_node.send_signal(signum)
    finish(process)
    assert Path(f"{stub.out}.signals").read_text() == "told: preempted"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            ["slurmstepd: error: *** JOB 70007 ON n1 CANCELLED AT X DUE TO NODE FAILURE, SEE LOG ***"],
            "node-failed",
        ),
        (["srun: error: Node failure on n2"], "node-failed"),
        (["srun: error: Node failure on n2", "[launcher] job 70007, start 0, nodes n1"], "cancelled"),
    ],
    ids=["another node than the first", "told by srun", "in an earlier start"],
)
def test_a_node_that_fails_is_why_the_job_is_to_stop(tmp_path: Path, said: list[str], reason: str) -> None:
    stub = stubs.make(tmp_path / "stubs")
    job = f"JobState=COMPLETING Restarts=0 {LONG}"
    process = start(write(tmp_path, stub), stub, STUB_MODE="wait", STUB_EXIT="3", STUB_JOB=job)
    wait_for(stub.out)
    (tmp_path / "run" / "slurm-70007.out").write_text("\n".join([*said, ""]))
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == EXIT_CODES[reason]
    assert Path(f"{stub.out}.signals").read_text() == f"told: {reason}"


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ([], StopRequest("node-failed", left=30)),
        (["[launcher] the step ended with exit code 14"], StopRequest("preempted")),
    ],
    ids=["of this step", "of an earlier step"],
)
def test_srun_ends_the_step_when_the_supervisor_of_a_node_has_ended(
    tmp_path: Path, ended: list[str], told: StopRequest
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    kill_wait(stub)
    job = f"JobState=RUNNING Restarts=0 {LONG}"
    process = start(write(tmp_path, stub), stub, STUB_MODE="wait", STUB_EXIT="3", STUB_JOB=job)
    wait_for(stub.out)
    said = ["srun: error: n2: task 1: Exited with exit code 137", "srun: Terminating StepId=70007.1", *ended]
    (tmp_path / "run" / "slurm-70007.out").write_text("\n".join([*said, ""]))
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert read_stop_request(tmp_path / "run" / "slurm-70007-0.stop") == told


def unfit(tmp_path: Path, stub: stubs.Stubs, **fields: object) -> tuple[int, str]:
    """Two nodes, of which the second cannot import launcher."""
    script = write(tmp_path, stub, resources={"nodes": 2}, **fields)
    check = script.parent / "check-node.sh"
    looks = 'import os; assert os.environ["SLURMD_NODENAME"] == "n1"'
    check.write_text(check.read_text().replace("import launcher.supervise, pydantic", looks))
    return finish(start(script, stub, SLURM_JOB_NODELIST="n1,n2", STUB_HOSTS=HOSTS, STUB_ROUTE="10.0.0.1"))


def test_a_job_with_an_unfit_node_goes_on_without_it_before_anything_starts(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    code, errors = unfit(tmp_path, stub)
    assert code == 14, errors
    assert not stub.called("srun")
    assert b"--exclude=n2" in stub.called("sbatch")
    last = events(tmp_path)[-1]
    assert (last["reason"], last["linked"], last["handle"]) == ("unhealthy-node", True, "slurm:s:70008")


def test_an_unfit_node_is_the_verdict_where_the_budget_is_spent(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    code, _ = unfit(tmp_path, stub, retries={"same": 0})
    assert code == 14
    assert not stub.called("sbatch")
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert (state["state"], state["failure"]) == ("failed", "node-failed")
    assert "node n2: the interpreter does not import launcher: AssertionError" in state["reason"]


@pytest.mark.parametrize(
    ("second", "code", "shown"),
    [
        ("(exit 9)", 9, "(exit 9)"),
        ("  exit 3", 3, "exit 3"),
        ("source ./broken.sh", 4, "source ./broken.sh"),
        ("broken() { return 5; }; broken", 5, "broken() { return 5; }; broken"),
    ],
)
def test_a_failing_setup_line_stops_the_job_with_its_number_its_text_and_what_it_printed(
    tmp_path: Path, second: str, code: int, shown: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    (tmp_path / "broken.sh").write_text("true\n(exit 4)\n")
    lines = (f"cd {tmp_path}; echo $UNSET_IS_FINE; echo a sign of life: $HF_TOKEN >&2", second, "echo never")
    script = write(tmp_path, stub, CLUSTER.model_copy(update={"setup": lines}), secrets=["HF_TOKEN"])
    log = tmp_path / "run" / "slurm-70007.out"
    log.write_text("of the start before\n")
    env = stub.env(SLURM_JOB_ID="70007", SLURM_JOB_NODELIST="n1", SLURMD_NODENAME="n1", HF_TOKEN="hf_secret1")
    with open(log, "ab") as file:  # as Slurm does
        done = subprocess.run(["bash", script], env=env, stdout=file, stderr=file, check=False)
    assert done.returncode == 17, log.read_text()
    said = f"line 2 of setup in the cluster profile failed with exit code {code}: {shown} (it printed:"
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    reason = state["reason"]
    assert (
        state["failure"] == "user-error" and reason.startswith(said) and "a sign of life: ***)" in reason
    ), reason
    assert "never" not in log.read_text() and not stub.called("srun")


def test_module_is_found_where_the_batch_shell_is_no_login_shell(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text(
        'module() { [[ $2 == cuda ]] && export LOADED="$2 $NO_SUCH_NAME"; }\n'
    )
    script = write(tmp_path, stub, CLUSTER.model_copy(update={"setup": ("module load cuda",)}))
    assert finish(start(script, stub, MODULESHOME=str(tmp_path)))[0] == 0
    assert stub.python_env()[b"LOADED"] == b"cuda "
    code, errors = finish(start(script, stub))
    assert code == 17
    assert "line 1 of setup" in errors and "add a line before this one that sources the file" in errors


def test_a_job_whose_library_is_not_there_says_so_in_one_line(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    (script.parent / "slurm-lib.sh").unlink()
    code, errors = finish(start(script, stub))
    assert code == 78
    assert "cannot read" in errors.splitlines()[-1] and "file system that the nodes share" in errors


def test_a_signal_that_comes_before_the_library_is_read_counts(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    lib = script.parent / "slurm-lib.sh"
    lib.write_text("kill -TERM $$\n" + lib.read_text())
    code, errors = finish(start(script, stub, STUB_JOB=f"{LONG} JobState=COMPLETING Restarts=0"))
    assert code == 18, errors
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "cancelled"


def test_setup_runs_once_and_reaches_the_supervisor(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(
        tmp_path,
        stub,
        CLUSTER.model_copy(
            update={"setup": ("export FROM_SETUP='a b'", f"trap 'touch {tmp_path}/trap' EXIT")}
        ),
    )
    assert finish(start(script, stub))[0] == 0
    assert (tmp_path / "trap").exists()
    assert stub.python_env()[b"FROM_SETUP"] == b"a b"
    assert stub.python_env()[b"LAUNCHER_SETUP_DONE"] == b"1"


def with_slurm(**slurm: object) -> Cluster:
    return Cluster.model_validate({**CLUSTER.model_dump(), "slurm": {"signal_seconds": 60, **slurm}})


@pytest.mark.parametrize(
    ("node", "slurm", "ranks", "asked", "noted"),
    [
        ({}, {}, 4, ["--cpus-per-task=4"], "the job gets 4 CPUs of each node, one a rank"),
        ({}, {}, 1, [], "the job gets what the site gives, mostly one core"),
        ({}, {"exclusive": True}, 4, [], ""),
        ({}, {"extra": {"cpus-per-gpu": 8}}, 4, [], ""),
        ({"cpus": 16}, {}, 4, ["--cpus-per-task=16"], ""),
    ],
)
def test_ranks_do_not_share_a_core_where_the_profile_does_not_tell_of_the_nodes_cpus(
    tmp_path: Path,
    node: dict[str, object],
    slurm: dict[str, object],
    ranks: int,
    asked: list[str],
    noted: str,
) -> None:
    cluster = with_slurm(**slurm).model_copy(update={"node": Node.model_validate(node)})
    job = Job.model_validate({"name": "j", "batch": {"global": 8}, "command": ["true"]})
    target = Target(job, cluster, "run", "/r", "/", "python", nodes=1, ranks_per_node=ranks)
    script = next(file.text for file in render_run(target) if file.path == "job.sbatch")
    assert [one for one in slurm_reads(script) if one.startswith("--cpus-per-task")] == asked
    said = [note for note in notes(target) if note.startswith("node.cpus is not set")]
    assert len(said) == bool(noted) and (not noted or noted in said[0])


def test_gpus_time_memory_and_extra_options_are_written_as_slurm_reads_them(tmp_path: Path) -> None:
    cluster = with_slurm(
        gpu_request="gres", gres_type="a100", extra={"mail-type": "END,FAIL", "contiguous": True}
    )
    resources = {"gpus_per_node": 4, "time": "1d2h", "memory_per_node": "100.5MiB", "cpus_per_node": 16}
    script = write(tmp_path, stubs.make(tmp_path / "stubs"), cluster, resources=resources)
    options = slurm_reads(script.read_text())
    expected = {"--gres=gpu:a100:4", "--time=1-02:00:00", "--mem=101M", "--cpus-per-task=16", "--nodes=1"}
    expected |= {"--mail-type=END,FAIL", "--contiguous", "--signal=B:USR2@60", "--ntasks-per-node=1"}
    assert expected <= set(options)
    assert "--open-mode=append" in options and "set -x" not in script.read_text()


@pytest.mark.parametrize(
    ("slurm", "expected", "absent"),
    [
        ({"gres": ["nvme:1", "lustre"]}, ["--gres=nvme:1,lustre", "--gpus-per-node=2"], []),
        ({"gres": ["nvme:1"], "gpu_request": "gres"}, ["--gres=gpu:2,nvme:1"], []),
        ({}, ["--propagate=NONE", "--comment=run"], []),
        ({"extra": {"propagate": "NOFILE"}}, ["--propagate=NOFILE"], ["--propagate=NONE"]),
        ({"comment": False}, [], ["--comment=run"]),
        ({"comment": False, "extra": {"comment": "project 7"}}, ["--comment=project 7"], ["--comment=run"]),
    ],
)
def test_options_that_sites_ask_for(
    tmp_path: Path, slurm: dict[str, object], expected: list[str], absent: list[str]
) -> None:
    script = write(
        tmp_path, stubs.make(tmp_path / "stubs"), with_slurm(**slurm), resources={"gpus_per_node": 2}
    )
    options = slurm_reads(script.read_text())
    assert set(expected) <= set(options) and not set(absent) & set(options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--cpu-bind=none", "--mem-bind=local"], ["--mpi=none", "--cpu-bind=none", "--mem-bind=local"]),
        (["--mpi=pmix", "--comment=it's $(id)"], ["--mpi=pmix", "--comment=it's $(id)"]),
    ],
)
def test_srun_gets_the_options_of_the_profile(
    tmp_path: Path, options: list[str], expected: list[str]
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    assert finish(start(write(tmp_path, stub, with_slurm(srun_options=options)), stub))[0] == 0
    called = [item.decode() for item in stub.called("srun")]
    assert called[called.index(expected[0]) :][: len(expected)] == expected
    assert sum(item.startswith("--mpi=") for item in called) == 1


@pytest.mark.parametrize(
    ("slurm", "resources", "expected"),
    [
        ({"exclusive": True}, {}, ["--mem=0"]),
        ({"exclusive": True}, {"memory_per_node": "1GiB"}, ["--mem=1024M"]),
        ({"exclusive": True, "extra": {"mem-per-cpu": "4G"}}, {}, ["--mem-per-cpu=4G"]),
        ({"exclusive": True, "extra": {"mem": "100G"}}, {}, ["--mem=100G"]),
        ({"extra": {"mem": 0}}, {}, ["--mem=0"]),
        ({}, {}, []),
    ],
)
def test_an_exclusive_node_comes_with_all_of_its_memory(
    tmp_path: Path, slurm: dict[str, object], resources: dict[str, object], expected: list[str]
) -> None:
    script = write(tmp_path, stubs.make(tmp_path / "stubs"), with_slurm(**slurm), resources=resources)
    assert [option for option in slurm_reads(script.read_text()) if option.startswith("--mem")] == expected


@pytest.mark.parametrize(
    ("slurm", "resources", "message"),
    [
        ({"extra": {"ntasks": 4}}, {}, "launcher sets this option itself"),
        ({"extra": {"container-image": "x"}}, {}, "launcher sets this option itself"),
        ({"extra": {"test-only": True}}, {}, "test-only: launcher cannot submit or follow"),
        ({"extra": {"clusters": "b"}}, {}, "clusters: write slurm.clusters"),
        ({"extra": {"a b": "x"}}, {}, "not the long name of an sbatch option"),
        ({"extra": {"mem-per-cpu": "1G"}}, {"memory_per_node": "1GiB"}, "exclude each other"),
        ({"extra": {"mem": 0}}, {"memory_per_node": "1GiB"}, "exclude each other"),
        ({}, {"time": "60s"}, "not longer than slurm.signal_seconds"),
        ({"account": "a\nb"}, {}, "control character"),
        ({"account": ""}, {}, "the value of --account is empty"),
        ({"extra": {"comment": "x"}}, {}, "launcher sets this option itself"),
        ({"srun_options": ["--nodes=3"]}, {}, "--nodes: launcher sets this option itself"),
        ({"srun_options": ["--no-container-mount-home"]}, {}, "write container.mount_home"),
    ],
)
def test_options_that_would_break_the_job_are_refused(
    tmp_path: Path, slurm: dict[str, object], resources: dict[str, object], message: str
) -> None:
    with pytest.raises(RenderError, match=message):
        write(tmp_path, stubs.make(tmp_path / "stubs"), with_slurm(**slurm), resources=resources)


def test_an_image_and_mounts_that_a_node_lacks_are_found_before_the_start(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    container = {"runtime": "pyxis", "image": "my.sqsh", "mounts": {"/nowhere": "/data"}}
    cluster = Cluster.model_validate({**CLUSTER.model_dump(), "container": container})
    (tmp_path / "my.sqsh").touch()
    code, errors = finish(start(write(tmp_path, stub, cluster, retries={"same": 0}), stub))
    assert code == 14
    assert "node n1: there is no /nowhere" in errors


def test_a_rendezvous_port_on_which_somebody_listens_is_passed_over(tmp_path: Path) -> None:
    first = 61000 + 70007 * 31 % 4536
    env = {"SLURM_JOB_NODELIST": "n1,n2", "STUB_HOSTS": HOSTS, "STUB_ROUTE": "10.0.0.1"}
    for taken in (0, 2):
        stub = stubs.make(tmp_path / f"stubs {taken}")
        script = write(tmp_path / str(taken), stub, resources={"nodes": 2})
        with contextlib.ExitStack() as held:
            for port in range(first, first + taken):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            code, errors = finish(start(script, stub, **env))
        assert code == 0, errors
        assert str(first + taken).encode() in stub.called("srun")


def test_of_two_jobs_of_one_submission_the_first_has_the_run(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)

    def job(number: str, *submission: str) -> int:
        slurm = {
            "SLURM_JOB_ID": number,
            "SLURM_JOB_NODELIST": "n1",
            "SLURMD_NODENAME": "n1",
            "STUB_EXIT": "3",
        }
        return subprocess.run(["bash", script, *submission], env=stub.env(**slurm), check=False).returncode

    assert [job("7", "1"), job("8", "1"), job("7", "1"), job("9", "2"), job("10")] == [3, 0, 3, 3, 3]
    twin = next(event for event in events(tmp_path) if event["event"] == "twin")
    assert (twin["job"], twin["handle"]) == ("8", "slurm:s:7")
    assert [event["handle"] for event in events(tmp_path) if event["event"] == "job"] == [
        f"slurm:s:{number}" for number in (7, 7, 9, 10)
    ]


def test_a_late_job_names_the_linked_job_in_which_its_resumed_run_goes_on(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    run = RunDir(script.parents[1])
    run.append(Submitting())
    run.append(Submitting())
    run.append(Resubmitted(handle="slurm:s:9"))
    run.append(Requeued(handle="slurm:s:11", reason="time-limit"))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1", "STUB_EXIT": "3"}
    subprocess.run(["bash", script, "1"], env=stub.env(**slurm), check=True)
    assert latest_handle(run.read_events(), "slurm:") == "slurm:s:11"


def ended_early(
    folder: Path, stub: stubs.Stubs, job: str, cluster: Cluster = CLUSTER, **fields: object
) -> tuple[int, dict[str, object]]:
    """A job whose look at its node is ended by SIGTERM, as all its processes are; gives code and state."""
    script = write(folder, stub, cluster, **fields)
    (script.parent / "check-node.sh").write_text("kill -TERM $PPID; exec sleep 20")
    code, errors = finish(start(script, stub, STUB_JOB=f"{LONG} {job}"))
    assert not stub.called("sbatch") and not (folder / "run" / "slurm-excluded").exists(), errors
    return code, json.loads((folder / "run" / "state.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "code", "state", "requeues"),
    [
        ("JobState=COMPLETING Restarts=0", 18, "cancelled", False),
        ("JobState=COMPLETING Restarts=1", 15, "submitted", False),
        ("JobState=COMPLETING Restarts=0 PreemptTime=2026-11-21T23:10:18", 15, "submitted", True),
    ],
)
def test_a_job_that_ends_during_the_look_at_its_nodes_blames_none(
    tmp_path: Path, job: str, code: int, state: str, requeues: bool
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    assert ended_early(tmp_path, stub, job)[0] == code
    found = json.loads((tmp_path / "run" / "state.json").read_text())
    assert found["state"] == state
    assert (b"requeue" in stub.called("scontrol")) == requeues
    last = events(tmp_path)[-1]
    assert (last["event"], last.get("reason")) != ("requeued", "unhealthy-node")


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"requeue": False}, {"retries": {"preemptions": 0}}])
def test_one_that_may_not_go_on_is_preempted_for_good(tmp_path: Path, fields: dict[str, object]) -> None:
    stub = stubs.make(tmp_path / "stubs")
    job = "JobState=COMPLETING Restarts=0 PreemptTime=2026-11-21T23:10:18"
    code, state = ended_early(tmp_path, stub, job, **fields)
    assert (code, state["state"], state["failure"]) == (15, "failed", "preempted")
    assert b"requeue" not in stub.called("scontrol")


def test_a_setup_line_that_ends_with_the_job_is_not_to_blame(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    cluster = CLUSTER.model_copy(update={"setup": ("kill -TERM $$", "(exit 143)")})
    code, errors = finish(
        start(write(tmp_path, stub, cluster), stub, STUB_JOB=f"{LONG} JobState=COMPLETING Restarts=0")
    )
    assert code == 18, errors
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "cancelled"


def test_what_none_of_several_nodes_has_is_missing_in_the_profile(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub, resources={"nodes": 2})
    check = script.parent / "check-node.sh"
    check.write_text(check.read_text().replace("import launcher.supervise, pydantic", "import no_such"))
    code, errors = finish(start(script, stub, SLURM_JOB_NODELIST="n1,n2", STUB_HOSTS=HOSTS))
    assert code == 17, errors
    assert not stub.called("sbatch")
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["failure"] == "user-error" and "on every node so far (n1 n2)" in state["reason"]


FINISHED = '{"event": "finished", "state": "succeeded"}'
RESUMED = '{"event": "submitting", "submission": 2}'


@pytest.mark.parametrize(
    ("records", "state", "then"),
    [
        ([FINISHED], "running", "failed"),
        ([FINISHED, RESUMED], "running", "running"),
        ([FINISHED], "submitted", "submitted"),
        ([], "submitted", "failed"),
    ],
    ids=["killed before it wrote state.json", "resumed and running", "being resumed", "never began"],
)
def test_a_failure_is_recorded_unless_a_supervisor_has_judged_the_run(
    tmp_path: Path, records: list[str], state: str, then: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    wrote = tmp_path / "wrote.sh"
    run = tmp_path / "run"
    lines = [f"echo '{record}' >>{run}/events.jsonl" for record in records]
    wrote.write_text("\n".join([*lines, f'echo \'{{"state": "{state}"}}\' >{run}/state.json']))
    script = write(tmp_path, stub, CLUSTER.model_copy(update={"setup": (f"bash {wrote}",)}))
    finish(start(script, stub, STUB_EXIT="2"))
    assert json.loads((run / "state.json").read_text())["state"] == then


def test_a_job_that_finds_the_run_taken_points_to_the_one_that_has_it(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    owner = {"event": "job", "handle": "slurm:s:70005"}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(owner) + "\n")
    assert finish(start(script, stub, STUB_EXIT="88"))[0] == 88
    assert [event["handle"] for event in events(tmp_path)][-2:] == ["slurm:s:70007", "slurm:s:70005"]
    assert not (tmp_path / "run" / "state.json").exists()


@pytest.mark.parametrize(
    ("earlier", "job"),
    [("slurm:s:70007", "JobState=RUNNING"), ("slurm:s:70005", "JobState=NODE_FAIL")],
    ids=["requeued", "resumed in another job"],
)
def test_a_supervisor_on_a_node_that_slurm_has_given_up_leaves_the_run_to_the_next_start(
    tmp_path: Path, earlier: str, job: str
) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    run = tmp_path / "run"
    number = earlier.rpartition(":")[2]
    (run / "events.jsonl").write_text(json.dumps({"event": "job", "handle": earlier}) + "\n")
    (run / f"slurm-{number}-0.hosts").write_text("n1\n")
    stop = run / f"slurm-{number}-0.stop"
    (stub.bin / "sleep").symlink_to("/bin/true")
    succeeded = f"echo '{FINISHED}' >{run}/state.json"
    stub.python.write_text(f"#!/bin/bash\n[[ $1 == -c || -s {stop} ]] || exit 88\n{succeeded}\n")
    code, errors = finish(start(script, stub, SLURM_RESTART_COUNT="1", STUB_JOB=job))
    assert code == 0, errors
    assert stop.read_text() == "node-failed\n"
    assert not any(event["event"] == "twin" for event in events(tmp_path))


def test_a_run_that_another_scheduler_has_is_left_to_it(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    elsewhere = {"event": "started", "handle": "local:/runs/r"}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(elsewhere) + "\n")
    (stub.bin / "sleep").symlink_to("/bin/true")
    stub.python.write_text("#!/bin/bash\n[[ $1 == -c ]] || exit 88\n")
    code, errors = finish(start(script, stub, STUB_JOB="JobState=COMPLETED"))
    assert code == 88, errors
    assert events(tmp_path)[-1]["event"] == "twin" and events(tmp_path)[-1]["handle"] == "local:/runs/r"


def test_a_run_that_succeeds_on_a_node_that_slurm_has_given_up_does_not_start_again(tmp_path: Path) -> None:
    stub = stubs.make(tmp_path / "stubs")
    script = write(tmp_path, stub)
    (stub.bin / "sleep").symlink_to("/bin/true")
    state = tmp_path / "run" / "state.json"
    stub.python.write_text(f"#!/bin/bash\n[[ $1 == -c ]] || {{ echo '{FINISHED}' >{state}; exit 88; }}\n")
    code, errors = finish(start(script, stub, SLURM_RESTART_COUNT="1"))
    assert code == 0, errors
    assert stub.called("srun").count(b"srun") == 1
