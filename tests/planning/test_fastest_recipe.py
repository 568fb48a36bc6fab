"""The choice against trying everything, on a model of closed forms: tests.planning.closed_form_model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from launcher.memory.estimate import Estimate, Peak
from launcher.planning.fastest_recipe import ANOTHER_OPTIMIZER, Candidate, Capacity, largest_that_fits
from launcher.planning.ladder import ladder_of
from launcher.planning.space import AXES, Space
from launcher.spec.quantities import GIB, format_bytes
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting, broken_rules
from tests.planning.anchors import LLAMA, MPT
from tests.planning.closed_form_model import Toy

PLACES: dict[str, dict[str, Any]] = {
    "7B on 8 A6000": {},
    "7B on 8 H100": {"gpu": "H100"},
    "7B on one 4090": {"gpus": 1, "gpu": "RTX 4090", "host": 256 * GIB, "per_rank": 4},
    "70B on 16 A100": {
        "gpus": 16,
        "gpu": "A100 80GB",
        "decoder": LLAMA["70B"],
        "per_rank": 6,
        "host": 2000 * GIB,
    },
    "1B on 2 A5000": {"gpus": 2, "gpu": "RTX A5000", "decoder": MPT["1B"], "host": 64 * GIB},
    "125M on 4 A10": {"gpus": 4, "gpu": "A10", "decoder": MPT["125M"]},
}


def everything(toy: Toy, space: Space) -> list[Candidate]:
    return [toy(one) for rest in space.combinations for one in space.sizes(rest)]


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_nothing_that_fits_is_faster_than_the_choice(place):
    toy = Toy(**place)
    choice = toy.choice
    asked = len(toy.asked)
    all_of_it = everything(toy, toy.space())
    fits = [one for one in all_of_it if toy.capacity.misfit(one.estimate) is None]
    default = max((one.speed for one in fits if one.recipe.optimizer == "adamw"), default=0.0)
    other = max((one.speed for one in fits), default=0.0)
    assert choice.chosen is not None and toy.capacity.misfit(choice.chosen.estimate) is None
    assert choice.chosen.speed == (other if other > ANOTHER_OPTIMIZER * default else default)
    assert asked < 0.15 * len(all_of_it)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_every_recipe_of_the_space_is_told_of_once_with_a_reason(place):
    toy = Toy(**place)
    choice, rests = toy.choice, toy.space().combinations
    assert choice.chosen is not None

    def rest(recipe: Recipe) -> Recipe:
        return recipe.model_copy(update={"micro_batch_size": 1, "grad_accum": 1})

    told = [rest(one.recipe) for one in (*choice.losers, choice.chosen)]
    larger = [rest(choice.chosen.recipe)] if len(told) > len(rests) else []  # the next micro-batch
    assert sorted(map(str, told)) == sorted(map(str, [*map(rest, rests), *larger]))
    assert all(one.why for one in choice.losers)


def test_a_search_asks_only_what_may_win():
    toy = Toy(gpu="H100")
    assert len(toy.space().combinations) > 250 and toy.choice.chosen is not None
    assert len(toy.asked) < 30


def test_what_the_job_fixes_stays():
    toy = Toy()
    space = toy.space(activations="selective", offload="cpu-optimizer", micro_batch_size=4, grad_accum=4)
    chosen = toy.choose(space).chosen
    assert chosen is not None
    assert (chosen.recipe.activations, chosen.recipe.offload) == ("selective", "cpu-optimizer")
    assert (chosen.recipe.micro_batch_size, chosen.recipe.grad_accum) == (4, 4)


def test_activations_in_8_bits_are_the_choice_of_a_job_alone_and_stay_on_every_rung():
    toy = Toy()
    assert "compress" not in {one.activations for one in toy.space().combinations}
    space = toy.space(activations="compress")
    chosen = toy.choose(space).chosen
    assert chosen is not None and chosen.recipe.activations == "compress"
    rungs, _ = ladder_of(chosen, space, toy, toy.capacity, None)
    assert len(rungs) > 1 and {rung.recipe.activations for rung in rungs} == {"compress"}
    assert rungs[-1].recipe.micro_batch_size == 1


def test_another_optimizer_is_taken_when_nothing_fits_with_the_default():
    toy = Toy(gpus=1, gpu="A100 80GB", per_rank=4, decoder=MPT["7B"])
    space = toy.space(offload="none", sharding="none")
    choice = toy.choose(space)
    assert choice.chosen is not None and choice.chosen.recipe.optimizer != "adamw"
    assert "because nothing fits with adamw" in choice.reason


def test_a_recipe_of_another_space_stays_unless_one_is_better():
    toy = Toy()
    best = toy.choice.chosen
    assert best is not None
    toy.asked.clear()
    slower = toy.choose(toy.space(activations="offload"), than=best)
    assert slower.chosen == best and not toy.asked, "bounds show that none is faster"
    assert toy.choose(toy.space(), than=slower.chosen).chosen == best
    small = toy(toy.space().sizes(best.recipe)[0])
    assert small.speed < best.speed
    assert toy.choose(toy.space(), than=small).chosen == best


def test_another_optimizer_is_taken_when_it_is_much_faster():
    toy = Toy(gpus=1, gpu="RTX A5000", per_rank=4, decoder=MPT["3B"])
    choice = toy.choice
    assert choice.chosen is not None and choice.chosen.recipe.optimizer != "adamw"
    assert "times as fast as adamw" in choice.reason


def test_another_optimizer_is_not_taken_for_a_little():
    choice = Toy(gpu="H100").choice
    assert choice.chosen is not None and choice.chosen.recipe.optimizer == "adamw"
    [line] = [line for line in choice.explain() if line.startswith("optimizer: ")]
    assert "not enough to replace the optimizer adamw" in line


def test_unknown_host_memory_is_not_taken_for_unlimited():
    toy = Toy(gpus=2, gpu="RTX A5000", decoder=MPT["1B"], host=None)
    assert toy.choice.chosen is not None and not toy.choice.chosen.recipe.offloads
    [line] = [line for line in toy.choice.explain() if line.startswith("offload: ")]
    assert "cpu" in line and "`node.memory` is not set in the profile" in line


def test_with_unknown_host_memory_an_offload_is_chosen_only_if_nothing_else_fits():
    toy = Toy(gpus=2, gpu="RTX A5000", decoder=LLAMA["13B"], host=None)
    assert toy.choice.chosen is not None and toy.choice.chosen.recipe.offloads


def test_when_nothing_fits_the_nearest_is_named_with_what_is_missing():
    toy = Toy(gpus=2, gpu="RTX A5000", decoder=LLAMA["13B"], host=300 * GIB, length=2**20, per_rank=2)
    choice = toy.choice
    assert choice.chosen is None
    assert "nothing fits; " in choice.reason and "more than it has" in choice.reason
    assert choice.explain() == (choice.reason,)


def test_states_that_do_not_fit_are_not_traced():
    toy = Toy(gpus=2, gpu="RTX A5000", decoder=LLAMA["13B"], host=62 * GIB)
    choice = toy.choose(toy.space(optimizer="adamw"))
    assert choice.chosen is None and not toy.asked
    assert choice.reason.startswith("nothing fits: the nearest needs ")
    assert choice.reason.endswith(f" of {format_bytes(62 * GIB)} of host memory")


def test_a_step_in_the_backward_pass_is_chosen_where_gradients_do_not_fit_and_nothing_clips_them():
    """7B on two GPUs of 48 GB: 50.2 GiB of model states on each, of which 12.6 are gradients."""
    toy = Toy(gpus=2, per_rank=1)
    free, clipping = (toy.choose(toy.space(clips=clips, optimizer="adamw")).chosen for clips in (False, True))
    assert free is not None and clipping is not None
    assert (free.recipe.optimizer_step, free.recipe.offload) == ("backward", "none")
    # `offload: cpu` is as fast, and gives up more.
    assert (clipping.recipe.optimizer_step, clipping.recipe.offload) == ("after", "cpu-optimizer")
    assert clipping.estimate.needed < 36 * GIB
    roomy = Toy(gpus=8, per_rank=1)
    chosen = roomy.choose(roomy.space(clips=False, optimizer="adamw")).chosen
    assert chosen is not None and chosen.recipe.optimizer_step == "after"


def test_the_neighbours_are_explained_in_a_line_for_each_field():
    lines = Toy(gpu="H100").choice.explain()
    assert 4 <= len(lines) <= 9
    fields = [line.split(":")[0] for line in lines[1:]]
    assert len(set(fields)) == len(fields)
    text = "\n".join(lines)
    assert "sharding: ddp needs 100.4 GiB on each GPU for model states alone" in text
    assert "micro_batch_size: 8 needs" in text


def test_where_nothing_is_known_of_the_speed_what_loses_least_is_taken():
    toy = Toy(known=False)
    choice = toy.choice
    assert choice.chosen is not None
    recipe = choice.chosen.recipe
    assert (recipe.optimizer, recipe.offload, recipe.activations) == ("adamw", "none", "keep")
    assert "gives up least" in choice.reason and len(toy.asked) < 10


def test_a_larger_micro_batch_without_accumulation_may_fit_where_a_smaller_one_does_not():
    """`grad_sync: each` under no sharding: what accumulates holds gradients during the next forward pass."""
    toy = Toy(gpus=1, gpu="RTX A6000", decoder=MPT["1B"], per_rank=2)
    space = toy.space()
    recipe = space.base

    def evaluate(one: Recipe, args: Mapping[str, Any] | None = None) -> Candidate:
        candidate = toy(one)
        held = 40 * GIB + (20 * GIB if one.grad_accum > 1 else 0)
        estimate = candidate.estimate.model_copy(update={"reserved": held})
        return candidate.model_copy(update={"estimate": estimate})

    found, _ = largest_that_fits(space.sizes(recipe), evaluate, toy.capacity)
    assert found is not None and found.recipe.micro_batch_size == 2


def test_the_space_holds_valid_recipes_alone_and_each_once():
    space = Toy(gpus=16).space(chunks=True)
    rests = space.combinations
    assert len(rests) == len(set(rests)) > 400
    for recipe in rests:
        assert not broken_rules(recipe, space.setting)
        assert recipe.micro_batch_size * recipe.grad_accum == 16
        assert recipe.grad_sync == "each" or recipe.grad_accum > 1
    assert {recipe.sharding for recipe in rests} == {"ddp", "zero1", "hybrid", "fsdp-keep", "fsdp"}
    assert {recipe.loss_chunks for recipe in rests} == {1, 8}


def test_batch_norm_keeps_two_samples_in_every_recipe():
    space = Toy().space(batch_norm=True)
    assert min(one.micro_batch_size for rest in space.combinations for one in space.sizes(rest)) == 2


def test_without_gpus_nothing_is_offloaded():
    base = Recipe(precision="fp32", optimizer="adamw", sharding="fsdp", micro_batch_size=4, grad_accum=1)
    rests = Space(base, frozenset(), Setting(2, 1, 0, entrypoint=True)).combinations
    assert {recipe.offload for recipe in rests} == {"none"}
    assert {recipe.activations for recipe in rests} == {"keep", "selective", "every-second", "checkpoint"}


def test_a_ratio_of_checkpointed_blocks_keeps_checkpointing():
    space = Toy().space(activations="checkpoint", checkpoint_ratio=0.5)
    assert {recipe.activations for recipe in space.combinations} == {"checkpoint"}


def test_budgets_for_activations_are_searched_only_if_a_job_asks_for_one():
    asked = Toy().space(activations="budget", compile=True)
    assert {recipe.activation_budget for recipe in asked.combinations} == {1.0, 0.7, 0.5, 0.3, 0.1}
    fixed = Toy().space(activations="budget", compile=True, activation_budget=0.2)
    assert {recipe.activation_budget for recipe in fixed.combinations} == {0.2}
    for other in ({"compile": True}, {}, {"activations": "checkpoint"}):
        assert {recipe.activation_budget for recipe in Toy().space(**other).combinations} == {1.0}


def test_of_a_foreign_command_only_the_micro_batch_is_chosen():
    base = Recipe(precision="bf16-mixed", optimizer="adamw", sharding="ddp", micro_batch_size=8, grad_accum=1)
    space = Space(base, frozenset(), Setting(8, 1, 8), closed=True)
    assert space.combinations == (base,)
    assert [one.micro_batch_size for one in space.sizes(base)] == [1, 2, 4, 8]


def test_every_value_of_a_field_is_an_axis_but_for_those_left_to_the_user():
    assert set(Recipe.model_fields) - set(AXES) == {
        "precision", "checkpoint_ratio", "embedding_states", "micro_batch_size", "grad_accum", "compile",
        "grad_scaler", "expandable_segments", "tensor", "pipeline", "stages",
    }  # fmt: skip


def test_a_misfit_says_when_only_the_allocators_cache_is_too_much():
    peak = Peak(when="steady state", phase="backward", module="", allocated=20 * GIB, parts={})
    estimate = Estimate(
        peaks=(peak,), reserved=24 * GIB, overhead={"context": GIB}, host={}, band=0.05, basis="traced"
    )
    slowly = "the allocator would free its cache and retry"
    assert slowly in (Capacity(card=23 * GIB).misfit(estimate) or "")
    tensors = Capacity(card=20 * GIB).misfit(estimate)
    assert tensors is not None and slowly not in tensors
    within_the_band = Capacity(card=26 * GIB).misfit(estimate)
    assert within_the_band is not None and slowly not in within_the_band
    assert Capacity(card=27 * GIB).misfit(estimate) is None
