"""A clue is a line of a program's output that may show why it ended. Defines the kinds of clues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from launcher.spec.failures import FAILURES, FailureClass
from launcher.spec.records import RunRecord

if TYPE_CHECKING:
    from launcher.spec.verdict import MemoryKind

Kind = str
"""What a line shows, one of CLASS_OF. `exception` is a Python exception that no pattern matches.
`consequence` is something that happens because something else failed. `killed` is a signal, which only an
exit code shows."""

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
_CLASSES = {*_CAUSES.values(), *_EFFECTS.values(), "succeeded"}
# Other classes come only from patterns of a job or a profile.
CLASS_OF = _CAUSES | {name: name for name in FAILURES if name not in _CLASSES} | _EFFECTS
"""Earlier kinds explain later ones: a full memory explains a lost connection, never the reverse."""

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
"The kind of a user's own pattern, by its class: gpu-oom is `gpu-memory`, user-error is `user-error`."


def order_of(kind: Kind) -> int:
    """Return the position of a kind in CLASS_OF. A kind explains those with larger positions."""
    equals = next((group for group in _EQUALS if kind in group), {kind})
    return min([*CLASS_OF].index(name) for name in equals)


Strength = Literal["record", "words", "weak"]
"""`record`: written by the scheduler or the kernel. `words`: decisive words of a program. `weak`: words of a
warning, or of a failure that the program survived."""


class Clue(NamedTuple):
    """One line with its position and what it shows."""

    kind: Kind
    text: str
    "The line without prefixes of loggers and collectors; for an exception, `Type: message`."
    stream: str = ""
    "`out` or `err` of a rank; empty for a log file."
    line: int = 0
    "Line number in the stream's file, from 1."
    time: float = 0.0
    "When it was written, in seconds since the epoch; 0 if that is not known."
    strength: Strength = "words"
    survived: bool = False
    "Whether the program continued after it."
    uncaught: bool = False
    "Whether it is an exception that ends the process: its traceback starts in the program's outermost frame."
    own: bool = False
    "Whether a pattern of the job or the profile (`failures:`) matched it."
    label: str = ""
    "The rank's name that a collector printed before the line."
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def memory_text(self) -> str:
        """The line and the lines after it, because libraries wrap the sizes of a failed allocation."""
        return "\n".join((self.text, *self.after))


def clue_of(record: object) -> Clue | None:
    """Return the clue in a JSON object; None if it is damaged."""
    if not isinstance(record, dict) or record.get("kind") not in CLASS_OF:
        return None
    fields = {name: value for name, value in record.items() if name in Clue._fields}
    fields |= {name: tuple(map(str, fields.get(name) or ())) for name in ("before", "after")}
    try:
        clue = Clue(**{"text": "", **fields})
        return clue._replace(line=int(clue.line), time=float(clue.time), text=str(clue.text))
    except (TypeError, ValueError):
        return None


def failure_patterns(about: RunRecord) -> list[tuple[str, Kind]]:
    """Return the patterns of the job, then those of the cluster."""
    rows = [*(about.job.failures or ()), *(about.cluster.failures or ())]
    return [(row.pattern, KIND_OF[row.class_]) for row in rows]
