"""Results of the search over settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.doctor.checks.collectives import WORDS, rate
from launcher.doctor.checks.row import Check
from launcher.doctor.values import Expected, Measured, Opinion


def setting(measured: Measured, expected: Expected) -> Opinion:
    if measured.value["kind"] == "ok":
        return Opinion("good")
    error = measured.value["error"]
    return Opinion("poor", "", f"It does not help{f': {error}' if error else ''}".rstrip(".") + ".")


def chosen(measured: Measured, expected: Expected) -> Opinion:
    value = measured.value
    if value["env"] is None:
        return Opinion(
            "poor",
            "a setting that helps",
            "No setting makes the collectives work.",
            "The fault is not in the settings: see the checks of the nodes and of the network.",
        )
    if value["env"] == {}:
        return Opinion("good", "")
    cause = f"{value['explains']} {value['before']} without it, {value['after']} with it."
    cure = "`launcher doctor --show RUN --write` writes it to network.env of the profile."
    return Opinion("poor", "no setting", cause, cure)


def _setting(value: Mapping[str, Any]) -> str:
    speed = f", {rate(value['sizes'][-1]['bus'])}" if value["kind"] == "ok" and value["sizes"] else ""
    return f"{WORDS[value['kind']]}{speed}"


def _chosen(value: Mapping[str, Any]) -> str:
    if value["env"] is None:
        return "none helps"
    return " ".join(f"{name}={value_}" for name, value_ in value["env"].items()) or "none is better"


ROWS = (
    Check("setting", "tried", "search", setting, _setting, of_node=False),
    Check("chosen", "setting for network.env", "search", chosen, _chosen, of_node=False),
)
