"""Any script of the user's: started once per rank, judged by what it leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.api.resume import resume
from launcher.cli.main import app
from launcher.rundir.files import delete_folder, replace_json
from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.spec.verdict import EXIT_CODES
from launcher.supervise.process import processes_of
from tests.lab import PATIENCE, Lab, events, verdicts, wait_for

pytestmark = pytest.mark.e2e


def test_a_script_gets_its_arguments_ranks_environment_and_placeholders(lab: Lab) -> None:
    lab.script(
        "import os, sys, json, pathlib\n"
        "out = pathlib.Path(sys.argv[1]) / f'rank-{os.environ[\"RANK\"]}.json'\n"
        "out.write_text(json.dumps({'argv': sys.argv[2:], 'mood': os.environ['MOOD'],\n"
        "    'world': os.environ['WORLD_SIZE'], 'cwd': os.getcwd()}))\n"
        "print('hello from', os.environ['RANK'])\n"
    )
    nasty = "a b'c\"$HOME`id`;{x}\n%"
    job = lab.job(
        command=["python", "train.py", "{run_dir}", "{micro_batch_size}x{grad_accum}", nasty],
        env={"MOOD": "it's $fine"},
    )
    done = lab.cli("run", str(job))
    assert done.returncode == 0, done.stderr
    run = lab.newest()
    for rank in (0, 1):
        seen = json.loads((run.path / f"rank-{rank}.json").read_text())
        assert seen == {"argv": ["4x1", nasty], "mood": "it's $fine", "world": "2", "cwd": str(lab.folder)}
    assert "hello from 0" in done.stdout and "hello from 1" in done.stdout
    assert verdicts(run)[0]["failure"] == "succeeded"


LIKE_TORCHRUN = """\
import os, sys, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    dist.init_process_group("gloo")
    dist.barrier()
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK TORCHELASTIC_RESTART_COUNT"
    values = [os.environ[name] for name in names.split()]
    print("seen:", *values, dist.is_torchelastic_launched(), sys.argv[1], flush=True)
    dist.barrier()
    if os.environ["RANK"] == "0":
        raise LookupError("word 7")
    dist.barrier()
main()
"""


def test_a_run_whose_id_cannot_be_printed_is_named_by_the_error(lab: Lab) -> None:
    lab.script("print('done')")
    job = lab.job(command="python train.py", resources={"gpus_per_node": 0, "ranks_per_node": 1})
    launcher = f"{sys.executable} -m launcher"

    def told(verb: str) -> str:
        """What is said where standard output cannot be written."""
        program = ["bash", "-c", f"{launcher} {verb} > /dev/full"]
        done = subprocess.run(program, cwd=lab.folder, env=lab.environ, capture_output=True, text=True)
        assert done.returncode == 5 and done.stderr.endswith("; standard output: No space left on device\n")
        return done.stderr

    said = told(f"submit {job} --json")
    run = lab.newest()
    assert f"{run.id} was submitted" in said and f"launcher cancel {run.id}" in said
    lab.wait(run, "succeeded")
    replace_json(run.state, {**run.read_state().as_json(), "state": "failed"})
    assert f"{run.id} was resumed" in told(f"resume {run.id} --json")
    program = f"set -o pipefail; {launcher} submit {job} --json | true"
    done = subprocess.run(["bash", "-c", program], cwd=lab.folder, env=lab.environ, capture_output=True)
    assert done.returncode == 141 and lab.newest().id in done.stderr.decode()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_of_one_host_have_no_torchrun_and_all_that_one_would_give(lab: Lab, ranks: int) -> None:
    lab.script(LIKE_TORCHRUN)
    resources = {"gpus_per_node": 0, "ranks_per_node": ranks}
    done = lab.cli("run", str(lab.job(command=["python", "train.py", "$$5"], resources=resources)))
    run = lab.newest()
    for rank in range(ranks):
        assert f"seen: {rank} {rank} {ranks} {ranks} 0 0 True $$5" in lab.all_logs(run)
    assert "torch.distributed.run" not in (run.path / "scripts" / "start.sh").read_text()
    assert done.returncode == EXIT_CODES["user-error"]
    (verdict,) = verdicts(run)
    assert (verdict["exception"], verdict["confidence"]) == ("LookupError: word 7", "certain")
    assert verdict["rank"] == 0


TAKEN = """\
import os, socket
import torch.distributed as dist
if os.environ["RANK"] == "0":
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("", int(os.environ["MASTER_PORT"])))
    other.listen()
