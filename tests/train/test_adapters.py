"""Adapters: what they compute does not depend on the sharding, and equals peft over bitsandbytes' layers."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.spec.adapter import Adapter
from launcher.train.adapters.adapter import with_adapter
from launcher.train.task import TaskError
from tests.train.adapted import Encoder
from tests.train.runs import measure, recipe

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
    {"sharding": "fsdp", "adapter": QLORA, "precision": "bf16", "optimizer": "adamw-8bit"},
    {"sharding": "ddp", "adapter": QLORA},
    {"sharding": "fsdp-keep", "adapter": QLORA, "activations": "selective"},
    {"sharding": "fsdp", "adapter": QLORA, "precision": "bf16-mixed"},
    {"sharding": "fsdp", "adapter": QLORA, "offload": "cpu"},
]

ONE_PASS: dict[str, Any] = {"adapter": QLORA, "accumulation": 1, "unclipped": True}
"What `optimizer_step: backward` needs."
BACKWARD = {"optimizer_step": "backward"}
ON_HOST = {"offload": "cpu-optimizer"}
ALIKE: list[tuple[int, int, str, list[dict[str, Any]]]] = [
    (1, 1, "none", [{}, BACKWARD, ON_HOST]),
    (2, 2, "fsdp", [{}, BACKWARD, ON_HOST, {"offload": "cpu"}]),
    (2, 2, "ddp", [{}, ON_HOST]),
    (4, 2, "hybrid", [{}, BACKWARD, ON_HOST, {"offload": "cpu"}]),
]
"(ranks, ranks per node, sharding, what is the same bit for bit)"


@dataclass(frozen=True)
class Found:
    """Each case with what its training gave."""

    alone: list[tuple[dict[str, Any], dict[str, Any]]]
    together: list[tuple[dict[str, Any], dict[str, Any]]]


def trained(
    folder: Path, cases: list[dict[str, Any]], ranks: int, per_node: int | None = None
) -> list[tuple[dict[str, Any], Any]]:
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    measure("adapters.py", folder, ranks, per_node)
    return list(zip(cases, json.loads((folder / "rank-0.json").read_text()), strict=True))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 3), id="some"),
        pytest.param((len(ALONE), len(TOGETHER)), id="all", marks=pytest.mark.slow),
    ],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    alone, together = request.param
    folder = tmp_path_factory.mktemp("adapters")
    return Found(trained(folder / "one", ALONE[:alone], 1), trained(folder / "two", TOGETHER[:together], 2))


def test_layers_that_peft_takes_for_experts_are_refused() -> None:
    """It would train the experts instead, and not load an adapter of these layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_experts=4, moe_intermediate_size=24, mlp_only_layers=[0],
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    task = Encoder()
    task.adapter = Adapter(kind="lora")
    words = (
        r"takes down_proj, gate_proj, up_proj for weights of the experts.*\[k_proj, o_proj, q_proj, v_proj\]"
    )
    with pytest.raises(TaskError, match=words):
        with_adapter(copy.deepcopy(model), task, recipe("none"))
    task.adapter = Adapter(kind="lora", targets=("q_proj", "o_proj"))
    with_adapter(model, task, recipe("none"))


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_hook_that_an_adapter_would_bypass_is_refused(kind: str) -> None:
    for hooked, refused in (("kept", kind == "qlora"), ("up", True)):
        task = Encoder(keeps=True)
        task.adapter = Adapter.model_validate({"kind": kind, "targets": ["up"]})
        model: Any = task.model()
        getattr(model.blocks[1], hooked).register_forward_hook(lambda *_: None)
        wanted = (
            pytest.raises(TaskError, match=rf"blocks\.1\.{hooked}\S* has a hook")
            if refused
            else nullcontext()
        )
        with wanted:
            with_adapter(model, task, recipe("none"))


def test_the_losses_do_not_depend_on_the_sharding(found: Found) -> None:
    (_, lora), (_, qlora), *_ = found.alone
    for case, one in found.together:
        reference = lora if case["adapter"] is LORA else qlora
        rel = 2e-6 if case.get("precision", "fp32") == "fp32" else 1e-2
        assert one["losses"] == pytest.approx(reference["losses"], rel=rel), case
    assert lora["losses"] != qlora["losses"], "four bits are not lossless"
    assert qlora["losses"][-1] < qlora["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "per_node", "sharding", "recipes"), ALIKE, ids=lambda one: str(one)[:6])
def test_updates_in_the_backward_pass_or_on_the_host_are_the_same_bit_for_bit(
    ranks: int, per_node: int, sharding: str, recipes: list[dict[str, Any]], tmp_path: Path
) -> None:
    cases = [{"sharding": sharding, **ONE_PASS, **fields} for fields in recipes]
    found = trained(tmp_path / "runs", cases, ranks, per_node)
    (_, plain), *others = found
    for case, one in others:
        assert one["losses"] == plain["losses"], case
        assert one["resumed"] == one["losses"][5:], case


def test_a_checkpoint_holds_the_adapter_and_resumes_bit_for_bit(found: Found) -> None:
    for case, one in found.alone + found.together:
        assert one["resumed"] == one["losses"][5:], case


def test_the_frozen_weights_are_packed_and_cut(found: Found) -> None:
    for (_, whole), (_, part) in zip(found.alone[:2], found.together, strict=False):
        assert part["frozen"] < 0.55 * whole["frozen"]
    assert found.alone[1][1]["trained"] == ["torch.float32"]
    assert found.together[2][1]["trained"] == ["torch.bfloat16"]
