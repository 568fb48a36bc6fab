"""Verdict: how an attempt ended, and what a reader needs to believe it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import ValidationError

from launcher.spec.base import Value
from launcher.spec.failures import EXIT_CODES as EXIT_CODES
from launcher.spec.failures import FailureClass as FailureClass
from launcher.spec.failures import exit_code as exit_code

# Exit codes by which a rank of the built-in entrypoint tells what happened (above sysexits' 64-78).
EXIT_STOPPED = 85  # asked to stop, wrote a checkpoint
EXIT_OOM = 86  # out of memory, wrote an error file
EXIT_FOLLOWED = 87  # handed over its state: another rank was out of memory, or no time was left for a step
EXIT_TAKEN = 88  # of a supervisor: another living one holds the run

Confidence = Literal["certain", "likely", "guess"]
"""`certain`: written down by the rank itself, torchelastic, the scheduler or the kernel. `likely`: decisive
words in the output. `guess`: anything else. Memory is lowered on the first two only."""

Phase = Literal["init", "probe", "data", "forward", "backward", "optimizer", "evaluation", "checkpoint"]
"Of a rank of the built-in entrypoint."

MemoryKind = Literal["gpu", "host", "shared"]
"shared: /dev/shm, through which DataLoader workers and NCCL hand data from process to process."


class LiveTensor(Value):
    """One of the largest pieces of memory in use when there was none left."""

    bytes: int
    shape: tuple[int, ...] | None = None
    "None where only the allocator knows of it, as of activations on a GPU."
    dtype: str | None = None
    name: str | None = None
    "Of the parameter; `gradient of ...`, `exp_avg of ...` for what belongs to one."


class OutOfMemory(Value):
    """What was known when memory ran out. Sizes in bytes, None where nobody told."""

    kind: MemoryKind
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    largest: tuple[LiveTensor, ...] = ()
    snapshot: str | None = None
    "Path of the rank's memory snapshot."


class Seen(Value):
    """A line of the output that tells of a failure: the decisive one, or one that is not the cause."""

    failure: FailureClass
    text: str
    place: str = ""
    "File and line number, such as `rank-003.err:4182`."
    why: str = ""
    "Why it is not the cause; empty for the decisive line."
    before: tuple[str, ...] = ()
    "Lines that stand before it."


class Verdict(Value):
    """The end of one attempt. `rank` is the first failing rank, None when no rank failed first."""

    failure: FailureClass
    reason: str
    "One sentence for a person."
    phase: str | None = None
    "A Phase, where known."
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    exit_code: int | None = None
    "Of the first failing rank; negative for a signal."
    exception: str | None = None
    "`Type: message`."
    last_lines: tuple[str, ...] = ()
    "What that rank printed last, at most 20 lines."
    evidence: tuple[str, ...] = ()
    "Files and facts the class rests on."
    seen: tuple[Seen, ...] = ()
    "Lines of all ranks that tell of a failure: the decisive one first, then what explains most."
    confidence: Confidence = "certain"
    memory: OutOfMemory | None = None
    "Of gpu-oom and host-oom."
    why_not_in_process: str | None = None
    "Why the step in which memory ran out was not repeated by the same processes, where the phase allows it."

    @property
    def ok(self) -> bool:
        return self.failure == "succeeded"


class Judged(NamedTuple):
    """verdict.json: how an attempt ended, and what was done then."""

    verdict: Verdict
    then: str = ""

    @classmethod
    def read(cls, said: object) -> Judged | None:
        """None for what is no verdict. Fields of another version are left out."""
        if not isinstance(said, dict):
            return None
        try:
            known = {name: value for name, value in said.items() if name in Verdict.model_fields}
            return cls(Verdict.model_validate(known), str(said.get("then", "")))
        except ValidationError:
            return None
