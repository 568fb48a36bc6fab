from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from launcher.planning.ladder import Rung, can_continue, ladder_of
from launcher.planning.micro_batches import with_sizes_between
from launcher.planning.oom_fallback import lower, why_none_within, within_a_run
from launcher.spec.job import Job
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting, broken_rules
from launcher.spec.verdict import Verdict
from launcher.supervise.policy import advice, decide
from tests.planning.anchors import LLAMA, MPT
from tests.planning.closed_form_model import Toy

PLACES: dict[str, Toy] = {
    "7B on 8 A6000": Toy(),
    "7B on 8 H100": Toy(gpu="H100"),
    "70B on 16 A100": Toy(gpus=16, gpu="A100 80GB", decoder=LLAMA["70B"], per_rank=4, host=2000 * GIB),
    "3B on one 4090": Toy(gpus=1, gpu="RTX 4090", decoder=MPT["3B"], per_rank=4),
    "unknown speed": Toy(known=False),
}


def rungs(
    toy: Toy, knobs: dict[str, list[Any]] | None = None, **fixed: Any
) -> tuple[Recipe, tuple[Rung, ...]]:
    space = toy.space(**fixed)
    chosen = toy.choose(space).chosen
    assert chosen is not None
    return chosen.recipe, ladder_of(chosen, space, toy, toy.capacity, knobs)[0]


@pytest.mark.parametrize("toy", PLACES.values(), ids=PLACES)
def test_every_rung_is_valid_needs_less_and_can_read_the_checkpoints_of_all_above(toy):
    above, ladder = rungs(toy)
    assert ladder
    needed = toy(above).estimate.needed
    for rung in ladder:
        assert not broken_rules(rung.recipe, toy.space().setting)
        assert can_continue(rung.recipe, above, toy.space().setting)
        assert rung.recipe.micro_batch_size * rung.recipe.grad_accum == toy.per_rank
        assert rung.candidate.estimate.needed == needed - rung.saved < needed
        assert rung.candidate.estimate.host_per_node <= toy.host
        above, needed = rung.recipe, rung.candidate.estimate.needed
    assert ladder[-1].recipe.micro_batch_size == 1


@pytest.mark.parametrize("host", [None, 2000 * GIB], ids=["unknown", "known"])
def test_a_rung_that_offloads_names_its_condition_where_host_memory_is_unknown(host):
    _, ladder = rungs(replace(PLACES["7B on 8 A6000"], host=host))
    offloading = [rung for rung in ladder if rung.recipe.offloads]
    assert offloading
    for rung in ladder:
        assert ("of host memory in each node" in rung.words) == (host is None and rung.recipe.offloads)


def test_a_rung_is_the_change_that_loses_least_speed_for_each_byte():
    toy = PLACES["7B on 8 H100"]
    space = toy.space()
    chosen, ladder = rungs(toy)
    first = ladder[0]
    others = [
        toy(one) for one in [*space.below(chosen), *space.sizes(chosen)]
        if one.micro_batch_size <= chosen.micro_batch_size and can_continue(one, chosen, space.setting)
    ]  # fmt: skip
    before = toy(chosen)
    prices = [
        (1 - one.speed / before.speed) / (before.estimate.needed - one.estimate.needed)
        for one in others
        if one.estimate.needed < 0.98 * before.estimate.needed
    ]
    assert first.slower / first.saved == pytest.approx(min(prices))


def test_knobs_come_after_what_trains_the_same_and_in_their_order():
    _, ladder = rungs(PLACES["7B on 8 H100"], {"length": [2048, 1024, 512]})
    lengths = [rung.args.get("length", 2048) for rung in ladder]
    assert lengths == sorted(lengths, reverse=True) and lengths[-2:] == [1024, 512]
    assert "changes the input" in ladder[-1].words and ladder[-1].recipe.micro_batch_size == 1


def test_a_knob_that_saves_too_little_is_told_of_and_the_next_one_is_tried():
    toy = PLACES["7B on 8 H100"]
    chosen = toy.choice.chosen
    assert chosen is not None
    knobs = {"length": [2048, 2047, 1024], "unknown": [1, 2]}
    ladder, left_out = ladder_of(chosen, toy.space(), toy, toy.capacity, knobs)
    assert [rung.args["length"] for rung in ladder if rung.args] == [1024]
    nearly, useless = left_out
    assert nearly.startswith("plan.vary: length 2047 is not in the ladder: it saves ")
    assert (
        "plan.vary: unknown 2 is not in the ladder: it saves 0 B of " in useless
        and "not more than" in useless
    )


