from __future__ import annotations

import itertools

import pytest

from launcher.spec.recipe import Recipe
from launcher.spec.rules import RULES, Setting, broken_rules, nearest_valid

GPUS = Setting(ranks=8, nodes=1, gpus_per_node=8)
TASK = Setting(ranks=8, nodes=1, gpus_per_node=8, entrypoint=True)
GOOD = Recipe(precision="bf16-mixed", optimizer="adamw", sharding="fsdp", micro_batch_size=4, grad_accum=2)


def names(recipe: Recipe, setting: Setting = GPUS) -> list[str]:
    return [broken.rule.name for broken in broken_rules(recipe, setting)]


def test_a_usual_recipe_breaks_nothing():
    assert names(GOOD) == []


@pytest.mark.parametrize(
    ("change", "setting", "rule"),
    [
        ({"grad_scaler": True}, GPUS, "scaler-needs-fp16"),
        ({"precision": "fp16-mixed"}, GPUS, "fp16-needs-scaler"),
        ({"optimizer": "adamw-8bit"}, GPUS, "bitsandbytes-no-dtensor"),
        ({"sharding": "none"}, GPUS, "ranks-need-sharding"),
        ({"sharding": "hybrid"}, GPUS, "hybrid-needs-nodes"),
        ({"sharding": "ddp", "offload": "cpu"}, GPUS, "cpu-offload-needs-fsdp"),
        ({"micro_batch_size": 1}, Setting(8, 1, 8, batch_norm=True), "batch-norm-needs-two"),
        ({"offload": "cpu"}, Setting(2, 1, 0), "offload-needs-gpu"),
        ({"precision": "float8"}, Setting(2, 1, 0), "float8-needs-gpu"),
    ],
)
def test_a_broken_rule_explains_itself_and_names_the_nearest_valid_recipe(change, setting, rule):
    recipe = GOOD.model_copy(update=change)
    (broken,) = broken_rules(recipe, setting)
    assert broken.rule.name == rule
    assert broken.rule.reason in str(broken) and broken.rule.source in str(broken)
    valid = nearest_valid(recipe, setting)
    assert valid is not None and names(valid, setting) == []


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "paged-adamw-8bit", "lion-8bit"])
def test_the_built_in_entrypoint_runs_8_bit_optimizers_on_shards_and_a_foreign_command_does_not(optimizer):
    recipe = GOOD.model_copy(update={"optimizer": optimizer})
    assert names(recipe, TASK) == []
    assert names(recipe, GPUS) == ["bitsandbytes-no-dtensor"]


def test_batch_norm_with_an_odd_accumulation_has_no_nearest_recipe():
    recipe = GOOD.model_copy(update={"micro_batch_size": 1, "grad_accum": 3})
    assert nearest_valid(recipe, Setting(8, 1, 8, batch_norm=True)) is None


def test_every_rule_gives_a_reason_a_source_and_ends_in_a_valid_recipe_or_none():
    fields = {
        "precision": ["fp32", "bf16", "bf16-mixed", "fp16-mixed", "float8"],
        "optimizer": ["adamw", "adamw-8bit", "paged-adamw-8bit", "lion-8bit"],
        "sharding": ["none", "ddp", "fsdp", "hybrid"],
        "offload": ["none", "cpu"],
        "activations": ["keep", "offload"],
        "grad_scaler": [False, True],
    }
    settings = [GPUS, TASK, Setting(1, 1, 1), Setting(2, 1, 0), Setting(16, 2, 8, batch_norm=True)]
    seen = set()
    for values in itertools.product(*fields.values()):
        recipe = GOOD.model_copy(update=dict(zip(fields, values, strict=True)))
        for setting in settings:
            seen |= set(names(recipe, setting))
            valid = nearest_valid(recipe, setting)
            assert valid is not None and names(valid, setting) == []
            assert valid.micro_batch_size * valid.grad_accum == 8
    assert seen | {"batch-norm-needs-two"} == {rule.name for rule in RULES}
