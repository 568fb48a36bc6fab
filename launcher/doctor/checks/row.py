"""A row of the table of checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from launcher.doctor.values import Expected, Measured, Opinion, Part, Verdict


def good(_measured: Measured, _expected: Expected) -> Opinion:
    """The value only informs."""
    return Opinion("good")


ONE_KIND = "Ask for nodes of one kind (a partition or constraint), or write a profile for each kind."
"Cure if the nodes' hardware differs."


class Check(NamedTuple):
    """A kind of measured value."""

    name: str
    title: str
    "As the page shows it."
    part: Part
    judge: Callable[[Measured, Expected], Opinion] = good
    "Called for values that could be measured."
    show: Callable[[Any], str] = str
    "The value as text."
    of_node: bool = True
    "Whether it is a value of one node, and not of a way between nodes or of ranks together."
    alike: Verdict = "good"
    "Verdict if the value is not the same on all nodes."
    alike_cure: str = "Install the same environment on all nodes, or leave the other nodes out."
    "What to do if it is not."
    unmeasured: Opinion = Opinion("poor", "", "It could not be measured.")
    "Opinion if the value could not be measured. Its cause is followed by the error."
    fixed: bool = False
    "Whether a node has the same value as long as a run lasts, so that a run that trained can live with it."
