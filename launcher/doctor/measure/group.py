"""Run tests in separate processes, one per local rank, and kill them at their time limit.

`python -m launcher.doctor.measure.group` imports torch once and forks the ranks of each test. A test then
spends no time on imports, and each new process reads its settings afresh. Each line of stdin is JSON with
tests to run at the same time. The answer is one line: the ranks' reports, and the state of those that did
not end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from launcher.doctor.measure.guarded import reason_of
from launcher.doctor.rank_test import RankReport, RankTest
from launcher.supervise.process import dying_with

IMPORT_SECONDS = 60.0
"How much longer the first answer may take, because torch is imported, perhaps from a cold network disk."
KILLED_SECONDS = 2.0
POLL_SECONDS = 0.5
"How often a process that waits for a test checks whether the test has become pointless."


class Group:
    """The process that forks the ranks of this node. Use it as a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the process. It is started again for the next test."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_SECONDS)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None

    def start(self) -> None:
        """Start the process, which imports torch in the background."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore::FutureWarning", "-m", "launcher.doctor.measure.group"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                preexec_fn=dying_with(os.getpid(), signal.SIGKILL, own_group=True),
            )

    def run(
        self,
        tests: Sequence[RankTest],
        local: Mapping[int, int],
        is_pointless: Callable[[], object] = lambda: False,
    ) -> list[list[RankReport]]:
        """Run this node's ranks of several tests at the same time. Return their reports for each test.

        `local` maps this node's global ranks to local ranks. `is_pointless` is called twice a second and ends
        the tests if it returns a true value. Raises OSError, also in that case.
        """
        self.start()
        assert self._process is not None and self._process.stdin and self._process.stdout
        request = {"tests": [asdict(test) for test in tests], "local": list(local.items())}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer(max(test.seconds for test in tests) + IMPORT_SECONDS, is_pointless)
        return [[RankReport(**report) for report in reports] for reports in json.loads(answer)]

    def _answer(self, seconds: float, is_pointless: Callable[[], object]) -> bytes:
        """Return the process's next line. If none comes within `seconds`, kill it and raise OSError."""
        assert self._process is not None and self._process.stdout
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self.end()
                raise OSError("the process that starts the ranks of a test hangs; does torch import?")
            if is_pointless():
                self.end()
                raise OSError("another node is lost")
            if not select.select([self._process.stdout], [], [], min(remaining, POLL_SECONDS))[0]:
                continue
            if not (part := os.read(self._process.stdout.fileno(), 2**16)):
                self.end()
                raise OSError("the process that starts the ranks of a test has ended; does torch import?")
            line += part
        return line


class _Rank:
    """A forked rank, from its parent's view."""

    def __init__(self, rank: int, pid: int, pipe: int) -> None:
        self.rank, self.pid, self.pipe = rank, pid, pipe
        self.rest = b""
        self.lines: list[dict[str, Any]] = []

    def read(self) -> bool:
        """Read what the rank has written. Return False at the end of the pipe."""
        part = os.read(self.pipe, 2**16)
        *lines, self.rest = (self.rest + part).split(b"\n")
        self.lines += [json.loads(line) for line in lines if line]
        return bool(part)

    def report(self, ended: bool, state: str, status: int) -> RankReport:
        at = [line["at"] for line in self.lines if "at" in line]
        error = next((line["error"] for line in self.lines if "error" in line), "")
        if ended and not error and os.WIFSIGNALED(status):
            error = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        elif ended and not error and os.WEXITSTATUS(status):
            error = f"exit code {os.WEXITSTATUS(status)}"
        results = tuple(line["result"] for line in self.lines if "result" in line)
        done = sum("done" in line for line in self.lines)
        return RankReport(self.rank, ended, at[-1] if at else "", done, results, error, state)


def serve() -> None:
    """Run tests from stdin until it ends."""
    from launcher.doctor.measure import ranks

    ranks.load()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        reports = _run([RankTest(**test) for test in request["tests"]], dict(request["local"]))
        print(json.dumps([[asdict(report) for report in of_test] for of_test in reports]), flush=True)


def _run(tests: Sequence[RankTest], local: Mapping[int, int]) -> list[list[RankReport]]:
    """Start all ranks, and end each at the time limit of its test."""
    forked_by_test = [
        [_fork(test, rank, local[rank]) for rank in test.ranks if rank in local] for test in tests
    ]
    began = time.monotonic()
    reports: dict[int, RankReport] = {}
    with selectors.DefaultSelector() as selector:
        for number, ranks_of_test in enumerate(forked_by_test):
            for forked in ranks_of_test:
                selector.register(forked.pipe, selectors.EVENT_READ, (forked, began + tests[number].seconds))
        while selector.get_map():
            deadline = min(key.data[1] for key in selector.get_map().values())
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                forked = key.data[0]
                if not forked.read():
                    selector.unregister(key.fd)
                    _, status = os.waitpid(forked.pid, 0)
                    reports[forked.pid] = forked.report(True, "", status)
            now = time.monotonic()
            for key in [key for key in selector.get_map().values() if key.data[1] <= now]:
                forked = key.data[0]
                selector.unregister(key.fd)
                reports[forked.pid] = forked.report(False, _state(forked.pid), 0)
                os.kill(forked.pid, signal.SIGKILL)
                _wait_for_end(forked.pid)
    for forked in (forked for ranks_of_test in forked_by_test for forked in ranks_of_test):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(forked.pid, signal.SIGKILL)  # processes that the rank left behind
        os.close(forked.pipe)
    return [[reports[forked.pid] for forked in ranks_of_test] for ranks_of_test in forked_by_test]


def _wait_for_end(pid: int) -> None:
    """Wait for a killed process, but not for one that hangs in a device or a file system (state D)."""
    deadline = time.monotonic() + KILLED_SECONDS
    while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _fork(test: RankTest, rank: int, local: int) -> _Rank:
    read_end, write_end = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.close(read_end)
        dying_with(parent, signal.SIGKILL, own_group=True)()
        _act_as_rank(test, rank, local, write_end)
    os.close(write_end)
    with contextlib.suppress(OSError):  # parent and child both set the group, so that it exists from now on
        os.setpgid(pid, pid)
    return _Rank(rank, pid, read_end)


def _act_as_rank(test: RankTest, rank: int, local: int, write_end: int) -> NoReturn:
    from launcher.doctor.measure import ranks

    pipe = os.fdopen(write_end, "w", buffering=1)

    def send(**what: Any) -> None:
        pipe.write(json.dumps(what) + "\n")

    try:
        os.dup2(2, 1)  # stdout is reserved for the parent's answer
        place = {
            "RANK": test.ranks.index(rank),
            "WORLD_SIZE": len(test.ranks),
            "LOCAL_RANK": local,
            "MASTER_ADDR": test.host,
            "MASTER_PORT": test.port,
        }
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(test.env)
        ranks.TESTS[test.what](send, test.seconds, **test.options)
    except BaseException as error:
        traceback.print_exc()
        send(error=f"{type(error).__name__}: {reason_of(error)}")
    os._exit(0)


if __name__ == "__main__":
    serve()
