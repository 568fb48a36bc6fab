"""What a rank writes when it fails: the class, where in the step it was, and the exception."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from launcher.diagnosis.clue import CLASS_OF as CLASS_OF_KIND
from launcher.diagnosis.clue import Kind
from launcher.diagnosis.collector import pattern_of
from launcher.diagnosis.memory import CLASS_OF, out_of_memory
from launcher.logs.mask import masked_text
from launcher.rundir.files import replace_json
from launcher.spec.verdict import EXIT_OOM, FailureClass, OutOfMemory
from launcher.train.checkpoints.folder import (
    NotSavedError,
    OtherShardsError,
    OtherTrainingError,
    PartsError,
    RefusedError,
)
from launcher.train.live import with_tensors
from launcher.train.rank import Place, RendezvousError, SetupError
from launcher.train.task import TaskError
from launcher.train.where import Where

USERS_OWN = (
    TaskError,
    SetupError,
    NotSavedError,
    OtherShardsError,
    OtherTrainingError,
    PartsError,
    RefusedError,
    FloatingPointError,
)
"Raised with a message that is meant for the author of the job."

_TIMEOUT = re.compile(
    r"Timed out waiting|timed? ?out after|Watchdog caught collective|collective operation timeout"
)
_UNUSED = re.compile(r"Expected to have finished reduction in the prior iteration")
# The peer is gone: it knows why, this rank does not.
_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited"
)

_TOLD_BY_WORDS: frozenset[Kind] = frozenset({"disk-full", "node-failed", "numerical", "image-error"})
"Kinds that an exception's words tell whoever raised it: a faulty GPU shows in the user's code, too."

MAX_TEXT = 2**20
"Characters of an exception and of a traceback that are kept."
MAX_CHAIN = 10
"Exceptions that came of each other, from the last one back."

_AT_START = dict(os.environ)
"A task may take its secrets out of the environment."

FRAMES = 3
"Of each exception of a full memory, on the screen."
_NOT_THEIRS = (f"{Path(__file__).parent}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", "<")

CLOSING_SECONDS = 10.0
"For a tracker's last upload after a failure or a request to stop: others are waiting."
UPLOAD_SECONDS = 300.0
"The same after the last step. Without a network W&B would try for days."


def classify(error: BaseException, where: Where) -> FailureClass | None:
    """The class of a failure, None when this rank cannot know it (most often because a peer failed first)."""
    text = str(error)
    if (memory := memory_of(error)) is not None:
        return CLASS_OF[memory.kind]
    if isinstance(error, RendezvousError):
        return "rendezvous-failed"
    pattern = pattern_of(in_a_line(error).partition("\n")[0])
    if pattern is not None and pattern.kind in _TOLD_BY_WORDS:
        return CLASS_OF_KIND[pattern.kind]
    if isinstance(error, USERS_OWN):
        return "user-error"
    if _TIMEOUT.search(text) and isinstance(error, RuntimeError):
        return "nccl-timeout"
    if isinstance(error, dist.DistError) or _PEER_GONE.search(text):
        return None
    if where.users and not isinstance(error, KeyboardInterrupt):
        return "user-error"
    return None


def memory_of(error: BaseException) -> OutOfMemory | None:
    """Which memory ran out, when that is what the exception says, or the one that it came of."""
    found = (out_of_memory(in_a_line(cause)) for cause in causes(error))
    return next(filter(None, found), None)


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, the one that it came of, and so on."""
    cause: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def write_error(place: Place, error: BaseException, where: Where) -> FailureClass | None:
    """Write `errors/rank-RRR.json`, whole or not at all, secrets masked. A full disk hides no error."""
    moment = time.time()
    failure = classify(error, where)
    content: dict[str, Any] = {
        "rank": place.number,
        "node": place.node,
        "time": moment,
        "failure": failure,
        "phase": where.phase,
        "step": where.step,
        "exception": in_a_line(error)[:MAX_TEXT] + _remedy(str(error)),
        "traceback": masked("".join(where.traceback or _lines(error)))[-MAX_TEXT:],
    }
    if (memory := memory_of(error)) is not None:
        snapshot = place.attempt.oom_snapshot(place.number) if memory.kind == "gpu" else None
        memory = with_tensors(memory, where.failed, str(snapshot) if snapshot is not None else None)
        content["memory"] = memory.model_dump()
        content["why_not_in_process"] = where.why_not
    with contextlib.suppress(OSError):
        path = place.attempt.error(place.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_json(path, content)
    return failure


def masked(text: str) -> str:
    """Return `text` without secrets. What is shortened before is not recognised."""
    return masked_text(text, {**_AT_START, **os.environ})


def in_a_line(error: BaseException) -> str:
    """Return `Type: message`, secrets masked."""
    return masked(f"{type(error).__name__}: {error}")


def _lines(error: BaseException) -> list[str]:
    """USERS_OWN say what is wrong and what to do: where in launcher they were raised helps nobody."""
    if isinstance(error, USERS_OWN):
        return traceback.format_exception_only(error)
    return traceback.format_exception(error)


def shortened(error: BaseException) -> list[str]:
    """The traceback, with the innermost frames that are the user's own, where there are any."""
    whole = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = whole
    while one is not None:
        theirs = [frame for frame in one.stack if not frame.filename.startswith(_NOT_THEIRS)]
        one.stack = traceback.StackSummary.from_list((theirs or one.stack)[-FRAMES:])
        one = one.__cause__ or one.__context__
    return list(whole.format())


def _remedy(text: str) -> str:
    """Where torch's own message names a switch that is ours."""
    if _UNUSED.search(text):
        return (
            " | In a job file: train.find_unused_parameters: true, or sharding: fsdp, which takes their "
            "gradients for zero; best is a model without parameters that take no part in the loss"
        )
    return ""


def leave(code: int) -> NoReturn:
    """End now. A normal exit would run destructors that wait for ranks which may be gone or stuck."""
    for worker in multiprocessing.active_children():  # they would notice only after some seconds
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Whether `call` came to its end in that time. If not, it goes on in a thread until the process ends."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


class Restart(Protocol):
    """launcher.train.recovery.restart.Restart"""

    def out_of_memory(self, close: Callable[[], object]) -> None: ...
    def wait_if_under_way(self) -> None: ...


def fail(
    place: Place,
    error: BaseException,
    where: Where,
    close: Callable[[], object],
    restart: Restart | None = None,
) -> NoReturn:
    """Write the error file, print the traceback, end with the code that tells what happened.

    `close` gets CLOSING_SECONDS: the other ranks may be waiting for this one. `restart` keeps the state of
    all ranks for the next attempt when this one is out of memory; None: the ranks have not met.
    """
    failure = write_error(place, error, where)
    out_of_memory = failure in ("gpu-oom", "host-oom")
    # Where memory ran out is chance, and the supervisor goes on: a few lines do. The error file has them all.
    sys.stderr.writelines((where.traceback or shortened(error)) if out_of_memory else _lines(error))
    if restart is not None and out_of_memory:
        restart.out_of_memory(close)
    else:
        if restart is not None:
            restart.wait_if_under_way()
        within(CLOSING_SECONDS, close)
    leave(EXIT_OOM if out_of_memory else 1)
