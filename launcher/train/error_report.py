"""The error file of a rank that fails: the failure class, the phase and step, and the exception."""

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
from launcher.rundir.files import replace_json
from launcher.rundir.secret_masking import masked_text
from launcher.spec.errors import described, text_of
from launcher.spec.verdict import EXIT_OOM, REMEDY, FailureClass, OutOfMemory
from launcher.train.checkpoints.folder import (
    NotSavedError,
    OtherShardsError,
    OtherTrainingError,
    PartsError,
    RefusedError,
)
from launcher.train.data.loading import WorkerError
from launcher.train.largest_tensors import with_tensors
from launcher.train.phase import Where
from launcher.train.rank import Place, RendezvousError, SetupError
from launcher.train.task import TaskError

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
"Exceptions whose message is for the author of the job."

_TIMEOUT = re.compile(
    r"Timed out waiting|timed? ?out after|Watchdog caught collective|collective operation timeout|"
    r"Application timeout caused pair closure"
)
_REMEDIES = tuple(
    (re.compile(pattern, re.DOTALL), remedy)
    for pattern, remedy in (
        (
            r"Expected to have finished reduction in the prior iteration",
            "In the job file, set train.find_unused_parameters: true, or sharding: fsdp, which treats their "
            "gradients as zero. It is best to remove parameters that take no part in the loss",
        ),
        (
            r"Expected to mark a variable ready only once",
            "Under DDP with train.find_unused_parameters: true, each call of the model in a micro-batch must "
            "use the parameters of the calls before: call it once, with one forward for all parts of the "
            "loss. Or use sharding: fsdp or, if the calls together always use every parameter, "
            "find_unused_parameters: false",
        ),
        (
            r"RegisterPostBackwardFunction is a view and .* modified inplace",
            "FSDP does not allow that the input of a block is changed in place, by the block or later: use "
            "operators that are not in place there (x = x + y, nn.ReLU() without inplace), leave the module "
            "out of blocks() of the task, or use sharding: ddp",
        ),
        (
            r"modified by an inplace operation",
            "With activations: selective, every-second or checkpoint, the tensor may be the input of a block "
            "that the model changes after the call, as in x += block(x): write x = x + block(x), or use "
            "activations: keep or offload",
        ),
        (
            r"mixed torch.Tensor and DTensor|out of bounds for storage of size 0",
            "FSDP has not gathered a weight that is used here. A weight can be used in its module's forward "
            "only. If the backward pass needs it, FSDP has not seen a gradient arrive: what a block returns "
            "must be in tuples, lists, dictionaries, dataclasses or objects of your own classes, and if it "
            "is a view, the model must not change it in place (y += x)",
        ),
        (
            r"differentiated Tensor at index .* appears to not have been used in the graph",
            "FSDP computes with gathered copies of the weights. To differentiate with respect to parameters "
            "in the loss, as meta-learning does, use sharding: ddp or zero1",
        ),
        (
            r"(must|to) have the same dtype|bias type .* should be the same|expected scalar type",
            "With precision: bf16, and with bf16-mixed under FSDP, a module's weights are in bf16 in its "
            "forward, and what it computes from buffers and integers is not: convert that to the type of the "
            "weight, y.to(weight.dtype). With bf16-mixed under sharding: ddp or none, autocast converts it",
        ),
        (
            r"A different number of tensors was saved|Recomputed values for the following tensors have diff",
            "A block computed something else when it ran again. It may depend on what recomputation does not "
            "restore, such as globals, modules outside the block and context managers that the model enters "
            "around it (torch.nn.utils.parametrize.cached): use activations: keep or offload",
        ),
    )
)
"What torch's messages mean for the job and the task."
# A peer has ended: that rank knows the cause, this one does not.
_PEER_GONE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited"
)

_KINDS_BY_TEXT: frozenset[Kind] = frozenset({"disk-full", "node-failed", "numerical", "image-error"})
"Kinds recognised from an exception's text even in the user's code, where a faulty GPU shows up too."

MAX_TEXT = 2**20
"Maximum characters kept of an exception and of a traceback."
MAX_CHAIN = 10
"Maximum length of a chain of exceptions, counted from the last one."

_AT_START = dict(os.environ)
"Kept to mask secrets that a task removes from the environment."

FRAMES = 3
"Frames printed of each exception of an OOM."
_NOT_USER_CODE = (f"{Path(__file__).parent}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", "<")

CLOSING_SECONDS = 10.0
"Time limit for a tracker's last upload after a failure or a stop request, when other ranks are waiting."
UPLOAD_SECONDS = 300.0
"Time limit for a tracker's upload after the last step. Without a network W&B would try for days."


