"""Turn the orders of node 0 and the answers of all nodes into measured values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from launcher.doctor.outcome import Outcome, outcome, pairs_of
from launcher.doctor.rank_test import RankTest, Told
from launcher.doctor.values import Measured

Order = Mapping[str, Any]
Answers = Mapping[int, Mapping[str, Any]]
"What each node answered, by node."

TESTS = "tests"
"What an order with tests of ranks says that the nodes do."
PAIRS = "pairs"
"The check of the orders that test pairs of ranks. There is one for each round."


def values_of(history: Iterable[tuple[Order, Answers]]) -> list[Measured]:
    """Return every measured value: those that nodes measured by themselves, and those of tests of ranks."""
    found: list[Measured] = []
    pairs: dict[tuple[int, int], Outcome] = {}
    slow, per_node = False, 1
    for order, answers in history:
        found += [Measured(**value) for answer in answers.values() for value in answer.get("values", ())]
        if order.get("do") != TESTS:
            continue
        ended = outcomes(order, answers)
        if order["check"] == PAIRS:
            slow, per_node = order["slow"], order["per_node"]
            pairs |= {
                (one.ranks[0], one.ranks[1]): end for one, end in zip(tests_of(order), ended, strict=True)
            }
        else:
            found += [Measured(order["check"], 0, plain(one), order.get("subject", "")) for one in ended]
    return [*found, *([_pairs(pairs, slow, per_node)] if pairs else [])]


def outcomes(order: Order, answers: Answers) -> list[Outcome]:
    """Return the outcome of each test of an order."""
    return [
        outcome(test, [Told(**one) for answer in answers.values() for one in _told(answer, number)])
        for number, test in enumerate(tests_of(order))
    ]


def tests_of(order: Order) -> list[RankTest]:
    """Return the tests of an order."""
    return [RankTest(**{**test, "ranks": tuple(test["ranks"])}) for test in order["tests"]]


def _told(answer: Mapping[str, Any], number: int) -> Sequence[Mapping[str, Any]]:
    told: Sequence[Sequence[Mapping[str, Any]]] = answer.get("told", ())
    return told[number] if number < len(told) else ()


def plain(one: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON reads it back."""
    lists = {"ranks": list(one.ranks), "waiting": list(one.waiting), "sizes": list(one.sizes)}
    return {**asdict(one), **lists}


def _pairs(by_pair: Mapping[tuple[int, int], Outcome], slow: bool, per_node: int) -> Measured:
    found = pairs_of(by_pair, per_node, slow=slow)
    value = {
        "bad": [list(pair) for pair in found.bad],
        "good": found.good,
        "culprits": list(found.culprits),
        "slow": slow,
        "slowest": list(found.slowest) if found.slowest else None,
        "seconds": found.seconds,
        "typical": found.typical,
    }
    return Measured(PAIRS, 0, value)
