"""The process that starts the ranks of one host: real processes, compared with torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import with_shared
from launcher.supervise.ports import RENDEZVOUS_PORTS, hold_port
from tests.lab import wait_for

OUTSIDE = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "LAUNCHER_"))}


class Ranks:
    """`local_ranks` with a script, as start.sh starts it."""

    def __init__(self, folder: Path, script: str, ranks: int = 2, **env: str) -> None:
        (folder / "run.json").write_text("{}")
        self.run = RunDir(folder)
        place = {"LAUNCHER_RUN_DIR": str(folder), "LAUNCHER_RUN_ID": "r", "LAUNCHER_ATTEMPT": "0"}
        module = ["-m", "launcher.supervise.local_ranks", str(ranks), "--"]
        self.process = subprocess.Popen(
            [sys.executable, *module, sys.executable, "-c", script],
            env={**OUTSIDE, **place, **env},
            start_new_session=True,
        )
        self.itself = psutil.Process(self.process.pid)

    def output(self, rank: int) -> str:
        lines = self.run.attempt(0).rank_log(0, rank, "out").read_text().splitlines()
        return "\n".join(line.partition(" ")[2] for line in lines)

    def record(self, rank: int) -> dict[str, Any]:
        return dict(json.loads(self.run.attempt(0).exit(rank).read_text()))

    def worker(self, rank: int) -> psutil.Process:
        return sorted(self.itself.children(), key=lambda child: child.pid)[rank]

    def wait_for_output(self, text: str, ranks: int = 2) -> None:
        wait_for(lambda: all(text in self.output(rank) for rank in range(ranks)), text)

    def everything(self) -> list[psutil.Process]:
        return [self.itself, *self.itself.children(recursive=True)]


@pytest.fixture
def started() -> Iterator[list[Ranks]]:
    """Whatever a failed test leaves behind is ended."""
    found: list[Ranks] = []
    yield found
    for ranks in found:
        for process in ranks.everything() if ranks.process.poll() is None else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ranks.process.wait()


SAY_ENVIRONMENT = """
import json, os
import torch.distributed as dist
assert dist.is_torchelastic_launched()
print(json.dumps(dict(os.environ)), flush=True)
"""


@pytest.mark.slow
def test_a_rank_has_the_variables_that_torchrun_sets(tmp_path: Path) -> None:
    ours = Ranks(tmp_path, SAY_ENVIRONMENT)
    assert ours.process.wait(240) == 0
    port = RENDEZVOUS_PORTS.start
    with hold_port() as holder:
        port = holder.getsockname()[1]
    meeting = ["--rdzv-backend", "static", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "r-0"]
    torchrun = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--nnodes", "1"),
            *("--node-rank", "0", "--local-addr", "127.0.0.1", *meeting, "--no-python"),
            *("--redirects", "3", "--log-dir", str(tmp_path / "theirs")),  # in one pipe lines can mix
            *(sys.executable, "-c", SAY_ENVIRONMENT),
        ],
        env=OUTSIDE, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert torchrun.returncode == 0, torchrun.stderr
    logs = (tmp_path / "theirs").rglob("stdout.log")
    theirs = {found["RANK"]: found for found in (json.loads(log.read_text()) for log in logs)}
    assert theirs.keys() == {"0", "1"}
    own = {
        "MASTER_PORT",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_USE_AGENT_STORE",
    }
    for rank, their in theirs.items():
        mine = json.loads(ours.output(int(rank)))
        set_by_torchrun = {name: value for name, value in their.items() if OUTSIDE.get(name) != value}
        assert {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"} <= set_by_torchrun.keys()
        assert {n: mine.get(n) for n in set_by_torchrun.keys() - own} == {
            n: value for n, value in set_by_torchrun.items() if n not in own
        }
        assert mine["TORCHELASTIC_USE_AGENT_STORE"] == "False" and mine["TORCHELASTIC_ERROR_FILE"]


@pytest.mark.parametrize(("ranks", "threads"), [(1, None), (2, "1")])
def test_ranks_that_share_the_cpus_get_one_thread_each(
    tmp_path: Path, ranks: int, threads: str | None
) -> None:
    told = {"LAUNCHER_ENV_MY": "mine"}
    ours = Ranks(
        tmp_path, "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['MY'])", ranks, **told
    )
    assert ours.process.wait(240) == 0
    assert ours.output(ranks - 1) == f"{threads} mine"


def test_threads_that_the_job_or_the_cluster_chose_stay(tmp_path: Path) -> None:
    script = "import os; print(os.environ['OMP_NUM_THREADS'])"
    for where, name in (("cluster", "OMP_NUM_THREADS"), ("job", "LAUNCHER_ENV_OMP_NUM_THREADS")):
        (tmp_path / where).mkdir()
        ours = Ranks(tmp_path / where, script, **{name: "3"})
        assert ours.process.wait(240) == 0 and ours.output(1) == "3"


FAILS = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    sys.exit(7)
signal.signal(signal.SIGTERM, lambda *_: (print("told"), sys.exit(9)))
time.sleep(600)
"""


def test_when_a_rank_fails_the_others_are_told_and_its_exit_code_counts(
    tmp_path: Path, started: list[Ranks]
) -> None:
    ranks = Ranks(tmp_path, FAILS, ranks=3)
    started.append(ranks)
    assert ranks.process.wait(240) == 7
    assert (ranks.record(1)["exit_code"], ranks.record(1)["stopping"]) == (7, False)
    assert all(ranks.record(rank)["stopping"] for rank in (0, 2))
    assert all(ranks.record(rank)["exit_code"] in (9, -signal.SIGTERM) for rank in (0, 2))


