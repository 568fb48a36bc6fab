"""Checks of a tiny model that the built-in entrypoint trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.doctor.checks.collectives import WORDS, ranks
from launcher.doctor.checks.row import Check
from launcher.doctor.values import Expected, Measured, Opinion

DIFFERENCE = 1e-3
"Relative. Sums in another order differ by less than a thousandth of this in fp32."


def trained(measured: Measured, expected: Expected) -> Opinion:
    value = measured.value
    wanted = "trains" if measured.check == "model-alone" else f"differs below {DIFFERENCE:g}"
    if value["kind"] != "ok":
        why = value["exception"] or value["error"]
        who = ranks(value["ranks"], expected)
        cause = f"The tiny model {WORDS[value['kind']]}{f': {why}' if why else ''}".rstrip(".") + "."
        cause += f" The first to blame is {who}." if who else ""
        return Opinion("broken", wanted, cause, "It is the cluster and not your job: see the checks above.")
    if measured.check == "model-alone" or ((value["difference"] or 0) <= DIFFERENCE and value["steps"]):
        return Opinion("good", wanted)
    return Opinion(
        "broken",
        wanted,
        "Loss or gradients differ from those of one process with the same batch: values get lost or changed.",
        "See the collectives above. If they are good, have the GPUs' memory checked.",
    )


def _show(value: Mapping[str, Any]) -> str:
    if value["kind"] != "ok":
        return WORDS[value["kind"]]
    if value["difference"] is None:
        return f"{len(value['steps'])} steps"
    return f"differs by {value['difference']:.1e}"


ROWS = tuple(
    Check(name, title, "model", trained, _show, of_node=False)
    for name, title in (("model-alone", "one process"), ("model-ddp", "DDP"), ("model-fsdp", "FSDP2"))
)
