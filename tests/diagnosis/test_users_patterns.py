"""A user's own expressions: whatever they are, a log of any kind is read in bounded time."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from launcher.diagnosis.collector import Collector
from launcher.diagnosis.users_patterns import SECONDS, STRIKES
from launcher.spec.failure_patterns import FailurePattern

COSTLY = [r"(.*,){20}x", r"(?:x\w*){10}y", r"(a|a)*b", r"\s*\s*\s*\s*\s*\s*\s*x", r"(\w|_)*!"]
LINES = [b"a" * 3000, b"," * 3000, b" " * 3000, b"x" * 3000, b"x,a_ " * 600]


@pytest.mark.parametrize("expression", COSTLY)
def test_a_search_is_ended(expression: str) -> None:
    collector = Collector([(expression, "disk-full")])
    begun = time.process_time()
    for number in range(20):
        for line in LINES:
            collector.feed("err", line + b"\n", number + 1)
    assert time.process_time() - begun < STRIKES * SECONDS + 5
    assert collector.given_up in ([], [expression])


def test_one_that_took_too_long_is_given_up_and_the_others_are_not() -> None:
    collector = Collector([(r"(.*,){20}x", "desync"), (r"server is gone", "disk-full")])
    for _ in range(STRIKES):
        collector.feed("err", b"," * 3000 + b" x-ray\n", 1)
    collector.feed("err", b"the server is gone\n", 9)
    assert collector.given_up == [r"(.*,){20}x"]
    assert [clue.kind for clue in collector.clues()] == ["disk-full"]


@pytest.mark.parametrize("expression", COSTLY[:2])
def test_one_that_is_slow_on_a_plain_line_is_refused(expression: str) -> None:
    with pytest.raises(ValidationError, match="takes too long on some lines"):
        FailurePattern.model_validate({"pattern": expression, "class": "disk-full"})


@pytest.mark.parametrize(
    "expression", [r".*error.*", r"(?i)reward .* is gone", r"code \d+$", r"^license denied"]
)
def test_ordinary_ones_are_taken(expression: str) -> None:
    assert FailurePattern.model_validate({"pattern": expression, "class": "disk-full"}).pattern == expression


@pytest.mark.parametrize("head", [b"", b" Traceback (most recent call last):"], ids=["alone", "with a head"])
def test_a_line_is_the_jobs_own_wherever_a_traceback_begins(head: bytes) -> None:
    collector = Collector([(r"reward server is gone", "node-failed")])
    collector.feed("err", b"reward server is gone" + head + b"\n", 1)
    (clue,) = collector.clues()
    assert (clue.kind, clue.own, clue.text) == ("node-failed", True, "reward server is gone")
