"""Verdict: how an attempt ended, with the evidence."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import ValidationError

from launcher.spec.failures import EXIT_CODES as EXIT_CODES
from launcher.spec.failures import FailureClass as FailureClass
from launcher.spec.failures import exit_code as exit_code
from launcher.spec.value import Value

# Exit codes by which a rank of the built-in entrypoint reports its end (above sysexits' 64-78).
EXIT_STOPPED = 85  # asked to stop, wrote a checkpoint
EXIT_OOM = 86  # out of memory, wrote an error file
EXIT_FOLLOWED = 87  # handed over its state: another rank had an OOM, or no time was left for a step
EXIT_TAKEN = 88  # exit code of a supervisor if another one already supervises the run
EXIT_TRAINED = 89  # all steps are done; the worker ends with 0 for it
EXIT_SICK = 3  # exit code of the doctor if this node is broken; any other is a fault of the check itself

Confidence = Literal["certain", "likely", "guess"]
"""`certain`: recorded by the rank itself, torchelastic, the scheduler or the kernel. `likely`: decisive words
in the output. `guess`: anything else. A guess never leads to a recipe that needs less memory."""

Phase = Literal["init", "probe", "data", "forward", "backward", "optimizer", "evaluation", "checkpoint"]
"Phase of a rank of the built-in entrypoint."

REMEDY = " | "
"Stands between the message of an exception and what to do about it."
STILL_FETCHING, FETCHED = "is still fetching samples", "has fetched its samples"
"Text of the line that a rank prints if it keeps the others waiting, and of the line that it prints after it."

MemoryKind = Literal["gpu", "host", "shared"]
"`shared`: /dev/shm, through which DataLoader workers and NCCL pass data between processes."


class LiveTensor(Value):
    """One of the largest memory blocks in use at an OOM."""

    bytes: int
    shape: tuple[int, ...] | None = None
    "None if only the allocator knows the block, for example an activation on a GPU."
    dtype: str | None = None
    name: str | None = None
    "Name of the parameter, or `gradient of ...`, `exp_avg of ...` for a tensor that belongs to one."


class OutOfMemory(Value):
    """What is known about an OOM. Sizes are in bytes, None if unknown."""

    kind: MemoryKind
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    largest: tuple[LiveTensor, ...] = ()
    snapshot: str | None = None
    "Path of the rank's memory snapshot."


class Seen(Value):
    """A line of output that indicates a failure: the decisive one, or one that is not the cause."""

    failure: FailureClass
    text: str
    place: str = ""
    "File and line number, such as `rank-003.err:4182`."
    why: str = ""
    "Why the line is not the cause. Empty for the decisive line."
    before: tuple[str, ...] = ()
    "The lines before it."


class Verdict(Value):
    """The end of one attempt. `rank` is the first failing rank, or None if no rank failed first."""

    failure: FailureClass
    reason: str
    "One sentence for the user."
    phase: str | None = None
    "A Phase, if known."
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    exit_code: int | None = None
    "Exit code of the first failing rank. Negative for a signal."
    exception: str | None = None
    "`Type: message`."
    last_lines: tuple[str, ...] = ()
    "The last lines that this rank printed, at most 20."
    evidence: tuple[str, ...] = ()
    "Files and facts that support the class."
    seen: tuple[Seen, ...] = ()
    "Lines of all ranks that indicate a failure: the decisive one first, then by how much they explain."
    confidence: Confidence = "certain"
    memory: OutOfMemory | None = None
    "Set for gpu-oom and host-oom."
    why_not_in_process: str | None = None
    "Why the same processes did not repeat the step with the OOM, if the phase allows that."

    @property
    def ok(self) -> bool:
        return self.failure == "succeeded"


class Judged(NamedTuple):
    """verdict.json: how an attempt ended, and what was done next."""

    verdict: Verdict
    then: str = ""

    @classmethod
    def read(cls, data: object) -> Judged | None:
        """Return the verdict, or None if `data` is not one. Fields of other versions are ignored."""
        if not isinstance(data, dict):
            return None
        try:
            known = {name: value for name, value in data.items() if name in Verdict.model_fields}
            return cls(Verdict.model_validate(known), str(data.get("then", "")))
        except ValidationError:
            return None
