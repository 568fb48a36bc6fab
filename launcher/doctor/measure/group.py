"""Run tests in processes of their own, one per local rank, and end them when their time is over.

`python -m launcher.doctor.measure.group` imports torch once and forks the ranks of each test. A test then
takes no second of importing, and a new process reads every setting. Each line of stdin has the tests of one
moment, as JSON. The answer is a line: what the ranks told, and the state of those that did not end.
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
from launcher.doctor.rank_test import RankTest, Told
from launcher.supervise.process import dying_with

IMPORT_SECONDS = 60.0
"How much longer than a test the first answer may take: torch is imported, perhaps from a cold network disk."
KILLED_SECONDS = 2.0
ASK_SECONDS = 0.5
"How often the process that waits for a test asks whether it is pointless."


class Group:
    """The process that forks the ranks of this node. Use it as a context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process. It is started again for the next test."""
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
        """Import torch, meanwhile or now."""
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
        pointless: Callable[[], object] = lambda: False,
    ) -> list[list[Told]]:
        """Run this node's ranks of several tests at the same time. Return what they told, for each test.

        `local` has the local rank of each rank of this node. `pointless` is asked twice a second whether the
        tests should end now. Raises OSError, also if they did.
        """
        self.start()
        assert self._process is not None and self._process.stdin and self._process.stdout
        request = {"tests": [asdict(test) for test in tests], "local": list(local.items())}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer(max(test.seconds for test in tests) + IMPORT_SECONDS, pointless)
        return [[Told(**one) for one in told] for told in json.loads(answer)]

    def _answer(self, seconds: float, pointless: Callable[[], object]) -> bytes:
        """Return the next line of the process. Raises OSError, and ends it, if there is none in this time."""
        assert self._process is not None and self._process.stdout
        deadline, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                self.end()
                raise OSError("the process that starts the ranks of a test hangs; does torch import?")
            if pointless():
                self.end()
                raise OSError("another node is lost")
            if not select.select([self._process.stdout], [], [], min(left, ASK_SECONDS))[0]:
                continue
            if not (part := os.read(self._process.stdout.fileno(), 2**16)):
                self.end()
                raise OSError("the process that starts the ranks of a test has ended; does torch import?")
            line += part
        return line


class _Rank:
    """One forked rank, as its parent sees it."""

    def __init__(self, rank: int, pid: int, pipe: int) -> None:
        self.rank, self.pid, self.pipe = rank, pid, pipe
        self.rest = b""
        self.lines: list[dict[str, Any]] = []

    def read(self) -> bool:
        """Read what the rank tells. False at its end."""
        part = os.read(self.pipe, 2**16)
        *lines, self.rest = (self.rest + part).split(b"\n")
        self.lines += [json.loads(line) for line in lines if line]
        return bool(part)

    def told(self, ended: bool, state: str, status: int) -> Told:
        at = [line["at"] for line in self.lines if "at" in line]
        error = next((line["error"] for line in self.lines if "error" in line), "")
        if ended and not error and os.WIFSIGNALED(status):
            error = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        elif ended and not error and os.WEXITSTATUS(status):
            error = f"exit code {os.WEXITSTATUS(status)}"
        results = tuple(line["result"] for line in self.lines if "result" in line)
        done = sum("done" in line for line in self.lines)
        return Told(self.rank, ended, at[-1] if at else "", done, results, error, state)


def serve() -> None:
    """Answer tests until stdin ends."""
    from launcher.doctor.measure import ranks

    ranks.load()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        told = _run([RankTest(**test) for test in asked["tests"]], dict(asked["local"]))
        print(json.dumps([[asdict(one) for one in ranks_told] for ranks_told in told]), flush=True)


def _run(tests: Sequence[RankTest], local: Mapping[int, int]) -> list[list[Told]]:
    """Start all ranks, and give each the time of its test."""
    found = [[_fork(test, rank, local[rank]) for rank in test.ranks if rank in local] for test in tests]
    began = time.monotonic()
    told: dict[int, Told] = {}
    with selectors.DefaultSelector() as selector:
        for number, forked in enumerate(found):
            for one in forked:
                selector.register(one.pipe, selectors.EVENT_READ, (one, began + tests[number].seconds))
        while selector.get_map():
            deadline = min(key.data[1] for key in selector.get_map().values())
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                one = key.data[0]
                if not one.read():
                    selector.unregister(key.fd)
                    _, status = os.waitpid(one.pid, 0)
                    told[one.pid] = one.told(True, "", status)
            now = time.monotonic()
            for key in [key for key in selector.get_map().values() if key.data[1] <= now]:
                one = key.data[0]
                selector.unregister(key.fd)
                told[one.pid] = one.told(False, _state(one.pid), 0)
                os.kill(one.pid, signal.SIGKILL)
                _wait_for_end(one.pid)
    for one in (one for forked in found for one in forked):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)  # what the rank left in its group
        os.close(one.pipe)
    return [[told[one.pid] for one in forked] for forked in found]


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
    out, into = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.close(out)
        dying_with(parent, signal.SIGKILL, own_group=True)()
        _be_rank(test, rank, local, into)
    os.close(into)
    with contextlib.suppress(OSError):  # whoever is first, parent or child: the group is there now
        os.setpgid(pid, pid)
    return _Rank(rank, pid, out)


def _be_rank(test: RankTest, rank: int, local: int, into: int) -> NoReturn:
    from launcher.doctor.measure import ranks

    pipe = os.fdopen(into, "w", buffering=1)

    def tell(**what: Any) -> None:
        pipe.write(json.dumps(what) + "\n")

    try:
        os.dup2(2, 1)  # stdout is the answer to the parent's parent
        place = {
            "RANK": test.ranks.index(rank),
            "WORLD_SIZE": len(test.ranks),
            "LOCAL_RANK": local,
            "MASTER_ADDR": test.host,
            "MASTER_PORT": test.port,
        }
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(test.env)
        ranks.TESTS[test.what](tell, test.seconds, **test.options)
    except BaseException as error:
        traceback.print_exc()
        tell(error=f"{type(error).__name__}: {reason_of(error)}")
    os._exit(0)


if __name__ == "__main__":
    serve()