def test_with_batch_norm_a_smaller_micro_batch_comes_after_the_rest_and_never_below_two():
    toy = Toy(gpu="H100")
    space = toy.space(batch_norm=True)
    chosen = toy.choose(space).chosen
    assert chosen is not None
    ladder, _ = ladder_of(chosen, space, toy, toy.capacity)
    sizes = [chosen.recipe.micro_batch_size, *(rung.recipe.micro_batch_size for rung in ladder)]
    first_smaller = next(i for i, size in enumerate(sizes) if size < sizes[0])
    assert first_smaller > 1 and sizes[-1] == 2
    assert len(set(sizes[:first_smaller])) == 1


def test_a_full_host_takes_nothing_more():
    toy = Toy(gpu="H100", host=GIB)
    chosen, ladder = rungs(toy)
    assert {rung.recipe.offload for rung in ladder} == {"none"} == {chosen.offload}


SETTING = Setting(8, 1, 8, entrypoint=True)
STATISTICS = replace(SETTING, batch_norm=True)
COUPLED = replace(SETTING, couples_samples=True)
PLAIN = Recipe(
    precision="bf16-mixed", optimizer="adamw-8bit", sharding="ddp", micro_batch_size=4, grad_accum=2
)


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({"micro_batch_size": 2, "grad_accum": 4}, True),
        ({"activations": "checkpoint"}, True),
        ({"offload": "cpu-optimizer"}, True),
        ({"optimizer": "paged-adamw-8bit"}, True),
        ({"optimizer": "adamw"}, False),
        ({"precision": "bf16"}, False),
        ({"sharding": "fsdp"}, False),
    ],
)
def test_a_restart_changes_only_what_a_checkpoint_can_be_read_under(changes, may):
    assert can_continue(PLAIN.model_copy(update=changes), PLAIN, SETTING) is may


def test_states_in_32_bit_can_be_read_in_other_shards():
    before = PLAIN.model_copy(update={"optimizer": "adamw"})
    assert can_continue(before.model_copy(update={"sharding": "fsdp"}), before, SETTING)


BASE = PLAIN.model_copy(update={"optimizer": "adamw", "sharding": "fsdp", "activations": "offload"})
SMALLER = BASE.model_copy(update={"micro_batch_size": 2, "grad_accum": 4})
AGAIN = SMALLER.model_copy(update={"activations": "checkpoint"})
ON_HOST = AGAIN.model_copy(update={"offload": "cpu-optimizer"})
BASE_ON_HOST = BASE.model_copy(update={"activations": "checkpoint", "offload": "cpu-optimizer"})
PLANNED = (BASE, SMALLER, AGAIN, ON_HOST)


def after(verdict: Verdict, at: Recipe = BASE, setting: Setting = SETTING) -> Recipe | None:
    return lower(at, verdict, setting, PLANNED).recipe


def test_the_rung_of_the_plan_fits_the_phase():
    assert after(Verdict(failure="gpu-oom", reason="", phase="backward")) == SMALLER
    assert after(Verdict(failure="gpu-oom", reason="", phase="backward"), SMALLER) == AGAIN
    assert after(Verdict(failure="gpu-oom", reason="", phase="optimizer")) == BASE_ON_HOST
    assert after(Verdict(failure="gpu-oom", reason="", phase="checkpoint")) == BASE_ON_HOST
    assert after(Verdict(failure="gpu-oom", reason="", phase="init")) is None, "states come later"
    assert after(Verdict(failure="gpu-oom", reason="", phase="init"), ON_HOST) is None
    assert after(Verdict(failure="host-oom", reason="")) == AGAIN
    assert after(Verdict(failure="host-oom", reason=""), AGAIN) is None
    assert after(Verdict(failure="gpu-oom", reason="", phase="optimizer"), ON_HOST) is None