def test_the_signals_of_a_rank_are_those_of_any_program(tmp_path: Path) -> None:
    """What blocks or ignores a signal before a rank would change its program."""
    script = "print(*[line for line in open('/proc/self/status') if line.startswith(('SigBlk', 'SigIgn'))])"
    ranks = Ranks(tmp_path, script)
    assert ranks.process.wait(240) == 0
    plain = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout

    def masks(text: str) -> list[int]:
        own_of_glibc = 0b11 << 31  # 32 and 33, which posix_spawn() lets a program ignore
        return [int(mask, 16) & ~own_of_glibc for mask in text.split()[1::2]]

    assert masks(ranks.output(1)) == masks(plain) and len(masks(plain)) == 2


WAITS = """
import os, pathlib, subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_worker_ends_all_and_the_exit_code_tells_of_it(tmp_path: Path, started: list[Ranks]) -> None:
    ranks = Ranks(tmp_path, WAITS)
    started.append(ranks)
    ranks.wait_for_output("ready")
    ranks.worker(1).kill()
    assert ranks.process.wait(240) == 128 + signal.SIGKILL
    assert ranks.record(0)["stopping"] and not ranks.run.attempt(0).exit(1).exists()
    assert ranks.run not in list(with_shared(ranks.run.path.parent)), "its folder for errors is removed"


def test_when_the_process_that_starts_the_ranks_is_killed_nothing_is_left(
    tmp_path: Path, started: list[Ranks]
) -> None:
    ranks = Ranks(tmp_path, WAITS)
    started.append(ranks)
    ranks.wait_for_output("ready")
    everything = ranks.everything()
    assert len(everything) == 1 + 3 * 2
    ranks.process.kill()
    assert not psutil.wait_procs(everything, timeout=240)[1]
    for rank in (0, 1):
        assert ranks.record(rank)["stopping"] and ranks.record(rank)["exit_code"] == -signal.SIGTERM


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_by_hand_a_signal_ends_the_ranks(
    tmp_path: Path, started: list[Ranks], signum: signal.Signals
) -> None:
    ranks = Ranks(tmp_path, WAITS)
    started.append(ranks)
    ranks.wait_for_output("ready")
    everything = ranks.everything()
    ranks.process.send_signal(signum)
    assert ranks.process.wait(240) == 128 + signum
    ranks_and_workers = [one for one in everything if one.is_running() and "sleep" not in one.name()]
    assert ranks_and_workers == []
    assert ranks.record(0)["exit_code"] == -signal.SIGTERM
    for process in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # a daemon of a rank; a supervisor would have ended it


def test_under_a_supervisor_a_signal_to_all_is_left_to_it(tmp_path: Path, started: list[Ranks]) -> None:
    script = (
        "import os, pathlib, time\nprint('ready', flush=True)\n"
        "while not pathlib.Path(os.environ['LAUNCHER_RUN_DIR'], 'go').exists():\n    time.sleep(0.02)\n"
    )
    ranks = Ranks(tmp_path, script, LAUNCHER_SUPERVISED=str(os.getpid()))
    started.append(ranks)
    ranks.wait_for_output("ready")
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        to_all = [ranks.process.pid, ranks.worker(0).pid]
        if signum == signal.SIGTERM:
            to_all = to_all[:1]  # a worker takes that for the end of its rank, which gets it as well
        # From another process than the supervisor, which this one is.
        subprocess.run(["kill", f"-{signum.name.removeprefix('SIG')}", *map(str, to_all)], check=True)
    (tmp_path / "go").touch()
    assert ranks.process.wait(240) == 0
    assert not ranks.record(0)["stopping"]


def test_a_process_that_start_sh_left_behind_is_no_rank(tmp_path: Path) -> None:
    """bash becomes local_ranks, and its background processes are then children of that."""
    ranks = ["-m", "launcher.supervise.local_ranks", "1", "--", sys.executable, "-c", "print('done')"]
    place = {"LAUNCHER_RUN_DIR": str(tmp_path), "LAUNCHER_RUN_ID": "r", "LAUNCHER_ATTEMPT": "0"}
    (tmp_path / "run.json").write_text("{}")
    script = '(exit 3) & exec "$0" "$@"'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, *ranks], env={**OUTSIDE, **place}, timeout=240
    )
    assert done.returncode == 0


def test_a_port_is_held_for_one_run_and_torchs_store_can_listen_there() -> None:
    from torch.distributed import DistNetworkError, TCPStore

    with hold_port() as holder:
        port = holder.getsockname()[1]
        assert port in RENDEZVOUS_PORTS
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))  # as hold_port does for another run
        store = TCPStore("127.0.0.1", port, 1, is_master=True)
        store.set("key", "value")
        assert store.get("key") == b"value"
        with pytest.raises(DistNetworkError, match="EADDRINUSE"):
            TCPStore("127.0.0.1", port, 1, is_master=True)


STRAY = """
import os, signal, sys, time
print("ready", flush=True)
if os.environ["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.5)
    sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), 7])
def test_a_sigterm_that_the_supervisor_knows_nothing_of_hides_no_exit_code(
    code: int, tmp_path: Path, started: list[Ranks]
) -> None:
    waits = "" if code == 0 else "else: time.sleep(600)"
    ranks = Ranks(tmp_path, STRAY + waits, LAUNCHER_SUPERVISED=str(os.getpid()), CODE=str(code))
    started.append(ranks)
    assert ranks.process.wait(240) == code
    assert ranks.record(1)["exit_code"] == code and not ranks.record(1)["stopping"]