dist.init_process_group("gloo")
"""


@pytest.mark.slow
def test_a_port_that_something_else_has_taken_ends_the_attempt_at_once(lab: Lab) -> None:
    """launcher holds it against its own runs; a server with SO_REUSEADDR may still come before rank 0."""
    lab.script(TAKEN)
    run = lab.submit(str(lab.job(command="python train.py", retries={"same": 0})))
    assert lab.wait(run)["failure"] == "rendezvous-failed", lab.all_logs(run)
    (verdict,) = verdicts(run)
    assert verdict["rank"] == 0 and "EADDRINUSE" in verdict["exception"]


POLITE = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
time.sleep(60)
"""


LOOKING = """\
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while not os.path.exists(os.environ["LAUNCHER_STOP_FILE"]):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("script", "ranks"), [pytest.param(POLITE, 1, marks=pytest.mark.slow), (POLITE, 2), (LOOKING, 1)]
)
def test_a_script_that_ends_politely_when_it_is_told_to_has_not_succeeded(
    lab: Lab, script: str, ranks: int
) -> None:
    """LOOKING ends before its SIGTERM comes."""
    lab.script(script)
    job = lab.job(command="python train.py", resources={"gpus_per_node": 0, "ranks_per_node": ranks})
    assert lab.cli("submit", str(job)).returncode == 0
    run = lab.newest()
    wait_for(lambda: "ready" in lab.all_logs(run), "the script")
    lab.cli("cancel", run.id)
    assert lab.wait(run)["state"] == "cancelled"
    assert verdicts(run)[0]["failure"] == "cancelled"


def test_an_exception_on_one_rank_is_named_by_why_and_by_the_exit_code(lab: Lab) -> None:
    lab.script(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('about to look up the token')\n"
        "    raise KeyError('token 50257 is not in the vocabulary')\n"
        "time.sleep(60)\n"
    )
    done = lab.cli("run", str(lab.job(command="python train.py")))
    assert done.returncode == EXIT_CODES["user-error"]
    why = lab.cli("why").stdout
    assert "user-error" in why and "rank 1" in why and "token 50257 is not in the vocabulary" in why
    assert len(why.splitlines()) < 15
    assert len(verdicts(lab.newest())) == 1, "a user's error is not tried again"


ABORTING = """\
import atexit, ctypes, os, sys
def ends():
    sys.stderr.flush()
    if sys.argv[2] == "SIGSEGV":
        ctypes.string_at(0)
    print("terminate called after throwing an instance of 'c10::Error'", file=sys.stderr)
    print("  what():  CUDA error: operation not permitted", file=sys.stderr)
    for number in range(30):
        print(f"frame #{number}: <unknown function> + 0x2a9f (0x7f in /lib/libc10.so)", file=sys.stderr)
    sys.stderr.flush()
    os.abort()
atexit.register(ends)
if sys.argv[1] == "memory":
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
if sys.argv[1] == "raise":
    raise KeyError("token 50257 is not in the vocabulary")
