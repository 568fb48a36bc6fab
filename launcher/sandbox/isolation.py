"""Start a pod's command in its own namespaces, if this machine allows it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from launcher.supervise.process import environments

ISOLATE = Path(__file__).with_name("isolate.sh")


@dataclass(frozen=True)
class Isolation:
    """The command that isolates a pod. `prefix` precedes the pod's command; empty for no isolation."""

    prefix: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.prefix)

    def argv(
        self, folder: Path, command: list[str], mounts: list[tuple[Path, str]], visible: list[Path]
    ) -> list[str]:
        """Return the command line. `folder` is the pod's own. `visible`: paths it needs even below /tmp."""
        if not self:
            return command
        pairs = [(str(source), target) for source, target in mounts]
        pairs += [(str(path), str(path)) for path in visible if str(path).startswith("/tmp/")]
        flat = [part for pair in pairs for part in pair]
        return [
            *self.prefix, "bash", str(ISOLATE), str(folder / "root"), str(folder / "disk"),
            *flat, "--", *command,
        ]  # fmt: skip


def find_isolation() -> Isolation:
    """Return the isolation that works here. Try it out, because containers often forbid namespaces.

    Root mounts directly; other users need a user namespace.
    """
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        return Isolation(())
    # All processes end with the server, even if it is killed: the signal ends unshare, unshare ends the pod's
    # first process, and the kernel then ends all others in its process namespace.
    prefix = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
    if os.geteuid() != 0:
        prefix.append("--map-root-user")
    isolation = Isolation((*prefix, "--"))
    with tempfile.TemporaryDirectory() as folder:
        trial = isolation.argv(Path(folder), ["true"], [(Path(folder), "/workspace-trial/x")], [])
        try:
            done = subprocess.run(trial, capture_output=True, timeout=20)
        except subprocess.TimeoutExpired:
            return Isolation(())
    return isolation if done.returncode == 0 else Isolation(())


def first_process(pid: int) -> int:
    """Return the pod's process 1, a child of `pid` (unshare), or `pid` itself without isolation."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return pid


def kill_marked(mark: str) -> None:
    """Send SIGKILL to every process whose environment holds `mark` (NAME=VALUE), until none is left."""
    killed: set[int] = set()
    while pids := {pid for pid, text in environments() if mark.encode() in text.split(b"\0")} - killed:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= pids