def test_a_run_that_has_one_sample_already_may_still_take_the_plans_other_changes():
    """Its loss was found to couple samples when it had begun, and this recipe trains it."""
    one, activations, on_host = (
        recipe.model_copy(update={"micro_batch_size": 1, "grad_accum": 8})
        for recipe in (BASE, AGAIN, ON_HOST)
    )
    for phase, then in (("backward", activations), ("optimizer", on_host)):
        verdict = Verdict(failure="gpu-oom", reason="", phase=phase)
        assert lower(one, verdict, COUPLED, (one, activations, on_host)).recipe == then
    two = one.model_copy(update={"micro_batch_size": 2, "grad_accum": 4})
    verdict = Verdict(failure="gpu-oom", reason="", phase="backward")
    assert lower(two, verdict, COUPLED, (two, one)).recipe is None


def test_the_supervisor_takes_the_rung_of_the_plan():
    job = Job.model_validate({"name": "j", "task": "a:B", "steps": 1, "batch": {"global": 64}})
    verdict = Verdict(failure="gpu-oom", reason="", phase="optimizer")
    decision = decide(verdict, job, BASE, SETTING, {}, PLANNED)
    assert (decision.action, decision.recipe) == ("retry-lower", BASE_ON_HOST)
    assert decide(verdict, job, BASE, SETTING, {}).action == "stop"


@pytest.mark.parametrize("phase", ["init", "optimizer", "checkpoint"])
def test_what_no_micro_batch_helps_costs_no_attempt_with_a_smaller_one(phase: str) -> None:
    verdict = Verdict(failure="gpu-oom", reason="", phase=phase)
    lowered = lower(BASE, verdict, SETTING, (BASE, SMALLER))
    assert lowered.recipe is None and "a smaller micro-batch does not help" in lowered.reason
    assert advice(verdict, command=False) in lowered.reason and "activations" not in lowered.reason
    everything = BASE.model_copy(update={"offload": "cpu"})
    planned = (BASE, SMALLER, SMALLER.model_copy(update={"offload": "cpu"}))
    assert lower(BASE, verdict, SETTING, planned).recipe == everything


def test_a_full_host_is_not_told_to_take_more() -> None:
    verdict = Verdict(failure="host-oom", reason="", phase="checkpoint")
    assert "offload" not in lower(PLAIN, verdict, Setting(8, 1, 0, entrypoint=True)).reason


def test_on_cpus_host_memory_is_what_the_recipe_is_about():
    cpus = Setting(8, 1, 0, entrypoint=True)
    assert after(Verdict(failure="host-oom", reason="", phase="forward"), setting=cpus) == SMALLER


@pytest.mark.parametrize("phase", [None, "init", "backward", "optimizer", "checkpoint"])
@pytest.mark.parametrize("gpus", [0, 8])
def test_a_full_host_never_gets_more_to_hold(phase: str | None, gpus: int) -> None:
    setting = Setting(8, 1, gpus, entrypoint=True)
    verdict = Verdict(failure="host-oom", reason="", phase=phase)
    at: Recipe | None = PLAIN.model_copy(update={"optimizer": "adamw", "sharding": "fsdp"})
    assert at is not None
    planned = [at.model_copy(update=change) for change in MORE_ON_HOST]
    seen = []
    while at is not None:
        at = lower(at, verdict, setting, [at, *planned]).recipe
        seen += [at] if at is not None else []
        assert at is None or (at.offload, at.activations) == ("none", "keep")
    smaller = 2 if gpus == 0 and phase in (None, "backward") else 0
    assert len(seen) == smaller, "smaller micro-batches on CPUs only"


MORE_ON_HOST: list[dict[str, Any]] = [
    {"offload": "cpu-optimizer"},
    {"offload": "cpu"},
    {"offload": "nvme-optimizer"},
    {"activations": "offload"},
]


def test_below_the_plan_the_micro_batch_shrinks():
    oom = Verdict(failure="gpu-oom", reason="", phase="forward")
    lowered = lower(ON_HOST, oom, SETTING, PLANNED)
    assert lowered.recipe is not None and lowered.recipe.micro_batch_size == 1
    assert "micro-batch 2 -> 1" in lowered.reason
    elsewhere = BASE.model_copy(update={"micro_batch_size": 8, "grad_accum": 1})
    recipe = lower(elsewhere, oom, SETTING, PLANNED).recipe
    assert recipe is not None and recipe.micro_batch_size == 4


