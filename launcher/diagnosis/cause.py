"""Choose the cause among all clues. The cause is the clue that explains the others, wherever its line is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from launcher.diagnosis.clue import CLASS_OF, MEMORY_OF, Clue, Kind, order_of
from launcher.diagnosis.collector import Collector, pattern_of
from launcher.diagnosis.lines import unwrapped

if TYPE_CHECKING:
    from launcher.spec.verdict import Confidence, FailureClass


class Candidate(NamedTuple):
    """A clue that may be the cause."""

    clue: Clue
    rank: int | None = None
    "The rank that printed it; None if that is not known, e.g. in a file of several ranks."
    node: int | None = None
    reason: str = ""
    "A sentence for the user. Empty if the failure class says enough."
    evidence: tuple[str, ...] = ()
    "The files and numbers that show it."


class Cause(NamedTuple):
    failure: FailureClass
    confidence: Confidence
    candidate: Candidate
    others: tuple[tuple[Candidate, str], ...]
    """Other candidates, each with the reason why it is not the cause; those that explain most come first.
    Reports of the same cause by other ranks are excluded."""


def cause_of(
    candidates: Iterable[Candidate], recorded: FailureClass | None = None, rank: int | None = None
) -> Cause | None:
    """Return the cause; None if there is no candidate.

    Failures that the program survived, and mere warnings, count only if there is nothing else. Among the
    rest, a clue that explains others comes first, then one of a known rank, then the earliest. If `rank`
    itself recorded that it failed with `recorded`, the cause is the line of its output that says the same, or
    None.
    """
    ranked = sorted(candidates, key=_sort_key)
    if recorded is not None:
        same = [c for c in ranked if c.rank == rank and CLASS_OF[c.clue.kind] == recorded]
        ranked = [*same[:1], *(c for c in ranked if c is not same[0])] if same else []
    if not ranked:
        return None
    first = ranked[0]
    others = tuple((c, _why_not(c, first)) for c in ranked[1:] if not _repeats(c.clue, first.clue))
    failure = CLASS_OF[first.clue.kind]
    if _doubtful(first.clue):
        # Nothing explains the end, so a survived failure or a consequence is only the best guess.
        failure = "unknown" if first.clue.survived or first.clue.kind == "consequence" else failure
        return Cause(failure, "guess", first, others)
    return Cause(failure, "certain" if first.clue.strength == "record" else "likely", first, others)


_REASON = re.compile(r"\nLast error:\n(.*)|Traceback \(most recent call last\):.*\n(?:[ \t].*\n)*(.*)")
"NCCL's reason for its exception, and the exception of a traceback of other ranks or processes."


def clue_of_exception(text: str) -> Clue:
    """Return the clue in an exception's `Type: message`, as recorded by the program.

    After the first line, where libraries quote a lot, only messages about memory and those of _REASON count.
    """
    first, *rest = text.splitlines() or [""]
    pattern = pattern_of(first)
    below = (
        other
        for line in rest
        if (other := pattern_of(line)) is not None and other.kind in MEMORY_OF and not other.weak
    )
    if pattern is None or pattern.kind not in MEMORY_OF:
        said = (pattern_of("".join(groups)) for groups in _REASON.findall(text))
        reasons = [reason for reason in said if reason is not None and not reason.weak]
        pattern = next(below, min(reasons, key=lambda reason: order_of(reason.kind), default=pattern))
    kind = pattern.kind if pattern is not None else "exception"
    likely = pattern is not None and pattern.weak and kind in MEMORY_OF
    return Clue(kind, text, strength="words" if likely else "record")


def clues_of_text(lines: Iterable[bytes], extra: Sequence[tuple[str, Kind]] = ()) -> list[Clue]:
    """Return the clues of a whole log. The labels that a collector printed distinguish its ranks."""
    collector = Collector(extra)
    for number, line in enumerate(lines, 1):
        for inner in unwrapped(line.rstrip(b"\r\n")):
            collector.feed("", inner + b"\n", number)
    return collector.clues()


def _doubtful(clue: Clue) -> bool:
    return clue.survived or clue.strength == "weak" or clue.kind == "consequence"


def _sort_key(candidate: Candidate) -> tuple[int, int, bool, float, int]:
    clue = candidate.clue
    nameless = candidate.rank is None and bool(clue.line)  # torchrun repeats what a rank has printed
    level = 3 if clue.survived else 2 if clue.kind == "consequence" else 1 if _doubtful(clue) else 0
    return level, order_of(clue.kind), nameless, clue.time, clue.line


_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+:)")
_NUMBER = re.compile(r"\d+")


def _repeats(other: Clue, cause: Clue) -> bool:
    """Return whether `other` reports the same as `cause`: its text differs only in numbers, such as ranks."""
    if order_of(other.kind) != order_of(cause.kind) or other.survived != cause.survived:
        return False
    first, second = (_NUMBER.sub("0", _MODULE.sub("", clue.text))[:COMPARED] for clue in (other, cause))
    return first == second


COMPARED = 500
"Number of characters of two texts that are compared. Either text may have been cut."


def label_of(why: str) -> str:
    """Return the word that introduces one of `Cause.others` to a reader."""
    return "follows" if why.startswith(_FOLLOWS) else "also"


def other_sentence(failure: str, why: str) -> str:
    """Return the class of one of `Cause.others`, if it has one, and why it is not the cause."""
    return why.removeprefix("follows ") if failure == "unknown" else f"{failure}, {why}"


_FOLLOWS = ("follows from", "explained by")


def _why_not(other: Candidate, cause: Candidate) -> str:
    if other.clue.survived:
        return "the program went on after it"
    if other.clue.kind == "consequence":
        return "follows from another failure"
    if other.clue.strength == "weak":
        return "only a warning"
    if order_of(other.clue.kind) == order_of(cause.clue.kind):
        return "came later"
    return f"explained by {CLASS_OF[cause.clue.kind]}"
