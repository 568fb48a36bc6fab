"""launcher's program on a host: inspect it and its GPUs, meet the other hosts, start and end the supervisor.

It is sent as text and runs there with the profile's interpreter, so it uses only the standard library. It
reads one JSON request from stdin (which may contain secrets) and prints one JSON answer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.rundir.time import now
from launcher.rundir.versions import DISTRIBUTION, version_of
from launcher.schedulers.ssh.reachability import meet
from launcher.supervise.gpus import GpusError, claim, installed, survey, user
from launcher.supervise.ports import free_port
from launcher.supervise.secrets import SecretError, read_secret
from launcher.supervise.start import NotStartedError, held, lock_path, start_supervisor, state_of

TOOLS = ("awk", "bash", "find", "flock", "rsync", "tar")
START_SECONDS = 90.0
"Timeout for the supervisor to take its lock. A first import from a cold or remote disk is slow."
END_SECONDS = 30.0
"Timeout for killed processes to end. A process that waits for a disk or a GPU takes long."
SEEN_SECONDS = 60.0
"Timeout until one host sees another host's files, which a network file system may show late."
Request = Mapping[str, Any]


class RefusedError(Exception):
    """The request cannot be carried out on this host. The message says why."""


def look(request: Request) -> dict[str, Any]:
    """Report facts about the host. The sender evaluates them."""
    gpus, trouble = [], ""
    if request["gpus"]:
        try:
            gpus = [asdict(gpu) for gpu in survey()]
        except GpusError as error:
            trouble = str(error)
    return {
        "launcher": _version(),
        "torch": importlib.util.find_spec("torch") is not None,
        "runs": _unwritable(request["runs"]),
        "tools": [tool for tool in TOOLS if shutil.which(tool) is None],
        "gpus": gpus,
        "gpus_trouble": trouble,
        "secrets": list(filter(None, map(_why_not_here, request["secrets"]))),
        "addresses": _addresses(),
        "port": free_port(),
        "ends_at_logout": _ends_at_logout(),
    }


def gpus(request: Request) -> dict[str, Any]:
    """Report the name and memory in MiB of each GPU; none without nvidia-smi."""
    return {"gpus": installed() if shutil.which("nvidia-smi") else []}


def _version() -> str | None:
    """Return launcher's version here, "" if it is only on PYTHONPATH, None if it is missing."""
    return None if importlib.util.find_spec("launcher") is None else version_of(DISTRIBUTION) or ""


def _unwritable(folder: str) -> str:
    """Return why the folder is not writable, or "" if it is writable or can be created."""
    existing = Path(folder)
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"cannot create a file in {existing}: {error.strerror}"


def _why_not_here(secret: Mapping[str, Any]) -> str:
    """Return why the supervisor cannot read a secret on this host, or "" if it can."""
    try:
        read_secret(secret["name"], secret.get("env"), secret.get("file"))
    except SecretError as error:
        return str(error)
    return ""


