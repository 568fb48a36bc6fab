"""Judge a test of several ranks: times, wrong values or a hang, and which rank is to blame. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from launcher.doctor.rank_test import RankReport, RankTest

Kind = Literal["ok", "wrong", "error", "hang"]

STOPPED = frozenset("Tt")
"States of a stopped process in proc(5)."
SLOWER = 3.0
"A pair is slow if it takes this many times as long as a typical pair."

BUS: Mapping[str, Any] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "point-to-point": lambda n: 1.0,
}
"""Ratio of bus bandwidth to algorithm bandwidth with n ranks, as nccl-tests defines it (doc/PERFORMANCE.md).
The collectives are tested in this order."""


@dataclass(frozen=True)
class Outcome:
    """How a test ended."""

    kind: Kind
    at: str = ""
    "The step at which it hung or failed."
    ranks: tuple[int, ...] = ()
    "Global ranks to blame. Empty if they cannot be distinguished."
    waiting: tuple[int, ...] = ()
    "Ranks that hung because they waited for others."
    state: str = ""
    "State of the blamed process in proc(5); `T` means stopped."
    error: str = ""
    sizes: tuple[Mapping[str, Any], ...] = ()
    "For each size: `bytes`, `seconds` of the slowest rank and `bus`, the bus bandwidth in bytes/s."
    each: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    "What each rank measured by itself, in a test without collectives."

    @property
    def ok(self) -> bool:
        return self.kind == "ok"


def outcome(test: RankTest, reports: Iterable[RankReport]) -> Outcome:
    """Judge the reports of all ranks of a test. A rank without a report was not started."""
    by_rank = {report.rank: report for report in reports}
    silent = tuple(rank for rank in test.ranks if rank not in by_rank)
    if silent:
        return Outcome("hang", "start", silent, tuple(by_rank), error="the rank was not started")
    late = [report for report in by_rank.values() if not report.ended]
    failed = [report for report in by_rank.values() if report.error]
    if dead := [report for report in failed if report.error.startswith("ended by ")]:
        return Outcome("error", dead[0].at, tuple(report.rank for report in dead), error=dead[0].error)
    if late:
        return _hang(list(by_rank.values()), late, failed)
    if failed:
        # If all ranks fail alike, none of them is to blame.
        blamed = tuple(report.rank for report in failed) if len(failed) < len(by_rank) else ()
        return Outcome("error", failed[0].at, blamed, error=failed[0].error)
    sizes = _sizes(test, by_rank)
    if test.what == "compute":
        each = {rank: report.results[-1] for rank, report in by_rank.items() if report.results}
        bad = tuple(rank for rank, result in each.items() if result["wrong"])
        return Outcome("wrong" if bad else "ok", "matrix product and memory sweep", bad, each=each)
    pairs = [
        (rank, None if source is None else test.ranks[source])
        for rank, report in by_rank.items()
        for result in report.results
        for source in result["wrong"]
    ]
    if pairs:
        return Outcome("wrong", test.options.get("name", test.what), culprits(pairs, test.ranks), sizes=sizes)
    return Outcome("ok", sizes=sizes)


def _hang(
    everyone: Sequence[RankReport], late: Sequence[RankReport], failed: Sequence[RankReport]
) -> Outcome:
    """Blame the ranks that are stopped, or else those that failed, or else those furthest behind."""
    stopped = [report for report in late if report.state in STOPPED]
    least = min(report.done for report in everyone)
    behind = [report for report in everyone if report.done == least]
    blamed = stopped or failed or (behind if len(behind) < len(everyone) else [])
    ranks = tuple(report.rank for report in blamed)
    waiting = tuple(report.rank for report in late if report.rank not in ranks)
    furthest = max(late, key=lambda report: report.done)
    state = blamed[0].state if blamed else ""
    return Outcome("hang", furthest.at, ranks, waiting, state, blamed[0].error if blamed else "")


def _sizes(test: RankTest, by_rank: Mapping[int, RankReport]) -> tuple[Mapping[str, Any], ...]:
    """Return the times for each size. The slowest rank's time counts, as in nccl-tests."""
    sizes = []
    for results in zip(*(result.results for result in by_rank.values()), strict=False):
        if "bytes" not in results[0]:  # not a collective
            continue
        seconds, size = max(result["seconds"] for result in results), results[0]["bytes"]
        # For point-to-point, `bytes` is what one rank sends; for the other operations, the whole message.
        factor = BUS[results[0]["name"]](len(test.ranks))
        sizes.append({"bytes": size, "seconds": seconds, "bus": size / seconds * factor})
    return tuple(sizes)


