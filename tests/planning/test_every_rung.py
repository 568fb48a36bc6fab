"""Walks down random ladders, with random failures, to the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.planning.micro_batches import WITHIN_A_RUN, with_micro_batch, with_sizes_between
from launcher.planning.oom_fallback import STATES_ALONE, lower, within_a_run
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import Setting, broken_rules
from launcher.spec.verdict import Verdict

Draw = Any

AXES: dict[str, tuple[Any, ...]] = {
    "activations": ("keep", "selective", "every-second", "checkpoint", "offload"),
    "offload": ("none", "cpu-optimizer", "cpu"),
    "sharding": ("ddp", "zero1", "fsdp-keep", "fsdp"),
    "loss_chunks": (1, 8),
    "grad_sync": ("last", "each"),
}
"In falling order of the memory they need."

SETTINGS = st.builds(
    Setting,
    ranks=st.just(2),
    nodes=st.just(1),
    gpus_per_node=st.sampled_from([0, 2]),
    batch_norm=st.booleans(),
    couples_samples=st.booleans(),
    entrypoint=st.just(True),
    micro_batch_fixed=st.booleans(),
    lower_micro_batch=st.sampled_from([None, True, False]),
)


@st.composite
def ladders(draw: Draw, setting: Setting, *, back: bool = False) -> tuple[Recipe, ...]:
    """A plan's recipe and the rungs below: each step gives up one thing, or takes `back` another one."""
    per_rank = draw(st.sampled_from([2, 4, 6, 8, 9, 12, 24]))
    divisors = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    first = Recipe(
        precision="fp32", optimizer="adamw", sharding="ddp", micro_batch_size=per_rank, grad_accum=1
    )
    first = with_micro_batch(first, draw(st.sampled_from(divisors)))
    first = first.model_copy(update={name: draw(st.sampled_from(values)) for name, values in AXES.items()})
    planned = [first] if not broken_rules(first, setting) else []
    for name in draw(st.lists(st.sampled_from([*AXES, "micro_batch_size"]), max_size=8)) if planned else ():
        at = planned[-1]
        if name == "micro_batch_size":
            made = [with_micro_batch(at, size) for size in divisors if size < at.micro_batch_size]
        else:
            values = AXES[name]
            below = values if back else values[values.index(getattr(at, name)) + 1 :]
            made = [at.model_copy(update={name: value}) for value in below]
        made = [one for one in made if not broken_rules(one, setting) and one not in planned]
        planned += [draw(st.sampled_from(made))] if made else []
    return tuple(planned)


@dataclass
class Walk:
    """A run that fails until nothing is left, as supervisor and ranks take it down."""

    draw: Draw
    setting: Setting
    planned: tuple[Recipe, ...]
    tried: list[Recipe] = field(default_factory=list)
    why: dict[Recipe, str] = field(default_factory=dict)
    "Rungs of the plan that were passed over."
    end: str = ""

    def go(self) -> None:
        at: Recipe | None = self.planned[0]
        self.tried.append(self.planned[0])
        while at is not None:
            at = self.fails(at)

    def fails(self, at: Recipe) -> Recipe | None:
        phase = self.draw(st.sampled_from(["probe", "forward", "backward", None, *sorted(STATES_ALONE)]))
        memory = self.draw(st.sampled_from(["gpu-oom", "gpu-oom", "gpu-oom", "host-oom"]))
        below = within_a_run(at, self.setting, self.planned)
        if phase == "probe" and memory == "gpu-oom":
            rungs = with_sizes_between(at, below)
            fits = self.draw(st.integers(1, len(rungs)))
            self.tried += rungs[1 : fits + 1]
            if fits < len(rungs):
                return rungs[fits]  # until a step runs out of memory in it
        elif memory == "gpu-oom" and phase in ("forward", "backward") and self.draw(st.booleans()) and below:
            self.tried.append(below[0])  # in the same processes
            return below[0]
        lowered = lower(at, Verdict(failure=memory, reason="", phase=phase), self.setting, self.planned)
        self.why |= {one.rung: one.why for one in lowered.excluded}
        if lowered.recipe is None:
            self.end = lowered.reason
            assert all(line in self.end for line in lowered.left_out)
        else:
            self.tried.append(lowered.recipe)
        return lowered.recipe