@pytest.mark.parametrize("phase", ["probe", "forward", "backward"])
def test_below_a_step_in_backward_without_a_plan_micro_batches_are_accumulated(phase: str):
    at = PLAIN.model_copy(update={"optimizer_step": "backward", "micro_batch_size": 8, "grad_accum": 1})
    oom = Verdict(failure="gpu-oom", reason="", phase=phase)
    lowered = lower(at, oom, SETTING)
    assert lowered.recipe is not None
    assert lowered.recipe.changes_from(at) == {
        "optimizer_step": ("backward", "after"), "micro_batch_size": (8, 4), "grad_accum": (1, 2),
    }  # fmt: skip
    assert "optimizer_step backward -> after" in lowered.reason
    assert within_a_run(at, SETTING) == (), "it needs a restart"
    states = Verdict(failure="gpu-oom", reason="", phase="init")
    assert lower(at, states, SETTING).recipe is None
    assert lower(at.model_copy(update={"micro_batch_size": 1}), oom, SETTING).recipe is None


def test_a_plan_accumulates_below_a_step_in_backward_where_that_saves_memory():
    fields = {"optimizer_step": "backward", "activations": "keep", "sharding": "fsdp", "offload": "none"}
    chosen, ladder = rungs(Toy(gpu="H100", per_rank=2), clips=False, **fields)
    assert (chosen.optimizer_step, chosen.micro_batch_size) == ("backward", 2)
    assert ladder[-1].recipe.changes_from(chosen).keys() >= {"optimizer_step", "micro_batch_size"}
    assert all(rung.saved > 0 for rung in ladder)


def test_a_planned_rung_that_batch_norm_forbids_is_left_out():
    one = SMALLER.model_copy(update={"micro_batch_size": 1, "grad_accum": 8})
    oom = Verdict(failure="gpu-oom", reason="", phase="forward")
    assert lower(SMALLER, oom, STATISTICS, (SMALLER, one, AGAIN)).recipe == AGAIN


def test_the_words_of_a_rung_say_what_changes():
    words = lower(SMALLER, Verdict(failure="gpu-oom", reason=""), SETTING, PLANNED).reason
    assert words == "activations offload -> checkpoint"


def test_a_run_that_left_the_ladder_for_smaller_micro_batches_goes_on_below_at_its_own():
    oom = Verdict(failure="gpu-oom", reason="", phase="backward")
    one = {"micro_batch_size": 1, "grad_accum": 8}
    lowered = lower(SMALLER.model_copy(update=one), oom, SETTING, PLANNED).recipe
    assert lowered == AGAIN.model_copy(update=one)


def test_when_no_micro_batch_fits_something_else_is_given_up_and_the_probe_looks_for_the_size_again():
    probed = Verdict(failure="gpu-oom", reason="", phase="probe")
    assert after(probed, BASE) == BASE.model_copy(update={"activations": "checkpoint"})
    assert after(probed, SMALLER) == AGAIN
    assert after(probed, ON_HOST) is None


def next_within(recipe: Recipe, setting: Setting, planned: Sequence[Recipe]) -> Recipe | None:
    return next(iter(within_a_run(recipe, setting, planned)), None)


def test_within_a_run_the_micro_batch_shrinks_but_with_batch_norm_only_when_nothing_else_is_left():
    small = next_within(BASE, SETTING, PLANNED)
    assert small is not None and small.changes_from(BASE).keys() == {"micro_batch_size", "grad_accum"}
    assert next_within(SMALLER, STATISTICS, PLANNED) is None
    assert "BatchNorm" in why_none_within(BASE, STATISTICS)
    assert next_within(ON_HOST, STATISTICS, PLANNED) is None  # one sample is too few
    wide = ON_HOST.model_copy(update={"micro_batch_size": 8, "grad_accum": 1})
    assert next_within(wide, STATISTICS, (wide,)) == ON_HOST.model_copy(
        update={"micro_batch_size": 4, "grad_accum": 2}
    )


@pytest.mark.parametrize("setting", [STATISTICS, COUPLED], ids=["BatchNorm", "coupled samples"])
def test_the_probe_gives_up_first_what_a_restart_can_take_with_the_same_micro_batch(setting: Setting):
    planned = (BASE, BASE.model_copy(update={"activations": "checkpoint"}))
    chunked = BASE.model_copy(update={"loss_chunks": 4})
    assert within_a_run(BASE, setting, planned) == ()
    assert within_a_run(BASE, SETTING, planned)[0] == SMALLER
    assert within_a_run(planned[1], setting, planned)[0].micro_batch_size == 2
    first, second = within_a_run(BASE, setting, (BASE, chunked))
    assert first == chunked and (second.micro_batch_size, second.loss_chunks) == (2, 4)
    probed = Verdict(failure="gpu-oom", reason="", phase="probe")
    assert lower(BASE, probed, setting, planned).recipe == planned[1]


