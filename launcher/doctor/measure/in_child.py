"""Measure in a child process, because a system call into a faulty device or file system may never return."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import NamedTuple

from launcher.doctor.measure.guarded import reason_of
from launcher.doctor.values import Measured
from launcher.supervise.process import dying_with


class ChildResult(NamedTuple):
    """What a child has measured."""

    values: list[Measured]
    subject: str = ""
    "What the child was measuring when it ended or stopped answering."
    error: str = ""
    "Why that measurement did not finish; empty if it did."


def in_child(measure: Callable[[], Iterable[Measured | str]], timeout: float) -> ChildResult:
    """Run `measure` in a child and return what it yields: values, and as text the subject of the next ones.

    A child that yields nothing for `timeout` seconds is killed and abandoned.
    """
    read_end, write_end = os.pipe()
    parent = os.getpid()
    if not (pid := os.fork()):
        try:
            dying_with(parent, signal.SIGKILL)()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1):  # bash waits until its pipe is closed everywhere
                os.dup2(null, stream)
            with os.fdopen(write_end, "w", buffering=1) as pipe:
                try:
                    for item in measure():
                        pipe.write(json.dumps(item if isinstance(item, str) else asdict(item)) + "\n")
                except Exception as error:
                    pipe.write(json.dumps({"error": reason_of(error)}) + "\n")
        finally:
            os._exit(0)
    os.close(write_end)
    try:
        return _read(read_end, timeout)
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)  # do not wait, because a child may hang in the kernel


def _read(read_end: int, timeout: float) -> ChildResult:
    values: list[Measured] = []
    subject, rest = "", b""
    while select.select([read_end], [], [], timeout)[0]:
        part = os.read(read_end, 2**16)
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            record = json.loads(line)
            if isinstance(record, str):
                subject = record
            elif "check" in record:
                values.append(Measured(**record))
            else:
                return ChildResult(values, subject, record["error"])
        if not part:
            return ChildResult(values, subject)
    return ChildResult(values, subject, f"It does not answer within {timeout:.0f} s.")
