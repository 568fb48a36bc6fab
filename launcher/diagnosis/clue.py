"""A clue: one line of a program's output that may tell why it ended. Kinds of clues, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from launcher.spec.failures import FAILURES, FailureClass

if TYPE_CHECKING:
    from launcher.spec.verdict import MemoryKind

Kind = str
"""What a line tells, one of CLASS_OF. `exception`: a Python exception that no pattern knows. `consequence`:
something that happens because something else failed. `killed`: a signal, of which only an exit code tells."""

_CAUSES: dict[Kind, FailureClass] = {
    "gpu-memory": "gpu-oom",
    "host-memory": "host-oom",
    "shared-memory": "host-oom",
    "disk-full": "disk-full",
    "node-failed": "node-failed",
    "time-limit": "time-limit",
    "preempted": "preempted",
    "image-error": "image-error",
    "desync": "desync",
    "numerical": "numerical",
}
_EFFECTS: dict[Kind, FailureClass] = {
    "killed": "unknown",
    "user-error": "user-error",
    "exception": "user-error",
    "cancelled": "cancelled",
    "rendezvous-failed": "rendezvous-failed",
    "nccl-timeout": "nccl-timeout",
    "consequence": "unknown",
}
_TOLD = {*_CAUSES.values(), *_EFFECTS.values(), "succeeded"}
# Only the patterns of a job or a profile tell of any other class.
CLASS_OF = _CAUSES | {name: name for name in FAILURES if name not in _TOLD} | _EFFECTS
"""In the order in which they explain each other: a full memory explains a lost connection, never the
reverse."""

MEMORY_OF: dict[Kind, MemoryKind] = {
    "gpu-memory": "gpu",
    "host-memory": "host",
    "shared-memory": "shared",
}

_EQUALS: tuple[frozenset[Kind], ...] = (
    frozenset({"gpu-memory", "host-memory", "shared-memory"}),
    frozenset({"time-limit", "preempted"}),
    frozenset({"user-error", "exception", "cancelled"}),
)

KIND_OF: dict[str, Kind] = {CLASS_OF[kind]: kind for kind in reversed(CLASS_OF)}
"The kind that a user's own pattern of a class has: gpu-oom is `gpu-memory`, user-error is `user-error`."


def order_of(kind: Kind) -> int:
    """Return the place of a kind among the causes; the smaller one explains the larger one."""
    equals = next((group for group in _EQUALS if kind in group), {kind})
    return min([*CLASS_OF].index(one) for one in equals)


Strength = Literal["record", "words", "weak"]
"""`record`: written by the scheduler or the kernel. `words`: a program's decisive words. `weak`: words of a
warning, or of something that the program survived."""


class Clue(NamedTuple):
    """One line, where it stands, and what it tells."""

    kind: Kind
    text: str
    "The line without prefixes of loggers and collectors; of an exception `Type: message`."
    stream: str = ""
    "`out` or `err` of a rank; empty for a log file."
    line: int = 0
    "Line number in the file of the stream, from 1."
    time: float = 0.0
    "When it was written: seconds since the epoch; 0 where that is not known."
    strength: Strength = "words"
    survived: bool = False
    "The program went on after it."
    uncaught: bool = False
    "An exception whose traceback goes through the program's outermost frame: it ends its process."
    label: str = ""
    "The rank's name as a collector printed it before the line."
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def memory_text(self) -> str:
        """The line and what follows: libraries wrap the sizes of a failed allocation."""
        return "\n".join((self.text, *self.after))


def clue_of(record: object) -> Clue | None:
    """Return the clue that a JSON object holds; None for one that is damaged."""
    if not isinstance(record, dict) or record.get("kind") not in CLASS_OF:
        return None
    known = {name: value for name, value in record.items() if name in Clue._fields}
    known |= {name: tuple(map(str, known.get(name) or ())) for name in ("before", "after")}
    try:
        clue = Clue(**{"text": "", **known})
        return clue._replace(line=int(clue.line), time=float(clue.time), text=str(clue.text))
    except (TypeError, ValueError):
        return None


def failure_patterns(about: Mapping[str, Any]) -> list[tuple[str, Kind]]:
    """Return the expressions of the job and of the cluster, the job's first. `about`: content of run.json."""
    sections = (about.get("job") or {}, about.get("cluster") or {})
    rows = [row for section in sections for row in section.get("failures") or ()]
    return [(row["pattern"], KIND_OF[row["class"]]) for row in rows]