def test_within_a_run_the_plans_next_rung_is_taken_where_nothing_is_built_for_it():
    chunked = BASE.model_copy(update={"loss_chunks": 4})
    gathered = BASE.model_copy(update={"activations": "checkpoint"})
    assert next_within(BASE, SETTING, (BASE, chunked, SMALLER)) == chunked
    assert next_within(BASE, STATISTICS, (BASE, chunked, SMALLER)) == chunked
    assert next_within(BASE, SETTING, (BASE, gathered, SMALLER)) == SMALLER, "half: no restart"
    later = gathered.model_copy(update={"loss_chunks": 4})
    assert next_within(BASE, SETTING, (BASE, gathered, later)) == chunked, "what a later rung changes, too"
    # The probe has left the ladder: it gave up grad_sync, and six samples at once were too many.
    found = BASE.model_copy(update={"micro_batch_size": 4, "grad_accum": 3, "grad_sync": "each"})
    planned = [found.model_copy(update=with_) for with_ in LATE]
    small = next_within(found, SETTING, planned)
    assert small == found.model_copy(update={"micro_batch_size": 2, "grad_accum": 6, "loss_chunks": 2})


LATE: list[dict[str, Any]] = [
    {"micro_batch_size": 12, "grad_accum": 1, "grad_sync": "last"},
    {"micro_batch_size": 6, "grad_accum": 2, "grad_sync": "last"},
    {"micro_batch_size": 2, "grad_accum": 6, "grad_sync": "last", "loss_chunks": 2},
]


def asked_by_a_probe(recipe: Recipe, *planned: Recipe) -> tuple[Recipe, ...]:
    return with_sizes_between(recipe, within_a_run(recipe, SETTING, planned))


def test_the_micro_batches_that_a_probe_may_ask_about_are_all_divisors():
    twelve = PLAIN.model_copy(update={"micro_batch_size": 12, "grad_accum": 1})
    asked = asked_by_a_probe(twelve)
    assert [one.micro_batch_size for one in asked] == [12, 6, 4, 3, 2, 1]
    assert {one.micro_batch_size * one.grad_accum for one in asked} == {12}
    wide = twelve.model_copy(update={"grad_accum": 2})
    assert [one.micro_batch_size for one in asked_by_a_probe(wide)] == [12, 8, 6, 4, 3, 2, 1]
    late = twelve.model_copy(update={"sharding": "fsdp", "optimizer": "adamw", "grad_sync": "last"})
    first, second, *_ = asked_by_a_probe(late.model_copy(update={"grad_accum": 2}))
    assert (first.grad_sync, second.grad_sync, second.micro_batch_size) == ("last", "each", 12)
    assert {one.grad_sync for one in asked_by_a_probe(late)[1:]} == {"each"}


def test_the_probe_asks_about_every_rung_of_the_plan_that_needs_no_restart():
    of_ddp = PLAIN.model_copy(update={"grad_sync": "last", "grad_accum": 1})
    sizes = [(one.micro_batch_size, one.grad_sync) for one in asked_by_a_probe(of_ddp)]
    assert sizes == [(4, "last"), (2, "last"), (1, "last"), (1, "each")]
    chunked = of_ddp.model_copy(update={"loss_chunks": 8})
    fewer = chunked.model_copy(update={"micro_batch_size": 1, "grad_accum": 4})
    asked = asked_by_a_probe(of_ddp, of_ddp, chunked, fewer)
    assert [(one.micro_batch_size, one.loss_chunks) for one in asked] == [
        (4, 1),
        (4, 8),
        (2, 8),
        (1, 8),
        (1, 8),
    ]
    statistics = PLAIN.model_copy(update={"micro_batch_size": 3, "grad_accum": 2})
    asked = with_sizes_between(statistics, within_a_run(statistics, STATISTICS))
    assert [one.micro_batch_size for one in asked] == [3, 2], "half is too small, two is not"
