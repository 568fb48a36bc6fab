"""What a recipe needs and how fast it is: one answer for each that the planner asks about."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from launcher.memory.assess import Surroundings, assess, failure_of
from launcher.memory.estimate import Estimate
from launcher.memory.failure import Failure
from launcher.memory.formulas import FORMULA_BAND, NO_ACTIVATIONS, NOT_KNOWN, formula_trace
from launcher.memory.host import host_of
from launcher.memory.ledger import Correction, Entry, correction, too_large
from launcher.memory.peaks import completely_traced_as, traced_as
from launcher.memory.profile import Profile, per_pass
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import states_of
from launcher.memory.trace import ACTIVATIONS, Law, NotAffineError, Trace, Work
from launcher.planning.choice import Candidate
from launcher.planning.hardware import hardware_of
from launcher.planning.plan import Layout, ranks_of
from launcher.planning.source import Args, NoTraceError, Source
from launcher.planning.speed import StepTime, step_time
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe

LEAST_BAND = 0.02
"However well earlier runs agree."
_BLOCKS_AT_LEAST = 0.7
"Of a forward pass, in the blocks: what is not is an output head, mostly."
_WORTH_A_TRACE = 0.1
"Of a peak: what a loss in parts could save at most, for it to be looked at."
_DECIDE_WORK = ("activations", "checkpoint_ratio", "loss_chunks", "precision")


class _Key(NamedTuple):
    """Of a trace: the recipe it was made of, and arguments of the task."""

    recipe: Recipe
    args: Hashable


class Evaluator:
    """Of one job on one layout of a cluster. Asks the source for each thing once."""

    def __init__(
        self, source: Source, job: Job, cluster: Cluster, layout: Layout, known: Sequence[Entry] = ()
    ) -> None:
        """`known`: what earlier runs of the same family have measured."""
        self.source, self.ranks, self._known = source, ranks_of(layout), known
        self.hardware = hardware_of(cluster, self.ranks, job.env)
        about = source.about()
        in_background = job.train.async_checkpoints
        self.around = Surroundings(
            gpu=cluster.node.gpu,
            workers=job.train.workers,
            on_meta=about.on_meta,
            copies=self.ranks.on_gpu if in_background is None else in_background,
        )
        self._models: dict[Hashable, ModelShapes] = {}
        self._traces: dict[_Key, Trace] = {}
        self._works: dict[Hashable, Work] = {}
        self._lawless: set[_Key] = set()
        self._profiles: dict[Hashable, Profile] = {}
        self._speeds: dict[Recipe, float] = {}
        self.untraced: str | None = None
        "Why formulas stand for a trace."
        self._certain: dict[Hashable, Candidate] = {}

    def __call__(self, recipe: Recipe, args: Args | None = None) -> Candidate:
        if (known := self._certain.get((recipe, _key(args)))) is not None:
            return known
        model, profile = self.model(recipe, args), self._profile(recipe, args)
        estimate = self._said(recipe, assess(model, profile, recipe, self.ranks, self.around))
        return Candidate(recipe=recipe, estimate=estimate, time=self.time(recipe, args))

    def is_certain(self, recipe: Recipe, args: Args | None = None) -> bool:
        return (recipe, _key(args)) in self._certain

    def confirm(self, recipe: Recipe, args: Args | None = None) -> Candidate:
        """From here on the answer for this recipe: of a complete trace of its very micro-batch, and with what
        the model of the allocator reserves."""
        trace = self._ask(completely_traced_as(recipe), args, exact=True)
        profile, model = Profile(trace, recipe), self.model(recipe, args)
        estimate = assess(model, profile, recipe, self.ranks, self.around, replayed=True)
        estimate = self._said(recipe, estimate)
        candidate = Candidate(recipe=recipe, estimate=estimate, time=self.time(recipe, args))
        self._certain[recipe, _key(args)] = candidate
        return candidate

    def failure(self, recipe: Recipe) -> Failure | None:
        """Where it runs out of the GPU's memory; None: nowhere."""
        gpu = self.around.gpu
        if gpu is None or not self.ranks.on_gpu:
            return None
        profile = Profile(self._ask(completely_traced_as(recipe), None, exact=True), recipe)
        return failure_of(self.model(recipe), profile, recipe, self.ranks, gpu)

    def least(self, recipe: Recipe) -> tuple[int, int]:
        """(bytes on a GPU, bytes of a node's host memory) of the states alone."""
        model, around = self.model(recipe), self.around
        on_host = host_of(
            model, recipe, self.ranks, workers=around.workers, on_meta=around.on_meta, copies=around.copies
        )
        return states_of(model, recipe, self.ranks).gpu.total, sum(on_host.values())

    def speed(self, recipe: Recipe) -> float:
        """Samples per second that it does not pass, whether it fits or not, told from the trace of a step
        that recomputes nothing; 0 where nothing is known of the hardware."""
        if self.hardware is None:
            return 0.0
        if recipe not in self._speeds:
            work = self._least_work(recipe)
            known = any(work.forward_flops)
            self._speeds[recipe] = self._time(recipe, work, None).samples_per_second if known else 0.0
        return self._speeds[recipe]

    def time(self, recipe: Recipe, args: Args | None = None) -> StepTime | None:
        """None where nothing is known of the hardware's speed, or of what is computed."""
        if self.hardware is None:
            return None
        work = self._work(recipe, args)
        return self._time(recipe, work, args) if any(work.forward_flops) else None

    def _time(self, recipe: Recipe, work: Work, args: Args | None) -> StepTime:
        assert self.hardware is not None
        moved = 0.0
        if recipe.activations == "offload":
            moved = per_pass(self._trace(_keeping(recipe), args), ACTIVATIONS).at(recipe.micro_batch_size)
        return step_time(recipe, work, self.model(recipe, args), self.ranks, self.hardware, offloaded=moved)

    def model(self, recipe: Recipe, args: Args | None = None) -> ModelShapes:
        key = (recipe.precision, _key(args))
        if key not in self._models:
            self._models[key] = self.source.shapes(recipe.precision, args)
        return self._models[key]

    def _profile(self, recipe: Recipe, args: Args | None) -> Profile:
        if recipe.loss_chunks > 1:
            whole = self._profile(recipe.model_copy(update={"loss_chunks": 1}), args)
            if self._most_outside_blocks(whole, recipe) < _WORTH_A_TRACE:
                return whole  # a loss in parts saves a part of what is there
        key = (self._traced(recipe, args), Profile.kind(recipe))
        if key not in self._profiles:
            self._profiles[key] = Profile(self._trace(recipe, args), recipe)
        return self._profiles[key]

    def _most_outside_blocks(self, profile: Profile, recipe: Recipe) -> float:
        """The share of the peaks that is outside of the blocks, where the logits are."""
        micro, shares = recipe.micro_batch_size, [0.0]
        held = states_of(self.model(recipe), recipe, self.ranks).gpu.total
        for moments in profile.highest.values():
            at = max(moments, key=lambda one: one.at(micro), default=None)
            if at is not None:
                shares.append(profile.outside_blocks(at.event).at(micro) / (held + at.at(micro)))
        return max(shares)

    def _work(self, recipe: Recipe, args: Args | None) -> Work:
        """FLOPs and traffic are a rank's own, so any sharding's trace tells them; and nothing is computed
        again for activations that wait on the host."""
        if recipe.activations == "offload":
            recipe = _keeping(recipe)
        if (recipe.loss_chunks > 1) and self._traced(recipe, args) not in self._traces:
            recipe = recipe.model_copy(update={"loss_chunks": 1})  # but for the head, computed once more
        wanted = traced_as(recipe)
        key = (_key(args), *(getattr(wanted, name) for name in _DECIDE_WORK))
        if key not in self._works:
            self._works[key] = self._trace(recipe, args).work
        return self._works[key]

    def _least_work(self, recipe: Recipe) -> Work:
        work = self._work(_keeping(recipe).model_copy(update={"loss_chunks": 1}), None)
        if recipe.activations != "checkpoint":
            return work
        flops, again = work.backward_flops, _BLOCKS_AT_LEAST * recipe.checkpoint_ratio
        more = Law(*(b + again * f for b, f in zip(flops, work.forward_flops, strict=True)))
        return work._replace(backward_flops=more)

    def _trace(self, recipe: Recipe, args: Args | None) -> Trace:
        key = self._traced(recipe, args)
        if key not in self._traces:
            try:
                self._traces[key] = self._ask(key.recipe, args, exact=key in self._lawless)
            except NotAffineError:
                self._lawless.add(key)
                return self._trace(recipe, args)
        return self._traces[key]

    def _ask(self, recipe: Recipe, args: Args | None, *, exact: bool) -> Trace:
        """The source, or where it has no trace the formulas."""
        if self.untraced is None:
            try:
                return self.source.trace(recipe, self.ranks, args, exact=exact)
            except NoTraceError as error:
                self.untraced = str(error)
        tokens = self.source.about(args).tokens_per_sample
        return formula_trace(self.model(recipe, args), recipe, self.ranks, tokens, complete=exact)

    def learnt(self, recipe: Recipe) -> Correction | None:
        """From earlier runs with the same arguments of the task."""
        return correction(self._known, recipe) if self._known else None

    def _said(self, recipe: Recipe, estimate: Estimate) -> Estimate:
        if self.untraced is not None:
            activations = (NO_ACTIVATIONS,) if self.source.about().tokens_per_sample is None else ()
            missing = (*activations, *NOT_KNOWN, *estimate.not_modelled)
            update = {"basis": "formulas", "band": FORMULA_BAND, "not_modelled": missing}
            return estimate.model_copy(update=update)
        if (learnt := self.learnt(recipe)) is not None:
            band = estimate.band if learnt.band is None else max(LEAST_BAND, learnt.band)
            estimate = estimate.model_copy(update={"correction": learnt.factor, "band": band})
        card = self.around.gpu.memory if self.around.gpu is not None else None
        if card is not None and too_large(self._known, recipe, self.ranks.world, card):
            least = card / estimate.reserved  # it ran out of memory before, whatever was predicted
            estimate = estimate.model_copy(update={"correction": max(estimate.correction, least)})
        return estimate

    def _traced(self, recipe: Recipe, args: Args | None) -> _Key:
        law = _Key(traced_as(recipe), _key(args))
        if law not in self._lawless:
            return law
        alone = _Key(completely_traced_as(recipe), law.args)
        self._lawless.add(alone)
        return alone


def _keeping(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"activations": "keep", "checkpoint_ratio": 1.0})


def _key(args: Mapping[str, Any] | None) -> Hashable:
    return repr(sorted((args or {}).items()))