def classify(error: BaseException, where: Where) -> FailureClass | None:
    """Return the failure class, or None if this rank cannot know it: a peer failed first, or a worker of the
    DataLoader crashed."""
    text = text_of(error)
    if (memory := memory_of(error)) is not None:
        return CLASS_OF[memory.kind]
    if isinstance(error, RendezvousError):
        return "rendezvous-failed"
    pattern = pattern_of(in_a_line(error).partition("\n")[0])
    if pattern is not None and pattern.kind in _KINDS_BY_TEXT:
        return CLASS_OF_KIND[pattern.kind]
    if isinstance(error, USERS_OWN):
        return "user-error"
    if _TIMEOUT.search(text) and isinstance(error, RuntimeError):
        return "nccl-timeout"
    if isinstance(error, dist.DistError | WorkerError) or _PEER_GONE.search(text):
        return None
    if isinstance(error, KeyboardInterrupt):
        return "cancelled"
    # launcher itself never raises SystemExit.
    return "user-error" if isinstance(error, SystemExit) or where.users else None


def memory_of(error: BaseException) -> OutOfMemory | None:
    """Return the OOM that the exception or one of its causes reports, or None."""
    reports = (out_of_memory(in_a_line(cause)) for cause in causes(error))
    return next(filter(None, reports), None)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its cause, the cause of that, and so on."""
    cause: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def write_error(place: Place, error: BaseException, where: Where) -> FailureClass | None:
    """Write `errors/rank-RRR.json` atomically, with secrets masked; return the failure class.

    Errors of writing, such as a full disk, are ignored.
    """
    moment = time.time()
    failure = classify(error, where)
    content: dict[str, Any] = {
        "rank": place.number,
        "node": place.node,
        "time": moment,
        "failure": failure,
        "phase": where.phase,
        "step": where.step,
        "exception": in_a_line(error)[:MAX_TEXT] + _remedy(text_of(error)),
        "traceback": masked("".join(where.traceback or _lines(error)))[-MAX_TEXT:],
    }
    if (collectives := where.collectives()) is not None:
        content["collectives"] = collectives
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
    """Return `text` without secrets. Mask before you shorten: part of a secret is not recognised."""
    return masked_text(text, {**_AT_START, **os.environ})


def in_a_line(error: BaseException) -> str:
    """Return `Type: message`, secrets masked."""
    return masked(described(error))


def _lines(error: BaseException) -> list[str]:
    """Return the lines to print: the traceback, or only the message for errors in USERS_OWN. If it reports an
    exception of the task, the place where that was raised comes first."""
    if not isinstance(error, USERS_OWN):
        return traceback.format_exception(error)
    cause = error.__cause__ if isinstance(error, TaskError) else None
    return [*(shortened(cause) if cause is not None else ()), *traceback.format_exception_only(error)]


def shortened(error: BaseException) -> list[str]:
    """Return the traceback with only the innermost FRAMES frames, those of user code if there are any."""
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        user_frames = [frame for frame in part.stack if not frame.filename.startswith(_NOT_USER_CODE)]
        part.stack = traceback.StackSummary.from_list((user_frames or part.stack)[-FRAMES:])
        part = part.__cause__ or part.__context__
    return list(whole.format())


def _remedy(text: str) -> str:
    """Return what to do about torch's message, or ""."""
    remedies = (f"{REMEDY}{remedy}" for pattern, remedy in _REMEDIES if pattern.search(text))
    return next(remedies, "")


def leave(code: int) -> NoReturn:
    """End the process now. A normal exit runs destructors, which may wait for ranks that ended or hang."""
    for worker in multiprocessing.active_children():  # otherwise they end some seconds later
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Return True if `call` finishes in time; if not, it continues in a thread until the process ends."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


class Restart(Protocol):
    """The interface of launcher.train.handover.restart.Restart that `fail` uses."""

    def out_of_memory(self, close: Callable[[], object]) -> None: ...
    def wait_if_under_way(self) -> None: ...
    def finish_saving(self) -> None: ...
    def end(self) -> None: ...


def fail(
    place: Place,
    error: BaseException,
    where: Where,
    close: Callable[[], object],
    restart: Restart | None = None,
) -> NoReturn:
    """Write the error file, print the traceback and exit: with EXIT_OOM after an OOM, else with 1.

    `close` may take CLOSING_SECONDS, because other ranks may be waiting for this one. After an OOM `restart`
    saves the state of all ranks for the next attempt; it is None while the ranks are not connected.
    """
    failure = write_error(place, error, where)
    out_of_memory = failure in ("gpu-oom", "host-oom")
    # Where an OOM happens is chance, and the supervisor retries: print a few frames. The error file has all.
    sys.stderr.writelines((where.traceback or shortened(error)) if out_of_memory else _lines(error))
    if restart is not None and out_of_memory:
        restart.out_of_memory(close)
    else:
        if restart is not None:
            restart.wait_if_under_way()
            if failure != "nccl-timeout":  # otherwise a rank may be gone
                restart.finish_saving()
        within(CLOSING_SECONDS, close)
        if restart is not None:
            restart.end()
    leave(EXIT_OOM if out_of_memory else 1)
