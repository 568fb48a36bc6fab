"""Turn the orders of node 0 and the answers of all nodes into measured values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from launcher.doctor.order_files import TESTS, TRAIN
from launcher.doctor.outcome import Outcome, outcome, pairs_of
from launcher.doctor.rank_test import RankReport, RankTest
from launcher.doctor.values import Measured

Order = Mapping[str, Any]
Answers = Mapping[int, Mapping[str, Any]]
"What each node answered, by node."

Steps = Sequence[Mapping[str, float]]
"Loss and gradient norm of each step of the tiny model."

TRAININGS = {"model-alone": "none", "model-ddp": "ddp", "model-fsdp": "fsdp"}
"The checks of the order TRAIN with the sharding of each training. The first runs in one process."
PAIRS = "pairs"
"The check of orders that test pairs of ranks. There is one such order per round."


def values_of(history: Sequence[tuple[Order, Answers]], nodes: int = 1) -> list[Measured]:
    """Return every measured value: those that nodes measured by themselves, and those of tests of ranks.

    The last test counts only if all nodes have answered. Otherwise it is still running, or was cut off.
    """
    values: list[Measured] = []
    pairs: dict[tuple[int, int], Outcome] = {}
    slow, per_node = False, 1
    for number, (order, answers) in enumerate(history, 1):
        values += [Measured(**value) for value in order.get("values", ())]
        values += [Measured(**value) for answer in answers.values() for value in answer.get("values", ())]
        if number == len(history) and len(answers) < nodes:
            continue
        if order.get("do") == TRAIN:
            values += _trained(order, answers)
        if order.get("do") != TESTS:
            continue
        ended = outcomes(order, answers)
        if order["check"] == PAIRS:
            slow, per_node = order["slow"], order["per_node"]
            tests = tests_of(order)
            pairs |= {(test.ranks[0], test.ranks[1]): end for test, end in zip(tests, ended, strict=True)}
        else:
            checks, subjects = (_each(order.get(word, ""), len(ended)) for word in ("check", "subject"))
            values += [
                Measured(check, 0, asdict(end), subject)
                for check, subject, end in zip(checks, subjects, ended, strict=True)
            ]
    combined = [Measured(PAIRS, 0, asdict(pairs_of(pairs, per_node, slow=slow)))] if pairs else []
    return [*values, *combined]


def _each(words: str | Sequence[str], count: int) -> Sequence[str]:
    """Return one text for each test of an order. A single text applies to all tests."""
    return [words] * count if isinstance(words, str) else words


def _trained(order: Order, answers: Answers) -> list[Measured]:
    """Return how the tiny model trained in one process, and in several processes compared with one."""
    values = []
    all_steps: Sequence[Steps] = answers.get(0, {}).get("steps") or [[] for _ in TRAININGS]
    for number, (check, end) in enumerate(zip(TRAININGS, outcomes(order, answers), strict=True)):
        steps, exceptions = all_steps[number], [answer.get("exceptions", ()) for answer in answers.values()]
        exception = next((texts[number] for texts in exceptions if texts and texts[number]), "")
        difference = _difference(steps, all_steps[0]) if number and all_steps[0] else None
        value = {**asdict(end), "steps": steps, "exception": exception, "difference": difference}
        values.append(Measured(check, 0, value))
    return values


def _difference(steps: Steps, alone: Steps) -> float | None:
    """Return the largest relative difference of loss or gradient norm; None if steps are missing."""
    if len(steps) != len(alone):
        return None
    pairs = [(one[name], other[name]) for one, other in zip(steps, alone, strict=True) for name in other]
    if any(one is None or other is None for one, other in pairs):
        return None
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)


def outcomes(order: Order, answers: Answers) -> list[Outcome]:
    """Return the outcome of each test of an order."""
    failed = next((answer["error"] for answer in answers.values() if answer.get("error")), "")
    outcomes_ = []
    for number, test in enumerate(tests_of(order)):
        reports = [RankReport(**fields) for answer in answers.values() for fields in _reports(answer, number)]
        judged = outcome(test, reports)
        outcomes_.append(replace(judged, error=failed) if judged.kind == "hang" and failed else judged)
    return outcomes_


def tests_of(order: Order) -> list[RankTest]:
    """Return the tests of an order."""
    return [RankTest(**{**test, "ranks": tuple(test["ranks"])}) for test in order["tests"]]


def _reports(answer: Mapping[str, Any], number: int) -> Sequence[Mapping[str, Any]]:
    reports: Sequence[Sequence[Mapping[str, Any]]] = answer.get("told", ())
    return reports[number] if number < len(reports) else ()
