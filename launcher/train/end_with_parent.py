"""Processes that multiprocessing has forked, and that no longer matter when their parent has ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

PR_SET_PDEATHSIG = 1
"Option of prctl(2), from <linux/prctl.h>: the signal that a process gets when its parent ends."


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it ended before the call to prctl
        os._exit(1)