def covers(tried: Recipe, rung: Recipe) -> bool:
    """Whether `tried` needs no more than `rung`, of which it may differ only within a run. With one
    micro-batch in a step gradients are reduced once, whatever `grad_sync` says."""
    return (
        tried.changes_from(rung).keys() <= WITHIN_A_RUN
        and tried.micro_batch_size <= rung.micro_batch_size
        and tried.loss_chunks >= rung.loss_chunks
        and (
            (tried.grad_sync, rung.grad_sync) != ("last", "each") or rung.grad_accum == tried.grad_accum == 1
        )
    )


def checked(walk: Walk) -> Iterator[str]:
    """What is wrong with a walk that has come to its end."""
    first = walk.planned[0]
    for recipe in walk.tried:
        if recipe.micro_batch_size * recipe.grad_accum != first.micro_batch_size * first.grad_accum:
            yield f"another global batch: {recipe}"
        if broken_rules(recipe, walk.setting):
            yield f"breaks a rule: {recipe}"
        if recipe.micro_batch_size < first.micro_batch_size and walk.setting.why_micro_batch_stays:
            yield f"the micro-batch was to stay: {recipe}"
    if len(set(walk.tried)) < len(walk.tried):
        yield f"tried twice: {walk.tried}"
    for rung in walk.planned:
        if rung not in walk.tried and not walk.why.get(rung):
            yield f"neither tried nor excluded: {rung}"
        needs_no_less = walk.why.get(rung) == "needs no less than the recipe that ran out of memory"
        if needs_no_less and not any(covers(one, rung) for one in walk.tried):
            yield f"excluded, though nothing that needs less was tried: {rung}"
    if not walk.end:
        yield "no reason at the end"


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_each_rung_is_tried_or_excluded_with_a_reason_none_twice_and_it_ends(data: Draw) -> None:
    setting = data.draw(SETTINGS)
    planned = data.draw(ladders(setting, back=data.draw(st.booleans())))
    if planned:
        walk = Walk(data.draw, setting, planned)
        walk.go()
        assert list(checked(walk)) == []


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_where_every_pass_runs_out_of_memory_each_rung_is_tried_or_one_that_needs_no_more(data: Draw) -> None:
    """No failure says anything else than that a pass needs too much: nothing is excluded for another reason
    than what was tried, except where the micro-batch stays."""
    setting = data.draw(SETTINGS)
    planned = data.draw(ladders(setting))
    if not planned:
        return
    walk = Walk(data.draw, setting, planned)
    at: Recipe | None = planned[0]
    walk.tried.append(planned[0])
    while at is not None:
        in_process, probed = data.draw(st.booleans()), data.draw(st.booleans())
        below = within_a_run(at, setting, planned)
        if probed:
            walk.tried += with_sizes_between(at, below)[1:]
        elif in_process and below:
            at = below[0]
            walk.tried.append(at)
            continue
        phase = "probe" if probed else "backward"
        lowered = lower(at, Verdict(failure="gpu-oom", reason="", phase=phase), setting, planned)
        at = lowered.recipe
        walk.tried += [at] if at is not None else []
    last = walk.tried[-1]
    assert len(set(walk.tried)) == len(walk.tried)
    for rung in planned:
        if setting.why_micro_batch_stays is None and not setting.keeps_micro_batch:
            assert any(covers(one, rung) for one in walk.tried), rung
        built = {name for name in rung.changes_from(last) if name not in WITHIN_A_RUN}
        assert rung != planned[-1] or not built, "the last rung's processes were built"
