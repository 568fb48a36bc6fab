"""Adapters: what they compute does not depend on the sharding, and equals peft over bitsandbytes' layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import measure

LORA = {"kind": "lora", "rank": 4}
QLORA = {"kind": "qlora", "rank": 4}
ALONE: list[dict[str, Any]] = [
    {"sharding": "none", "adapter": LORA},
    {"sharding": "none", "adapter": QLORA},
    {"sharding": "none", "adapter": QLORA, "precision": "bf16-mixed", "activations": "checkpoint"},
]
TOGETHER: list[dict[str, Any]] = [
    {"sharding": "fsdp", "adapter": LORA},
    {"sharding": "fsdp", "adapter": QLORA},
    {"sharding": "ddp", "adapter": QLORA},
    {"sharding": "fsdp-keep", "adapter": QLORA, "activations": "selective"},
    {"sharding": "fsdp", "adapter": QLORA, "precision": "bf16-mixed"},
    {"sharding": "fsdp", "adapter": QLORA, "offload": "cpu"},
    {"sharding": "fsdp", "adapter": QLORA, "precision": "bf16", "optimizer": "adamw-8bit"},
]


def found(folder: Path, cases: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    measure("adapters.py", folder, ranks=ranks)
    return json.loads((folder / "rank-0.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found(tmp_path_factory.mktemp("alone") / "one", ALONE, 1)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return found(tmp_path_factory.mktemp("together") / "two", TOGETHER, 2)


def test_the_losses_do_not_depend_on_the_sharding(
    alone: list[dict[str, Any]], together: list[dict[str, Any]]
) -> None:
    for case, one in zip(TOGETHER, together, strict=True):
        reference = alone[0 if case["adapter"] is LORA else 1]
        rel = 2e-6 if case.get("precision", "fp32") == "fp32" else 1e-2
        assert one["losses"] == pytest.approx(reference["losses"], rel=rel), case
    assert alone[0]["losses"] != alone[1]["losses"], "four bits are not lossless"
    assert alone[1]["losses"][-1] < alone[1]["losses"][0]


def test_a_checkpoint_holds_the_adapter_and_resumes_bit_for_bit(
    alone: list[dict[str, Any]], together: list[dict[str, Any]]
) -> None:
    for case, one in zip(ALONE + TOGETHER, alone + together, strict=True):
        assert one["resumed"] == one["losses"][5:], case


def test_the_frozen_weights_are_packed_and_cut(
    alone: list[dict[str, Any]], together: list[dict[str, Any]]
) -> None:
    assert together[1]["frozen"] < 0.55 * alone[1]["frozen"]
    assert together[0]["frozen"] < 0.55 * alone[0]["frozen"]
    assert alone[1]["trained"] == ["torch.float32"] and together[6]["trained"] == ["torch.bfloat16"]
