from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest

from launcher.spec.recipe import (
    Activations,
    EmbeddingStates,
    GradSync,
    Offload,
    OptimizerStep,
    Precision,
    Recipe,
    RecipeChoice,
    Schedule,
    Sharding,
)
from launcher.spec.recipe_rules import RULES, Setting, broken_rules, nearest_valid
from launcher.spec.unsupported_recipes import WHY_NOT, unsupported

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
        (
            {"sharding": "hybrid", "pipeline": 2},
            Setting(8, 2, 4, entrypoint=True),
            "hybrid-needs-nodes",
        ),
        ({"pipeline": 3}, TASK, "mesh-divides-ranks"),
        ({"tensor": 4}, Setting(8, 4, 2, entrypoint=True), "tensor-within-node"),
        ({"tensor": 2}, GPUS, "mesh-needs-entrypoint"),
        ({"pipeline": 2, "stages": (3, 4, 5)}, TASK, "stages-are-pipeline"),
        ({"pipeline": 2, "virtual_stages": 2, "stages": (3, 4)}, TASK, "stages-are-pipeline"),
        ({"virtual_stages": 2}, TASK, "stages-need-pipeline"),
        ({"schedule": "zero-bubble"}, TASK, "stages-need-pipeline"),
        ({"stages": (4,)}, TASK, "stages-need-pipeline"),
        ({"pipeline": 2, "virtual_stages": 2, "schedule": "gpipe"}, TASK, "virtual-stages-interleave"),
        ({"pipeline": 2, "virtual_stages": 2, "grad_accum": 3}, TASK, "virtual-stages-need-rounds"),
        ({"pipeline": 2, "schedule": "zero-bubble", "compile": True}, TASK, "zero-bubble-needs-linear"),
        ({"sharding": "fsdp-layers", "compile": True}, TASK, "layer-units-run-eagerly"),
        (
            {"sharding": "fsdp-layers", "pipeline": 2, "schedule": "zero-bubble"},
            TASK,
            "layer-units-run-eagerly",
        ),
        (
            {"pipeline": 2, "virtual_stages": 2, "schedule": "zero-bubble"},
            TASK,
            "virtual-stages-interleave",
        ),
        ({"precision": "float8"}, Setting(8, 1, 8, entrypoint=True, adapter=True), "float8-no-adapter"),
        (
            {"pipeline": 2, "optimizer_step": "backward", "grad_accum": 1},
            TASK,
            "step-in-backward-no-pipeline",
        ),
        ({"sharding": "ddp", "offload": "cpu"}, GPUS, "cpu-offload-needs-fsdp"),
        ({"sharding": "zero1", "offload": "cpu"}, GPUS, "cpu-offload-needs-fsdp"),
        (
            {"sharding": "zero1", "optimizer_step": "backward", "grad_accum": 1},
            TASK,
            "step-in-backward-no-ddp",
        ),
        ({"micro_batch_size": 1}, Setting(8, 1, 8, batch_norm=True), "batch-norm-needs-two"),
        (
            {"compile": True, "activations": "selective"},
            Setting(8, 1, 8, batch_norm=True),
            "compiled-batch-norm-is-not-recomputed",
        ),
        ({"micro_batch_size": 1}, Setting(8, 1, 8, couples_samples=True), "coupled-samples-need-two"),
        ({"offload": "cpu"}, Setting(2, 1, 0), "offload-needs-gpu"),
        ({"precision": "float8"}, Setting(2, 1, 0), "float8-needs-gpu"),
        ({"checkpoint_ratio": 0.5}, GPUS, "ratio-needs-checkpoint"),
        ({"activation_budget": 0.5}, GPUS, "activation-budget-needs-budget"),
        ({"activations": "budget", "activation_budget": 0.5}, TASK, "budget-needs-compile"),
        ({"offload": "nvme-optimizer"}, TASK, "nvme-needs-directory"),
        ({"offload": "cpu", "optimizer": "paged-adamw-8bit"}, TASK, "paged-or-offloaded"),
    ],
)
def test_a_broken_rule_explains_itself_and_names_the_nearest_valid_recipe(change, setting, rule):
    recipe = GOOD.model_copy(update=change)
    (broken,) = broken_rules(recipe, setting)
    assert broken.rule.name == rule
    assert broken.rule.reason in str(broken) and broken.rule.source in str(broken)
    valid = nearest_valid(recipe, setting)
    assert valid is not None and names(valid, setting) == []


def test_each_stage_may_shard_within_nodes_if_it_has_several():
    recipe = GOOD.model_copy(update={"sharding": "hybrid", "pipeline": 2})
    assert names(recipe, Setting(16, 4, 4, entrypoint=True)) == []
    assert names(recipe, Setting(12, 3, 4, entrypoint=True)) == ["hybrid-needs-nodes"]


def test_a_field_to_be_left_out_is_written_as_in_yaml():
    (broken,) = broken_rules(GOOD.model_copy(update={"pipeline": 2, "stages": (3, 4, 5)}), TASK)
    assert str(broken).endswith("nearest valid: stages: null")


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "paged-adamw-8bit", "lion-8bit"])
def test_the_built_in_entrypoint_runs_8_bit_optimizers_on_shards_and_a_foreign_command_does_not(optimizer):
    recipe = GOOD.model_copy(update={"optimizer": optimizer})
    assert names(recipe, TASK) == []
    assert names(recipe, GPUS) == ["bitsandbytes-no-dtensor"]


