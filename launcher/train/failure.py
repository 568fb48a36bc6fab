"""What a rank writes when it fails: the class, where in the step it was, and the exception."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import traceback
from typing import NoReturn

import torch
import torch.distributed as dist

from launcher.logs.mask import masked_text
from launcher.runs.files import replace_json
from launcher.spec.verdict import EXIT_OOM, FailureClass
from launcher.train.checkpoints.folder import NotSavedError
from launcher.train.rank import Place, RendezvousError, SetupError
from launcher.train.task import TaskError
from launcher.train.where import Where

# PyTorch raises OutOfMemoryError for its own allocator only; libraries allocate beside it.
_GPU_OOM = re.compile(
    r"CUDA out of memory|cuda (error|failure)[^\n]{0,20}out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED", re.I
)
_HOST_OOM = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory")
_TIMEOUT = re.compile(
    r"Timed out waiting|timed? ?out after|Watchdog caught collective|collective operation timeout"
)
# The peer is gone: it knows why, this rank does not.
_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited"
)


def classify(error: BaseException, where: Where) -> FailureClass | None:
    """The class of a failure, None when this rank cannot know it (most often because a peer failed first)."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or _GPU_OOM.search(text):
        return "gpu-oom"
    if isinstance(error, MemoryError) or _HOST_OOM.search(text):
        return "host-oom"
    if isinstance(error, RendezvousError):
        return "rendezvous-failed"
    if isinstance(error, TaskError | SetupError | NotSavedError):
        return "user-error"
    if _TIMEOUT.search(text) and isinstance(error, RuntimeError):
        return "nccl-timeout"
    if isinstance(error, dist.DistError) or _PEER_GONE.search(text):
        return None
    if where.users and not isinstance(error, KeyboardInterrupt):
        return "user-error"
    return None


def write_error(place: Place, error: BaseException, where: Where) -> FailureClass | None:
    """Write `errors/rank-RRR.json`, whole or not at all, secrets masked. A full disk hides no error."""
    moment = time.time()
    failure = classify(error, where)
    content = {
        "rank": place.number,
        "node": place.node,
        "time": moment,
        "failure": failure,
        "phase": where.phase,
        "step": where.step,
        "exception": masked_text(f"{type(error).__name__}: {error}", os.environ),
        "traceback": masked_text("".join(traceback.format_exception(error)), os.environ),
    }
    with contextlib.suppress(OSError):
        path = place.attempt.error(place.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_json(path, content)
    return failure


def leave(code: int) -> NoReturn:
    """End now. A normal exit would run destructors that wait for ranks which may be gone or stuck."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def fail(place: Place, error: BaseException, where: Where) -> NoReturn:
    """Write the error file, print the traceback, end with the code that tells what happened."""
    failure = write_error(place, error, where)
    out_of_memory = failure in ("gpu-oom", "host-oom")
    # Where memory ran out is chance, and the supervisor goes on: a few lines do. The error file has them all.
    traceback.print_exception(error, limit=-3 if out_of_memory else None)
    leave(EXIT_OOM if out_of_memory else 1)
