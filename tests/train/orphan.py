"""A worker of the DataLoader whose rank ends before it has begun, where another process adopts orphans."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys

from launcher.train.data.loading import _initialise_worker

PR_SET_CHILD_SUBREAPER = 36
"As what starts the ranks of a run does: <linux/prctl.h>."


def worker() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    while os.getppid() == rank.pid:
        pass
    _initialise_worker(0)
    os._exit(77)


def rank() -> None:
    multiprocessing.get_context("fork").Process(target=worker).start()
    os._exit(0)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    first = multiprocessing.get_context("fork").Process(target=rank)
    first.start()
    first.join()
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
