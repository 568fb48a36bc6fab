"""Start a supervisor, detached, and tell by its lock whether it lives.

This file is also sent to ssh hosts and runs there, so it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any


class NotStartedError(Exception):
    """The supervisor did not start. The message says why."""


def start_supervisor(
    command: Sequence[str],
    run: Path,
    node: int,
    environ: Mapping[str, str],
    seconds: float,
    *,
    stdin: bytes = b"",
    pass_fds: Sequence[int] = (),
) -> None:
    """Start the supervisor of a node in the run directory, and wait until it holds its lock.

    Its output goes to the `.log` next to the lock. Raises NotStartedError after `seconds`, OSError.
    """
    lock, process, started = lock_path(run, node), None, False
    log = lock.with_suffix(".log")
    options: dict[str, Any] = {"env": environ, "pass_fds": pass_fds, "start_new_session": True}
    if lock.exists():
        os.truncate(lock, 0)  # drop the last supervisor's record, keep the lock itself
    with open_log(log) as output:
        before = output.tell()
        try:
            with _interrupt_later():
                process = subprocess.Popen(
                    command, cwd=run, stdin=subprocess.PIPE, stdout=output, stderr=output, **options
                )
            started = _has_lock(process, stdin, run, node, seconds)
        except OSError as error:
            raise NotStartedError(f"cannot start {command[0]}: {error.strerror}") from None
        finally:
            if process is not None and not started:
                process.kill()  # a late start would keep running after we reported failure
    if not started:
        why = log.read_bytes()[before:].decode(errors="replace").strip() or f"no answer in {seconds:.0f} s"
        raise NotStartedError(f"the supervisor did not start: {why}")


def _has_lock(process: subprocess.Popen[bytes], stdin: bytes, run: Path, node: int, seconds: float) -> bool:
    """Return whether the process takes the lock within `seconds`, or the whole run ends before."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(stdin)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if held(lock_path(run, node)):
            return True
        time.sleep(0.02)
    # Only node 0 writes the run's state.
    return process.poll() is not None and node == 0 and state_of(run) not in (None, "submitted")


def lock_path(run: Path, node: int) -> Path:
    """Return the path of the lock file of a node's supervisor."""
    return run / ("supervisor.lock" if node == 0 else f"supervisor.{node:02d}.lock")


def open_log(path: Path) -> IO[bytes]:
    """Open a log to append to, for this user only: what an interpreter or a linker prints is not masked."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def held(lock: Path) -> bool:
    """Return whether a process holds the lock."""
    try:
        with open(lock, encoding="utf-8") as file:  # read permission is enough for LOCK_SH
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def state_of(run: Path) -> Any:
    """Return the state in the run's state.json, or None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run / "state.json").read_bytes()).get("state")
    return None


@contextlib.contextmanager
def _interrupt_later() -> Iterator[None]:
    """Let Ctrl-C take effect at the end of the block. Only the main thread is interrupted by it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    previous_handler = signal.signal(signal.SIGINT, lambda signum, _: received.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    for signum in received[:1]:
        signal.raise_signal(signum)
