"""Choose the cause among all clues. The cause is what explains the other clues, wherever its line is."""

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
    found: Candidate
    others: tuple[tuple[Candidate, str], ...]
    """Other candidates, each with the reason why it is not the cause; those that explain most come first.
    What other ranks report of the same cause is not among them."""


def cause_of(
    candidates: Iterable[Candidate], known: FailureClass | None = None, rank: int | None = None
) -> Cause | None:
    """Return the cause; None if there is no candidate.

    Failures that a program survived, and mere warnings, count only if there is nothing else. Of the rest,
    what explains the others comes first; among equals, what a known rank said, then the earliest. If `rank`
    itself recorded that it failed with `known`, the cause is the line of its output that says the same, or
    None.
    """
    ranked = sorted(candidates, key=_rank)
    if known is not None:
        same = [one for one in ranked if one.rank == rank and CLASS_OF[one.clue.kind] == known]
        ranked = [*same[:1], *(one for one in ranked if one is not same[0])] if same else []
    if not ranked:
        return None
    first = ranked[0]
    others = tuple((one, _why_not(one, first)) for one in ranked[1:] if not _same(one.clue, first.clue))
    failure = CLASS_OF[first.clue.kind]
    if _doubtful(first.clue):
        # Nothing explains the end, so a survived failure or a consequence is only the best guess.
        failure = "unknown" if first.clue.survived or first.clue.kind == "consequence" else failure
        return Cause(failure, "guess", first, others)
    return Cause(failure, "certain" if first.clue.strength == "record" else "likely", first, others)


def clue_of_exception(text: str) -> Clue:
    """Return the clue in an exception's `Type: message`, as recorded by the program.

    After the first line only memory counts, because libraries quote a lot in the others.
    """
    first, *rest = text.splitlines() or [""]
    pattern = pattern_of(first)
    below = (
        one
        for line in rest
        if (one := pattern_of(line)) is not None and one.kind in MEMORY_OF and not one.weak
    )
    found = pattern if pattern is not None and pattern.kind in MEMORY_OF else next(below, pattern)
    kind = found.kind if found is not None else "exception"
    likely = found is not None and found.weak and kind in MEMORY_OF
    return Clue(kind, text, strength="words" if likely else "record")


def clues_of_text(lines: Iterable[bytes], extra: Sequence[tuple[str, Kind]] = ()) -> list[Clue]:
    """Return the clues of a whole log. The labels that a collector printed distinguish its ranks."""
    collector = Collector(extra)
    for number, line in enumerate(lines, 1):
        for one in unwrapped(line.rstrip(b"\r\n")):
            collector.feed("", one + b"\n", number)
    return collector.clues()


def _doubtful(clue: Clue) -> bool:
    return clue.survived or clue.strength == "weak" or clue.kind == "consequence"


def _rank(one: Candidate) -> tuple[int, int, bool, float, int]:
    clue = one.clue
    nameless = one.rank is None and bool(clue.line)  # torchrun repeats what a rank has printed
    level = 3 if clue.survived else 2 if clue.kind == "consequence" else 1 if _doubtful(clue) else 0
    return level, order_of(clue.kind), nameless, clue.time, clue.line


_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+:)")
_NUMBER = re.compile(r"\d+")


def _same(one: Clue, cause: Clue) -> bool:
    """Return whether both report the same: words that differ only in numbers, such as those of ranks."""
    if order_of(one.kind) != order_of(cause.kind) or one.survived != cause.survived:
        return False
    first, other = (_NUMBER.sub("0", _MODULE.sub("", clue.text))[:COMPARED] for clue in (one, cause))
    return first == other


COMPARED = 500
"Characters of two texts that are compared: one may have been cut."


def label_of(why: str) -> str:
    """Return the word that introduces one of `Cause.others` to a reader."""
    return "follows" if why.startswith(_FOLLOWS) else "also"


def other_sentence(failure: str, why: str) -> str:
    """Return the class of one of `Cause.others`, if it has one, and why it is not the cause."""
    return why.removeprefix("follows ") if failure == "unknown" else f"{failure}, {why}"


_FOLLOWS = ("follows from", "explained by")


def _why_not(one: Candidate, cause: Candidate) -> str:
    if one.clue.survived:
        return "the program went on after it"
    if one.clue.kind == "consequence":
        return "follows from another failure"
    if one.clue.strength == "weak":
        return "only a warning"
    if order_of(one.clue.kind) == order_of(cause.clue.kind):
        return "came later"
    return f"explained by {CLASS_OF[cause.clue.kind]}"