def culprits(pairs: Iterable[tuple[int, int | None]], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that explain all wrong values, either as their sender or as their receiver.

    Each of `pairs` is (rank that got wrong values, rank that sent them); the sender is None for a sum over
    all ranks. If every rank got a wrong sum, the rank that caused it is unknown.
    """
    wrong_pairs = list(pairs)
    if all(source is None for _, source in wrong_pairs) and len({got for got, _ in wrong_pairs}) == len(
        ranks
    ):
        return ()
    explains = [rank for rank in ranks if all(rank in pair for pair in wrong_pairs)]
    return tuple(explains) if len(explains) < len(ranks) or len(ranks) <= 2 else ()


@dataclass(frozen=True)
class Pairs:
    """The combined result of tests of pairs of ranks."""

    bad: tuple[tuple[int, int], ...]
    "Pairs that hang, fail, get wrong values, or are slow."
    good: int
    culprits: tuple[int, ...]
    "Ranks whose pairs are all bad, if they explain all bad pairs."
    slow: bool
    "Whether slow pairs count as bad."
    slowest: tuple[int, int] | None
    seconds: float
    "Time of the slowest pair."
    typical: float
    "Time of a good pair."


def pairs_of(outcomes: Mapping[tuple[int, int], Outcome], per_node: int = 1, *, slow: bool = False) -> Pairs:
    """Find the ranks, or else the pairs, that are to blame. With `slow`, slow pairs count as bad.

    Pairs within a node are compared with each other, and so are pairs across nodes.
    """

    def within_node(pair: tuple[int, int]) -> bool:
        return pair[0] // per_node == pair[1] // per_node

    times = {pair: ended.sizes[-1]["seconds"] for pair, ended in outcomes.items() if ended.ok and ended.sizes}
    alike: dict[bool, list[float]] = {}
    for pair, seconds in sorted(times.items(), key=lambda item: item[1]):
        alike.setdefault(within_node(pair), []).append(seconds)
    # The 25th percentile, because one sick rank of three is in two of the three pairs.
    typical = {within: ascending[len(ascending) // 4] for within, ascending in alike.items()}
    bad = tuple(
        pair
        for pair, ended in outcomes.items()
        if not ended.ok or (slow and pair in times and times[pair] > SLOWER * typical[within_node(pair)])
    )
    slowest = max(times, key=times.__getitem__, default=None)
    return Pairs(
        bad, len(outcomes) - len(bad), common(bad, outcomes), slow,
        slowest, times[slowest] if slowest else 0.0, min(typical.values(), default=0.0),
    )  # fmt: skip


def common(bad: Sequence[tuple[int, int]], all_pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the ranks (or nodes) whose pairs are all bad, if they explain every bad pair.

    The result is empty if they do not, or if all ranks are bad.
    """
    pairs = list(all_pairs)
    pairs_per_rank = Counter(rank for pair in pairs for rank in pair)
    bad_per_rank = Counter(rank for pair in bad for rank in pair)
    sick = tuple(sorted(rank for rank in bad_per_rank if bad_per_rank[rank] == pairs_per_rank[rank]))
    explained = all(set(pair) & set(sick) for pair in bad)
    return sick if sick and explained and len(sick) < len(pairs_per_rank) else ()


def pair_rounds(nodes: int, per_node: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of ranks to test, in rounds of pairs that are tested at the same time.

    These are all pairs, or above 16 ranks those within a node and those of the first rank of each node.
    """
    ranks = range(nodes * per_node)
    if len(ranks) <= 16:
        return rounds(ranks)
    within_nodes = [rounds(ranks[first : first + per_node]) for first in ranks[::per_node]]
    at_once = [[*chain.from_iterable(of_nodes)] for of_nodes in zip(*within_nodes, strict=True)]
    return [pairs for pairs in [*rounds(ranks[::per_node]), *at_once] if pairs]


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return all pairs, in rounds in which each member appears at most once (a round-robin tournament).

    Above 16 members, keep only rounds whose number is a power of two: each member then meets log2(n) others.
    """
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds_ = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds_.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    if len(members) > 16:
        return [one for number, one in enumerate(rounds_, start=1) if not number & (number - 1)]
    return rounds_