"""


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("SIGSEGV", 2),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [("SIGABRT", 1), ("SIGABRT", 2), ("SIGSEGV", 1)]
        ),
    ],
)
def test_an_exception_counts_though_the_script_crashes_on_its_way_out(lab: Lab, how: str, ranks: int) -> None:
    lab.script(ABORTING)
    job = lab.job(
        command=f"python train.py raise {how}", resources={"gpus_per_node": 0, "ranks_per_node": ranks}
    )
    done = lab.cli("run", str(job))
    [verdict] = verdicts(lab.newest())
    assert done.returncode == EXIT_CODES["user-error"] and verdict["exit_code"] == -getattr(signal, how)
    assert verdict["exception"] == "KeyError: 'token 50257 is not in the vocabulary'"
    assert f"raised an exception and was then ended by {how}" in verdict["reason"]


@pytest.mark.slow
def test_memory_that_ran_out_counts_though_the_script_crashes_on_its_way_out(lab: Lab) -> None:
    lab.script(ABORTING)
    job = lab.job(command="python train.py memory SIGABRT {micro_batch_size}", retries={"lower": 1})
    assert lab.cli("run", str(job)).returncode == EXIT_CODES["gpu-oom"]
    assert [verdict["failure"] for verdict in verdicts(lab.newest())] == ["gpu-oom", "gpu-oom"]


@pytest.mark.slow
def test_a_crash_without_an_exception_is_tried_again(lab: Lab) -> None:
    lab.script(ABORTING)
    job = lab.job(command="python train.py nothing SIGABRT", retries={"same": 1})
    assert lab.cli("run", str(job)).returncode == EXIT_CODES["unknown"]
    assert [verdict["failure"] for verdict in verdicts(lab.newest())] == ["unknown", "unknown"]


def test_memory_running_out_halves_the_micro_batch_of_a_foreign_script(lab: Lab) -> None:
    lab.script(
        "import sys\n"
        "micro, accum = int(sys.argv[1]), int(sys.argv[2])\n"
        "if micro > 1:\n"
        "    raise RuntimeError('CUDA out of memory. Tried to allocate 20.00 GiB')\n"
        "print('fits', micro, accum)\n"
    )
    job = lab.job(command="python train.py {micro_batch_size} {grad_accum} {checkpoint_dir}")
    done = lab.cli("run", str(job))
    assert done.returncode == 0, done.stderr
    run = lab.newest()
    assert [verdict["failure"] for verdict in verdicts(run)] == ["gpu-oom", "gpu-oom", "succeeded"]
    assert [e["changes"]["micro_batch_size"] for e in events(run, "downgrade")] == [[4, 2], [2, 1]]
    assert "fits 1 4" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "begins", "says"),
    [
        ("no-such-program --x", "", "cannot start 'no-such-program': No such file"),
        ("./program", "echo hi", "cannot start './program': Exec format error: a script begins with `#!`"),
        ("./program", "#!/usr/bin/env no-such-program", "No such file or directory"),
    ],
)
def test_a_command_that_cannot_be_started_is_one_clear_verdict(
    lab: Lab, command: str, begins: str, says: str
) -> None:
    lab.script(f"{begins}\n", "program").chmod(0o755)
    done = lab.cli("run", str(lab.job(command=command)))
    assert done.returncode == EXIT_CODES["user-error"]
    told = lab.cli("why").stdout
    assert "could not start its command" in told and says in told and "only a warning" not in told


@pytest.mark.slow
def test_secrets_reach_the_ranks_and_nothing_else(lab: Lab) -> None:
    value = "s3cr3t-v4lue-91f2"
    lab.script(
        "import os, time\n"
        "assert len(os.environ['MY_TOKEN']) == 17\n"
        "print('token is', os.environ['MY_TOKEN'], flush=True)\n"
        f"while not os.path.exists({str(lab.folder / 'seen')!r}):\n"
        "    time.sleep(0.05)\n"
    )
    job = lab.job(command="python train.py", secrets=["MY_TOKEN"])
    refused = lab.cli("submit", str(job))
    assert refused.returncode == 4 and "MY_TOKEN is not set" in refused.stderr
    lab.environ["MY_TOKEN"] = value
    run = lab.submit(str(job))
    pids = wait_for(lambda: [pid for pid in processes_of(run.path) if _is(pid, "train.py")], "ranks")
    for pid in [*processes_of(run.path), *pids]:
        assert not _is(pid, value)
    (lab.folder / "seen").touch()
    assert lab.wait(run)["state"] == "succeeded"
    assert "token is ***" in lab.cli("logs").stdout
    for path in run.path.rglob("*"):
        assert not path.is_file() or value.encode() not in path.read_bytes(), path


def _is(pid: int, word: str) -> bool:
    try:
        return word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_what_a_rank_leaves_running_is_ended_with_the_attempt(lab: Lab) -> None:
    lab.script(
        "import subprocess, sys\n"
        "subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "print('started a child in a session of its own')\n"
    )
    run = lab.submit(str(lab.job(command="python train.py")))
    assert lab.wait(run)["state"] == "succeeded"
    assert processes_of(run.path) == []


@pytest.mark.slow
def test_a_rank_that_ignores_sigterm_is_ended_all_the_same(lab: Lab) -> None:
    lab.script(
        "import signal, time, os\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\n"
        "time.sleep(300)\n"
    )
    run = lab.submit(str(lab.job(command="python train.py", stop_timeout=2)))
    wait_for(lambda: run.attempt(0).rank_log(0, 1, "out").read_text(), "a deaf rank")
    assert lab.cli("cancel").returncode == 0
    assert lab.wait(run)["state"] == "cancelled"
    assert processes_of(run.path) == []


@pytest.mark.slow
def test_the_run_survives_the_closing_of_its_terminal(lab: Lab) -> None:
    """The CLI runs on a real pseudo-terminal, which is then closed."""
    lab.script("import time\nfor i in range(4):\n    print('tick', i, flush=True)\n    time.sleep(1)\n")
    job = lab.job(command="python train.py")
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir(lab.folder)
        os.execve("/bin/sh", ["sh", "-c", f"{sys.executable} -m launcher run {job}"], lab.environ)
    run = wait_for(lambda: next((lab.folder / "runs").glob("[!.]*"), None), "run directory")
    wait_for(lambda: (run / "attempts/000/logs/node-00/rank-000.out").read_text(), "first line")
    os.close(terminal)  # the kernel sends SIGHUP to the terminal's session
    os.waitpid(pid, 0)
    assert lab.wait(lab.newest())["state"] == "succeeded"


@pytest.mark.parametrize(("answer", "state"), [("d", "running"), ("c", "cancelled")])
def test_ctrl_c_asks_whether_to_detach_or_cancel(lab: Lab, answer: str, state: str) -> None:
    lab.script("import time\nprint('up', flush=True)\ntime.sleep(300)\n")
    job = lab.job(command="python train.py")
    pid, terminal = os.forkpty()
    if pid == 0:
        os.chdir(lab.folder)
        os.execve(sys.executable, [sys.executable, "-m", "launcher", "run", str(job)], lab.environ)
    screen = b""

    def read_until(word: bytes) -> None:
        nonlocal screen
        while word not in screen:
            screen += os.read(terminal, 4096)

    read_until(b"| up")
    os.write(terminal, b"\x03")
    read_until(b"[c]ancel it?")
    os.write(terminal, f"{answer}\n".encode())
    read_until(b"detached" if answer == "d" else b": cancelled")
    _, code = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(code) == (130 if answer == "d" else EXIT_CODES["cancelled"])
    run = lab.newest()
    assert lab.status(run)["state"] == state
    if answer == "d":
        assert len(processes_of(run.path)) >= 2, "the ranks go on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "failure"),
    [(signal.SIGTERM, "preempted"), (signal.SIGUSR2, "time-limit"), (signal.SIGHUP, "preempted")],
)
def test_signals_to_the_supervisor_end_a_foreign_command_with_their_verdict(
    lab: Lab, signum, failure
) -> None:
    lab.script("import time\nprint('up', flush=True)\ntime.sleep(300)\n")
    run = lab.submit(str(lab.job(command="python train.py")))
    wait_for(lambda: run.attempt(0).rank_log(0, 1, "out").read_text(), "both ranks")
    os.kill(json.loads(run.supervisor_lock.read_text())["pid"], signum)
    status = lab.wait(run)
    assert (status["state"], status["failure"]) == ("interrupted", failure)
    assert processes_of(run.path) == []


@pytest.mark.slow
def test_a_rendered_run_directory_can_be_started_by_hand(lab: Lab) -> None:
    lab.script("import sys\nprint('got', *sys.argv[1:])\n")
    job = lab.job(command="python train.py {micro_batch_size} {checkpoint_dir}")
    assert lab.cli("render", str(job), "--out", "by-hand").returncode == 0
    folder = lab.folder / "by-hand"
    done = subprocess.run(
        ["bash", folder / "scripts/start.sh"], env=lab.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "no supervisor" in done.stderr
    logged = lab.cli("logs", str(folder), "--rank", "1", "--stdout").stdout
    assert f"got 4 {folder}/checkpoints" in logged


@pytest.mark.slow
def test_an_ejected_template_changes_what_runs(lab: Lab) -> None:
    lab.script("import os\nprint('colour is', os.environ['COLOUR'])\n")
    job = lab.job(command="python train.py")
    assert lab.cli("templates", "eject", "torchrun/start.sh.j2").returncode == 0
    ejected = lab.folder / "templates/torchrun/start.sh.j2"
    changed = ejected.read_text().replace("{% block start %}", "{% block start %}\nexport COLOUR=green\n")
    assert changed != ejected.read_text()
    ejected.write_text(changed)
    assert "+export COLOUR=green" in lab.cli("templates", "list", "--diff").stdout
    assert "+export COLOUR=green" in lab.cli("render", str(job), "--diff").stdout
    done = lab.cli("run", str(job))
    assert done.returncode == 0 and "colour is green" in done.stdout
    ejected.write_text("{{ jobb }}")
    broken = lab.cli("render", str(job))
    assert broken.returncode == 2 and "templates/torchrun/start.sh.j2:1: 'jobb' is undefined" in broken.stderr


@pytest.mark.slow
def test_a_supervisor_that_cannot_start_leaves_a_true_state(lab: Lab) -> None:
    lab.script("import time\ntime.sleep(300)\n")
    lab.environ["MY_TOKEN"] = "s3cr3t-v4lue-91f2"
    run = lab.submit(str(lab.job(command="python train.py", secrets=["MY_TOKEN"])))
    wait_for(lambda: run.attempt(0).rank_log(0, 1, "out").exists(), "a rank")
    lab.cli("cancel")
    lab.cli("cancel")
    assert lab.wait(run)["state"] == "cancelled"
    del lab.environ["MY_TOKEN"]
    done = lab.cli("resume")
    assert done.returncode == 4 and "MY_TOKEN is not set" in done.stderr
    assert lab.status(run)["state"] == "cancelled"
    again = lab.cli("cancel")
    assert again.returncode == 4 and "is not running: cancelled" in again.stderr


def test_a_rendered_run_that_nobody_started_is_not_called_lost(lab: Lab) -> None:
    job = lab.job(command="python train.py")
    assert lab.cli("render", str(job), "-c", "slurm-a100", "--out", "waiting").returncode == 0
    status = json.loads(lab.cli("status", "waiting", "--json").stdout)
    assert status["state"] == "rendered"
    resumed = lab.cli("resume", "waiting")
    assert resumed.returncode == 4 and "start its scripts there again" in resumed.stderr


@pytest.mark.slow
def test_a_child_in_its_own_session_does_not_outlive_a_killed_supervisor(lab: Lab) -> None:
    run = lab.submit(str(lab.job(command=["bash", "-c", "setsid sleep 777 & echo up; wait"])))
    wait_for(lambda: "up" in run.attempt(0).rank_log(0, 1, "out").read_text(), "both ranks")
    os.kill(json.loads(run.supervisor_lock.read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: not processes_of(run.path), "end of every process")
    assert lab.status(run)["state"] == "lost"


@pytest.mark.slow
def test_one_damaged_run_hides_no_other(lab: Lab) -> None:
    lab.script("print('hi')\n")
    assert lab.cli("run", str(lab.job(command="python train.py"))).returncode == 0
    run = lab.newest()
    run.state.unlink()
    (lab.folder / "runs/broken").mkdir()
    (lab.folder / "runs/broken/run.json").write_text('{"job": 3}')
    listed = lab.cli("list", "--json")
    assert listed.returncode == 0 and run.id in listed.stdout, listed.stderr
    assert lab.cli("status", run.id).returncode in (0, 14)
    refused = lab.cli("clean", "runs/broken", "--yes")
    assert refused.returncode == 3 and (lab.folder / "runs/broken").exists()


@pytest.mark.slow
def test_a_run_that_succeeded_is_not_run_again(lab: Lab) -> None:
    lab.script("print('hi')\n")
    assert lab.cli("run", str(lab.job(command="python train.py"))).returncode == 0
    resumed = lab.cli("resume")
    assert resumed.returncode == 4 and "has succeeded" in resumed.stderr


@pytest.mark.slow
def test_a_run_whose_directory_is_deleted_ends_and_nobody_waits_for_it(lab: Lab) -> None:
    lab.script("import time\ntime.sleep(3000)\n")
    job = lab.job(command="python train.py", stop_timeout=1)
    with ThreadPoolExecutor() as pool:
        followed = pool.submit(lab.cli, "run", str(job))
        run = RunDir(wait_for(lambda: next(lab.folder.glob("runs/e2e-*"), None), "run directory"))
        wait_for(lambda: run.attempt(0).rank_log(0, 1, "out").exists(), "a rank")
        while run.path.exists():  # the supervisor may write into a folder that is being deleted
            shutil.rmtree(run.path, ignore_errors=True)
        ended = followed.result()
    assert ended.returncode == 14 and "was deleted" in ended.stdout + ended.stderr
    wait_for(lambda: not processes_of(run.path), "end of its processes")
    wait_for(run.state.exists, "its last record")
    assert run.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_of_two_resumes_at_once_one_is_refused_and_the_plan_of_the_other_runs(lab: Lab) -> None:
    lab.script("import os, sys\nsys.exit(os.environ['LAUNCHER_STEPS'] == '1')\n")
    hold, held = lab.folder / "hold", lab.folder / "held"
    slow = lab.script(
        f"#!/bin/sh\nif [ -e {hold} ]; then touch {held}; fi\nwhile [ -e {hold} ]; do sleep 0.05; done\n"
        f'exec {sys.executable} "$@"\n',
        "slow-python",
    )
    slow.chmod(0o755)
    (lab.folder / "slow.yaml").write_text(f"name: slow\nscheduler: local\npaths: {{python: {slow}}}\n")
    job = lab.job(command="python train.py", steps=1, retries={"same": 0})
    assert lab.cli("run", str(job), "-c", "slow.yaml").returncode == EXIT_CODES["unknown"]
    run = lab.newest()
    hold.touch()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(lab.cli, "resume", "--set", "steps=2", "--follow")
        wait_for(held.exists, "interpreter of the supervisor")
        with pytest.raises(SchedulerError, match="is being resumed by another process"):
            resume(run, ["steps=3"])
        hold.unlink()
    assert first.result().returncode == 0, first.result().stderr
    assert [one["set"] for one in events(run, "replanned")] == [["steps=2"]]


@pytest.mark.slow
def test_a_cancellation_between_two_attempts_starts_no_other(lab: Lab) -> None:
    lab.script("import os, time\nos.kill(os.getpid(), 9)\n")
    run = lab.submit(str(lab.job(command="python train.py", retries={"same": 9})))
    wait_for(lambda: len(events(run, "retry")) == 2, "two retries")
    assert lab.cli("cancel").returncode == 0
    assert lab.wait(run)["state"] == "cancelled"
    assert len(run.attempts()) <= 3


def test_rendering_leaves_no_trace_among_the_runs(lab: Lab) -> None:
    job = lab.job(command="python train.py")
    assert lab.cli("render", str(job), "-c", "slurm-a100", "--out", "elsewhere/waiting").returncode == 0
    assert lab.cli("list", "--json").stdout.strip() == "[]"
    asked = lab.cli("clean", "elsewhere/waiting", "--json")
    assert asked.returncode == 2 and "--yes" in asked.stderr and (lab.folder / "elsewhere/waiting").exists()


def test_a_run_that_cannot_be_deleted_keeps_no_other(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    job, runs = lab.job(command="python train.py"), [f"elsewhere/{name}" for name in "abcd"]
    for run in runs:
        assert lab.cli("render", str(job), "-c", "local", "--out", run).returncode == 0

    def delete(path: Path) -> None:
        if path.name in "ac":
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        delete_folder(path)

    monkeypatch.chdir(lab.folder)
    monkeypatch.setenv("XDG_STATE_HOME", lab.environ["XDG_STATE_HOME"])
    monkeypatch.setattr("launcher.schedulers.sweeps_without_queue.delete_folder", delete)
    done = CliRunner().invoke(app, ["clean", *runs, "--yes", "--json"])
    assert json.loads(done.stdout) == {"deleted": ["b", "d"]}
    assert isinstance(done.exception, OSError) and str(done.exception).count("resource busy") == 2
    assert sorted(path.name for path in (lab.folder / "elsewhere").iterdir()) == ["a", "c"]


def test_ctrl_c_while_a_supervisor_starts_ends_it_and_names_the_run(lab: Lab) -> None:
    """Its start is held, so that the interrupt comes within it."""
    held = lab.folder / "held"
    held.write_text("#!/bin/bash\necho $$ > pid.part && mv pid.part pid\nexec sleep 600\n")
    held.chmod(0o755)
    (lab.folder / "slow.yaml").write_text(f"name: slow\nscheduler: local\npaths: {{python: {held}}}\n")
    program = [sys.executable, "-m", "launcher", "submit", str(lab.job(command="true"))]
    submit = subprocess.Popen(
        [*program, "-c", "slow.yaml"], cwd=lab.folder, env=lab.environ, stderr=subprocess.PIPE, text=True
    )
    wait_for(
        lambda: [*lab.folder.glob("runs/*/pid")] or submit.poll() is not None, "process of the supervisor"
    )
    submit.send_signal(signal.SIGINT)
    said = submit.communicate(timeout=PATIENCE)[1]
    assert submit.returncode == 130, said
    run = lab.newest()
    assert f"`launcher status {run.id}`" in said
    cmdline = Path("/proc", (run.path / "pid").read_text().strip(), "cmdline")  # empty for a zombie
    wait_for(lambda: not cmdline.exists() or not cmdline.read_bytes(), "it has ended")
    assert (lab.status(run)["state"], run.read_state().reason) == (
        "failed",
        "interrupted by Ctrl-C as it started",
    )


def test_ctrl_c_while_a_resume_starts_takes_its_changes_back(lab: Lab) -> None:
    hold, held = lab.folder / "hold", lab.folder / "held"
    python = lab.script(
        f'#!/bin/bash\nif [ -e {hold} ]; then touch {held}; exec sleep 600; fi\nexec {sys.executable} "$@"\n',
        "held-python",
    )
    python.chmod(0o755)
    (lab.folder / "slow.yaml").write_text(f"name: slow\nscheduler: local\npaths: {{python: {python}}}\n")
    job = lab.job(command="false", steps=1, retries={"same": 0})
    assert lab.cli("run", str(job), "-c", "slow.yaml").returncode == EXIT_CODES["unknown"]
    run = lab.newest()
    before = lab.status(run)
    hold.touch()
    program = [sys.executable, "-m", "launcher", "resume", "--set", "steps=2"]
    resumes = subprocess.Popen(program, cwd=lab.folder, env=lab.environ)
    wait_for(lambda: held.exists() or resumes.poll() is not None, "process of the supervisor")
    resumes.send_signal(signal.SIGINT)
    assert resumes.wait(PATIENCE) == 130
    assert lab.status(run)["state"] == before["state"] == "failed"
    hold.unlink()
    assert lab.cli("resume", "--follow").returncode == EXIT_CODES["unknown"]
    assert len(events(run, "withdrawn")) == 1 and run.read_about().job.steps == 1


def test_a_project_that_was_moved_goes_on_as_the_message_says(lab: Lab) -> None:
    project = lab.folder / "before"
    project.mkdir()
    (project / "train.py").write_text("import os; raise SystemExit(not os.environ.get('FIXED'))")
    job = project / "job.yaml"
    lab.job().rename(job)
    lab.submit(str(job), "--set", "command=python train.py", "--set", "retries.same=0")
    run = lab.newest()
    assert lab.wait(run)["state"] == "failed"
    project.rename(lab.folder / "after")
    refused = lab.cli("resume", run.id, "--set", "env.FIXED=1")
    assert refused.returncode == 4 and f"{project} is not a directory; if it was moved" in refused.stderr
    moved = f"workdir={lab.folder / 'after'}"
    done = lab.cli("resume", run.id, "--set", "env.FIXED=1", "--set", moved, "--follow")
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_folder_that_was_deleted_exists_again_in_the_next_attempt(lab: Lab) -> None:
    lab.script(
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ['LAUNCHER_CHECKPOINT_DIR'])\n"
        "if os.environ['LAUNCHER_ATTEMPT'] == '0':\n"
        "    raise SystemExit(not folder.rmdir())\n"
        "(folder / 'model').write_text('weights')\n"
    )
    ranks = {"gpus_per_node": 0, "ranks_per_node": 1}
    done = lab.cli("run", str(lab.job(command="python train.py", resources=ranks)))
    assert done.returncode == 0, done.stderr
    assert (lab.newest().checkpoints / "model").read_text() == "weights"
