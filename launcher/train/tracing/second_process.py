"""A forked copy of this process that computes half of the answers, at the same time as this one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Generic, ParamSpec, TypeVar

import torch

from launcher.train.end_with_parent import end_with_parent

PATIENCE = 60.0
"Minimum seconds for which a result is awaited. A call that has run for longer gets as long again."
_P = ParamSpec("_P")
_T = TypeVar("_T")


class SecondProcess(Generic[_P, _T]):
    """Calls `function` in a copy of this process, which keeps its own state from call to call.

    The copy ends with this object and with this process. What it prints is lost.
    """

    def __init__(self, function: Callable[_P, _T]) -> None:
        self._connection, its_end = multiprocessing.Pipe()
        self._busy = False
        "Whether the result of the last call has not been received."
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(function, its_end, self._connection), daemon=True
        )
        gc.collect()  # the copy could not free this garbage
        self._process.start()
        its_end.close()
        # At its exit, this process sends SIGTERM and waits, but the task may have a handler of it.
        Finalize(self, _end, args=(self._process,), exitpriority=0)

    @staticmethod
    def is_possible() -> bool:
        """Return whether there is a second core, and no thread that a copy would lack.

        A Timer, such as that of a progress line, does nothing yet that a copy could wait for.
        """
        main = threading.main_thread()
        return (
            sys.platform == "linux"
            and len(os.sched_getaffinity(0)) > 1
            and all(each is main or isinstance(each, threading.Timer) for each in threading.enumerate())
            and not multiprocessing.current_process().daemon
        )

    def start(self, *args: _P.args, **kwargs: _P.kwargs) -> Callable[[], _T | None]:
        """Start a call. Return a function that waits for its result, and returns None if the call failed.

        Wait for each result before the next call; otherwise the copy is killed.
        """
        if self._busy:
            self._give_up()
        self._busy = True
        with suppress(OSError):  # the copy has ended
            self._connection.send((args, kwargs))
        return partial(self._result, time.monotonic())

    def _result(self, began: float) -> _T | None:
        with suppress(EOFError, OSError):
            if self._connection.poll(max(PATIENCE, time.monotonic() - began)):
                result: _T | None = self._connection.recv()
                self._busy = False
                return result
        # A library may have held a lock in another thread when the process was copied.
        self._give_up()
        return None

    def _give_up(self) -> None:
        """End the copy. A result that it has sent is not received any more."""
        _end(self._process)
        self._connection.close()


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _serve(function: Callable[_P, _T], connection: Connection, other_end: Connection) -> None:
    end_with_parent()
    other_end.close()  # so that recv() ends when the first process closes it
    gc.freeze()  # a collection would write to the objects that both processes share, and so copy them
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    torch.set_num_threads(1)  # the threads of the first process do not exist here
    while True:
        try:
            args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            result: _T | None = function(*args, **kwargs)
        except (Exception, SystemExit):  # the first process repeats the call and raises the error
            result = None
        connection.send(result)
