"""A row of the table of checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from launcher.doctor.values import Expected, Measured, Opinion, Part, Verdict


def good(_measured: Measured, _expected: Expected) -> Opinion:
    """Return a good opinion, for values that only inform."""
    return Opinion("good")


def must_be(wanted: object, otherwise: Opinion) -> Callable[[Measured, Expected], Opinion]:
    """Return a judge of a value that must equal `wanted`."""

    def judge(measured: Measured, _expected: Expected) -> Opinion:
        return Opinion("good", otherwise.expected) if measured.value == wanted else otherwise

    return judge


ONE_KIND = "Ask for nodes of one kind (a partition or constraint), or write a profile for each kind."
"Cure if the nodes' hardware differs."


class Check(NamedTuple):
    """A kind of measured value."""

    name: str
    title: str
    "Title on the page."
    part: Part
    judge: Callable[[Measured, Expected], Opinion] = good
    "Judges a value that could be measured."
    show: Callable[[Any], str] = str
    "Formats the value as text."
    of_node: bool = True
    "Whether the value belongs to one node, not to a connection between nodes or to several ranks."
    alike: Verdict = "good"
    "Verdict if the nodes have different values."
    alike_cure: str = "Install the same environment on all nodes, or leave the other nodes out."
    "Cure if the nodes have different values."
    unmeasured: Opinion = Opinion("poor", "", "It could not be measured.")
    "Opinion if the value could not be measured. The error is appended to its cause."
    fixed: bool = False
    "Whether the value cannot change during a run, so that it did not end a run that has already trained."