def _addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["ip", "-o", "addr", "show", "scope", "global", "up"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        addresses = [line.split()[3].partition("/")[0] for line in lines.splitlines()]
        return sorted(addresses, key=lambda address: ":" in address)
    addresses = socket.gethostbyname_ex(socket.gethostname())[2]
    return [address for address in addresses if not address.startswith("127.")]


def _ends_at_logout() -> bool:
    """Return whether systemd-logind kills a user's processes at the end of the last session.

    The setting is KillUserProcesses in logind.conf.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            if "/session-" not in file.read() or os.getuid() == 0:
                return False
        command = ["busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"]
        command += ["org.freedesktop.login1.Manager", "KillUserProcesses"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return answer.stdout.split() == ["b", "true"]
    return False


def start(request: Request) -> dict[str, Any]:
    """Start the supervisor, detached. It holds the locks of its GPUs until it ends, even if it is killed."""
    run, rank = Path(request["run_dir"]), request["rank"]
    _wait_for(run / "run.json")
    if held(lock_path(run, rank)) and rank == 0:
        raise RefusedError("a supervisor of this run is still running")
    _end(run, rank)  # processes that a lost run has left behind
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LAUNCHER_")}
    gpus: tuple[int, ...] = ()
    locks: list[int] = []
    if request["gpus"]:
        gpus, locks = claim(request["gpus"], {"run": run.name, "user": user()})
        # CUDA orders GPUs by speed; nvidia-smi orders them by bus.
        chosen = ",".join(map(str, gpus))
        environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen}
    if event := request.get("event"):
        taken = {"gpus": {**request["others_gpus"], request["host"]: gpus}} if gpus else {}
        _append(run, {"time": now(), **event, **taken})
    start_supervisor(
        [sys.executable, "-m", "launcher.supervise", str(run), "--secrets-on-stdin", *request["place"]],
        run,
        rank,
        environ,
        START_SECONDS,
        stdin=f"{json.dumps(request['secrets'])}\n{request['token']}\n".encode(),
        pass_fds=locks,
    )
    return {"gpus": gpus}


def stop(request: Request) -> dict[str, Any]:
    """End the supervisor of one host, because another host's could not be started."""
    _end(Path(request["run_dir"]), request["rank"])
    return {}


def interrupt(request: Request) -> dict[str, Any]:
    """Ask a run to stop by a signal, because its folder cannot be written to. Report whether it was sent."""
    lock = lock_path(Path(request["run_dir"]), 0)
    if not held(lock) or (pid := _pid(lock)) is None:
        return {"interrupted": False}
    os.kill(pid, signal.SIGINT)
    return {"interrupted": True}


def withdraw(request: Request) -> dict[str, Any]:
    """If a run waits for its turn, end its supervisor and remove the run. Report whether this was done."""
    run = Path(request["run_dir"])
    lock = lock_path(run, 0)
    if not held(lock) or (pid := _pid(lock)) is None:
        return {"withdrawn": False}
    os.kill(pid, signal.SIGSTOP)  # it must not begin during the check
    while _process_state(pid) not in ("T", ""):
        time.sleep(0.01)
    if state_of(run) != "submitted" or (run / "attempts").exists() or (run / "cancel").exists():
        os.kill(pid, signal.SIGCONT)
        return {"withdrawn": False}
    os.kill(pid, signal.SIGKILL)
    while held(lock):
        time.sleep(0.01)
    shutil.rmtree(run)
    return {"withdrawn": True}


def _process_state(pid: int) -> str:
    """Return the state's letter from proc(5), or "" if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return ""


def _end(run: Path, rank: int) -> None:
    """End a leftover supervisor and its ranks. The kernel kills the ranks shortly after the supervisor."""
    lock = lock_path(run, rank)
    deadline, killed = time.monotonic() + END_SECONDS, False
    while held(lock) or _pids(run, rank):
        if not killed and held(lock) and (pid := _pid(lock)) is not None:
            killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline and held(lock) and not killed:
            raise RefusedError(
                f"a supervisor of this run is still running, and {lock} does not name its process: end it by "
                f"hand (`launcher.supervise {run}` in the list of processes)"
            )
        if time.monotonic() > deadline:
            raise RefusedError(f"processes of an earlier start of this run do not end: {_pids(run, rank)}")
        time.sleep(0.1)


def _pid(lock: Path) -> int | None:
    """Return the supervisor's process id, or None while it is being written, or if the disk was full."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(lock.read_text(encoding="utf-8"))["pid"])
    return None


def _pids(run: Path, rank: int) -> list[int]:
    """Return the processes on this host that the run's supervisor has started."""
    marks = {f"LAUNCHER_RUN_DIR={run}".encode(), f"LAUNCHER_NODE_RANK={rank}".encode()}
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # another user's, or just ended
                if marks <= set((entry / "environ").read_bytes().split(b"\0")):
                    pids.append(int(entry.name))
    return pids


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + SEEN_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise RefusedError(f"{file} does not appear here")
        time.sleep(0.2)
        with contextlib.suppress(OSError):  # makes a network file system query its server again
            os.listdir(file.parent.parent)


def _append(run: Path, event: Mapping[str, Any]) -> None:
    file = os.open(run / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, json.dumps(event, ensure_ascii=False).encode() + b"\n")
    finally:
        os.close(file)


ACTIONS: dict[str, Callable[[Request], dict[str, Any]]] = {
    "look": look,
    "gpus": gpus,
    "meet": meet,
    "start": start,
    "stop": stop,
    "interrupt": interrupt,
    "withdraw": withdraw,
}


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    try:
        answer = ACTIONS[request["do"]](request)
    except (RefusedError, GpusError, NotStartedError) as error:
        answer = {"refused": str(error)}
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        answer = {"refused": f"{where}{error.strerror or error}"}
    print(json.dumps(answer))