@pytest.mark.parametrize(
    "change",
    [{"offload": "cpu"}, {"activations": "offload"}, {"precision": "fp16-mixed", "grad_scaler": True}],
)
def test_the_built_in_entrypoint_runs_on_the_cpu_what_its_tests_have_run_there(change):
    assert names(GOOD.model_copy(update=change), Setting(2, 1, 0, entrypoint=True)) == []


def test_zero1_keeps_its_states_on_the_host_but_not_its_parameters():
    for offload in ("cpu-optimizer", "nvme-optimizer"):
        recipe = GOOD.model_copy(update={"sharding": "zero1", "offload": offload})
        assert names(recipe, Setting(8, 1, 8, nvme_dir=True, entrypoint=True)) == []
    moved = GOOD.model_copy(update={"sharding": "zero1", "offload": "cpu"})
    assert nearest_valid(moved, TASK) == GOOD.model_copy(update={"offload": "cpu"})


def test_zero2_and_zero3_are_names_of_one_value_each():
    fields = {**GOOD.model_dump(), "sharding": "zero2"}
    assert Recipe.model_validate(fields).sharding == "fsdp-keep"
    assert RecipeChoice(sharding="zero3").sharding == "fsdp"
    assert RecipeChoice(sharding="ZeRO-1").sharding == "zero1"
    assert RecipeChoice(sharding="zero_2").sharding == "fsdp-keep"
    with pytest.raises(ValueError, match="'zero1', 'fsdp', 'fsdp-keep', 'fsdp-layers' or 'hybrid'"):
        RecipeChoice(sharding="zero4")


# Every value of every field that a rule or the entrypoint could ask about; sizes have no alternatives. Rules
# ask of an optimizer whether its states are 8-bit and paged.
SIZES = {"micro_batch_size", "grad_accum", "loss_chunks", "expandable_segments"}
VALUES: dict[str, tuple[Any, ...]] = {
    "precision": get_args(Precision),
    "optimizer": ("adamw", "adamw-8bit", "paged-adamw-8bit"),
    "sharding": get_args(get_args(Sharding)[0]),
    "offload": get_args(Offload),
    "embedding_states": get_args(EmbeddingStates),
    "optimizer_step": get_args(OptimizerStep),
    "activations": get_args(Activations),
    "checkpoint_ratio": (1.0, 0.5),
    "activation_budget": (1.0, 0.5),
    "grad_sync": get_args(GradSync),
    "compile": (False, True),
    "grad_scaler": (False, True),
}
MESH: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2),
    "pipeline": (1, 2),
    "virtual_stages": (1, 2),
    "stages": (None, (1, 1)),
    "schedule": get_args(Schedule),
}
"Together with one of EVERY recipes of the others: with all of them, the test would take minutes."
EVERY = 1009
CPU = Setting(1, 1, 0, entrypoint=True)
SETTINGS = [
    CPU,
    Setting(1, 1, 1, nvme_dir=True, entrypoint=True),
    Setting(2, 1, 0, nvme_dir=True, every_gradient=False),
    Setting(2, 1, 2, entrypoint=True, counts_allocations=True, shardable=False),
    Setting(2, 1, 2, entrypoint=True, adapter=True, clips=True),
    Setting(4, 2, 2, nvme_dir=True, batch_norm=True, entrypoint=True),
]


@pytest.mark.slow
def test_every_recipe_is_valid_or_has_a_valid_neighbour_and_what_is_valid_runs():
    assert VALUES.keys() | MESH.keys() | SIZES == Recipe.model_fields.keys()
    sizes = {"micro_batch_size": 4, "grad_accum": 2}
    recipes = [
        Recipe.model_construct(**dict(zip(VALUES, values, strict=True)), **sizes)
        for values in itertools.product(*VALUES.values())
    ]
    meshes = [dict(zip(MESH, values, strict=True)) for values in itertools.product(*MESH.values())]
    recipes += [recipe.model_copy(update=mesh) for recipe in recipes[::EVERY] for mesh in meshes[1:]]
    seen = set()
    for setting in SETTINGS:
        neighbours = set()
        for recipe in recipes:
            broken = broken_rules(recipe, setting)
            if not broken:
                missing = unsupported(recipe)
                assert not missing or any(sentence in missing for _, sentence in WHY_NOT)
                continue
            seen |= {one.rule.name for one in broken}
            valid = nearest_valid(recipe, setting)
            assert valid is not None and valid.micro_batch_size * valid.grad_accum == 8
            neighbours.add(valid)
        assert not any(broken_rules(valid, setting) for valid in neighbours)
    of_sizes = {"batch-norm-needs-two", "coupled-samples-need-two", "virtual-stages-need-rounds"}
    assert seen | of_sizes == {rule.name for rule in RULES}


def test_what_the_entrypoint_does_not_run_is_refused_with_what_does():
    (sentence,) = unsupported(GOOD.model_copy(update={"compile": True, "activations": "offload"}))
    assert "activations: checkpoint runs with it" in sentence
    assert unsupported(GOOD) == []


@pytest.mark.parametrize(
    ("accum", "cure"), [(8, "micro_batch_size: 2, grad_accum: 4"), (3, "micro_batch_size: 3")]
)
def test_a_micro_batch_of_one_with_batch_norm_becomes_the_next_larger_one(accum, cure):
    recipe = GOOD.model_copy(update={"micro_batch_size": 1, "grad_accum": accum})
    (broken,) = broken_rules(recipe, Setting(8, 1, 8, batch_norm=True))
    assert cure in str(broken)
    alone = recipe.model_copy(update={"grad_accum": 1})
    (broken,) = broken_rules(alone, Setting(8, 1, 8, batch_norm=True))
    assert "at least two samples of batch.global" in str(broken) and not broken.cure
