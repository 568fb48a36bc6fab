"""Recorded messages of many libraries: which memory ran out, and the sizes they tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from launcher.diagnosis.memory import out_of_memory
from launcher.spec.quantities import parse_bytes

RECORDED: list[dict[str, Any]] = YAML(typ="safe").load(Path(__file__).with_name("out_of_memory.yaml"))


@pytest.mark.parametrize("message", RECORDED, ids=lambda message: message["source"])
def test_a_recorded_message_is_what_it_was_found_to_be(message: dict[str, Any]) -> None:
    found = out_of_memory(message["text"])
    if message["kind"] is None:
        assert found is None
        return
    assert found is not None and found.kind == message["kind"]
    for name in ("requested", "total", "free"):
        expected = parse_bytes(message[name]) if name in message else None
        assert getattr(found, name) == expected, name
