"""The shapes and traces of one model, with formulas in place of traces if it cannot be traced."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from launcher.memory.formulas import formula_trace
from launcher.memory.peaks import completely_traced_as, peaks_of, traced_as
from launcher.memory.recipe_trace import Kept, Profile, kept_of, profile_of, stages_alone, work_of
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks
from launcher.memory.trace import NotAffineError, Trace, Work
from launcher.planning.cached import from_store
from launcher.planning.model_source import Args, NotCompiledError, NoTraceError, Source
from launcher.planning.plan import NotEstimatedError
from launcher.spec.errors import Problem
from launcher.spec.mesh import UNCUT, Part, in_buckets, model_parallel
from launcher.spec.pipeline_schedule import held_beside
from launcher.spec.recipe import SHARDED, Recipe, Sharding

_WORTH_A_TRACE = 0.1
"A loss in parts is traced only if it could save this share of the highest peak."


class _Key(NamedTuple):
    """The key of a trace: the recipe that was traced, and the task's arguments."""

    recipe: Recipe
    args: Hashable


class Traces:
    """Asks the source for each shape and trace at most once, when an answer needs it.

    `plain`: the sharding to trace for figures that do not depend on sharding. `every_gradient`: DDP refuses a
    trained parameter without a gradient.
    """

    def __init__(
        self, source: Source, ranks: Ranks, plain: Sharding, *, every_gradient: bool = False
    ) -> None:
        self.source, self.ranks, self.plain, self.every_gradient = source, ranks, plain, every_gradient
        self._models: dict[Hashable, ModelShapes] = {}
        self._traces: dict[_Key, tuple[Trace, ...]] = {}
        self._passes: dict[Hashable, tuple[Work, Kept]] = {}
        self._without_gradient: dict[Hashable, tuple[str, ...]] = {}
        "Whether FSDP shards the model, and the task's arguments -> names of parameters."
        self._not_affine: set[_Key] = set()
        self._profiles: dict[Hashable, Profile] = {}
        self.untraced: str | None = None
        "Why formulas replace traces; None if the model can be traced."
        self.uncompiled: str | None = None
        "Why traces with `compile: true` are of the uncompiled step; None if they are not."

    def model(self, recipe: Recipe, args: Args | None = None) -> ModelShapes:
        part = Part.of(recipe, self.ranks.stage)
        key = (recipe.precision, part, args_key(args))
        if key not in self._models:
            self._models[key] = self.source.shapes(recipe.precision, args, part)
        return self._models[key]

    def model_with_gradients(self, recipe: Recipe, args: Args | None = None) -> ModelShapes:
        """Return the shapes, with the gradients that a traced step computes."""
        if self.every_gradient and in_buckets(recipe):
            return self.model(recipe, args)
        return self.model(recipe, args).without_gradients(self.without_gradient(recipe, args))

    def without_gradient(self, recipe: Recipe, args: Args | None = None) -> tuple[str, ...]:
        """Return the names of the trained parameters that a traced step gives no gradient.

        They are the same under each recipe, except that FSDP makes gradients of zeros
        (set_reduce_scatter_unused_params). So two steps of the whole model answer for all recipes.
        """
        sharded = recipe.sharding in SHARDED
        key = sharded, args_key(args)
        if key not in self._without_gradient:
            plain = self.plain if sharded == (self.plain in SHARDED) else recipe.sharding
            update = {**UNCUT, "sharding": plain, "loss_chunks": 1, "compile": False}
            whole = recipe.model_copy(update=update)
            cut = model_parallel(recipe) > 1
            traces = Traces(self.source, replace(self.ranks, stage=0), plain) if cut else self

            def make() -> list[str]:
                with suppress(NotEstimatedError):
                    [trace] = traces._trace(whole, args)
                    trained = (p.name for p in traces.model(whole, args).trained)
                    return [name for name in trained if name not in trace.complete]
                return []

            name = ["without gradient", whole.model_dump(), args, asdict(traces.ranks)]
            names = tuple(from_store(self.source, name, make, list))
            self._without_gradient[key] = names
        return self._without_gradient[key]

    def profile(self, recipe: Recipe, args: Args | None = None) -> Profile:
        if recipe.loss_chunks > 1:
            whole = self.profile(recipe.model_copy(update={"loss_chunks": 1}), args)
            if self._most_saved(whole, recipe, args) < _WORTH_A_TRACE:
                return whole
        key = (self._traced(recipe, args), Profile.key(recipe), held_beside(recipe, self.ranks.stage))
        if key not in self._profiles:
            self._profiles[key] = self._adapted(self._trace(recipe, args), recipe, args)
        return self._profiles[key]

    def least(self, recipe: Recipe, args: Args | None = None) -> Profile | None:
        """Return a part of the recipe's profile, from an existing trace; None if there is none.

        The trace is of a step that keeps all activations. Apart from activations, every other step with this
        sharding allocates the same, and recomputation allocates more. Exceptions are a loss in parts, and
        offload and compression: they free all that a block keeps, such as its input, which a module outside
        of it may have allocated.
        """
        keeps = keeping(recipe).model_copy(update={"loss_chunks": 1})
        if recipe.compile or self.untraced is not None or not self.has(keeps, args):
            return None
        profile = self.profile(keeps, args)
        all_leave = recipe.activations in ("offload", "compress") or recipe.loss_chunks > 1
        return (profile.of_blocks if all_leave else profile).beside_blocks

    def has(self, recipe: Recipe, args: Args | None = None) -> bool:
        """Return whether the recipe has been traced."""
        return self._traced(recipe, args) in self._traces

    def refusal(self, recipe: Recipe) -> str | None:
        """Return why the source cannot trace the recipe. None if it can, or if formulas do."""
        key = self._traced(recipe, None)
        if self.untraced is None and key not in self._traces:
            try:
                with suppress(NotAffineError):
                    self._traces[key] = self._traced_by_source(
                        key.recipe, None, exact=key in self._not_affine
                    )
            except NoTraceError as error:
                return str(error)
        return None

    def complete(self, recipe: Recipe, args: Args | None = None) -> Profile:
        """Return the profile of a complete trace with the recipe's own micro-batch."""
        return self._adapted(self._from_source(completely_traced_as(recipe), args, exact=True), recipe, args)

    def _adapted(self, traces: Sequence[Trace], recipe: Recipe, args: Args | None) -> Profile:
        return profile_of(traces, self.model(recipe, args), recipe, self.ranks)

    def work(self, recipe: Recipe, args: Args | None = None) -> Work:
        """Return a rank's FLOPs and memory traffic, which are the same for every sharding.

        Offloaded activations are not recomputed, so `activations: offload` counts as `keep`. With
        `compile: true` this is the uncompiled step: launcher.planning.speed accounts for what fusion saves.
        """
        if recipe.activations == "budget":
            return self._work_within_budget(recipe, args)
        recipe = recipe.model_copy(update={"compile": False})
        return self._pass(keeping(recipe) if recipe.activations == "offload" else recipe, args)[0]

    def _work_within_budget(self, recipe: Recipe, args: Args | None) -> Work:
        """Return the FLOPs of the compiled step, which recomputes as its partitioner decides.

        The traffic is from the step without recomputation: what is cheap to compute again is in the same
        kernels.
        """
        work = self.work(keeping(recipe), args)
        compiled = self._pass(recipe, args)[0]
        if self.uncompiled is not None or self.untraced is not None:
            return work
        flops = {"forward_flops": compiled.forward_flops, "backward_flops": compiled.backward_flops}
        return work._replace(**flops)

    def kept(self, recipe: Recipe, args: Args | None = None) -> Kept:
        """Return the bytes kept for the backward pass, on GPU and host, with the loss in one part."""
        return self._pass(recipe.model_copy(update={"loss_chunks": 1}), args)[1]

    def kept_under(self, recipe: Recipe, args: Args | None = None) -> Kept:
        """Like `kept`, under the recipe's sharding: autocast keeps copies of weights, while FSDP gathers them
        in 16 bit."""
        if (recipe.sharding in SHARDED) == (self.plain in SHARDED):
            return self.kept(recipe, args)
        traces = self._trace(recipe.model_copy(update={"loss_chunks": 1}), args)
        return kept_of(traces, self.model(recipe, args))

    def _pass(self, recipe: Recipe, args: Args | None) -> tuple[Work, Kept]:
        """Return the figures under the plain sharding. For a loss in parts, use its own trace if it
        exists."""
        plain = recipe.model_copy(update={"sharding": self.plain})
        if recipe.loss_chunks > 1:
            traced = (each for each in (recipe, plain) if self.has(each, args))
            # Without such a trace, take the loss in one part. This leaves out the head's recomputation.
            plain = next(traced, plain.model_copy(update={"loss_chunks": 1}))
        traces = self._trace(plain, args)
        key = self._traced(plain, args)  # with the micro-batch, if the trace is not affine
        if key not in self._passes:
            self._passes[key] = work_of(traces), kept_of(traces, self.model(plain, args))
        return self._passes[key]

    def _most_saved(self, whole: Profile, recipe: Recipe, args: Args | None) -> float:
        """Return an upper bound of the share of the highest peak that a loss in parts saves.

        The bound is everything outside of the blocks, which includes the logits.
        """
        ranks = replace(self.ranks, on_gpu=True)

        def make() -> float:
            of_all, of_blocks = (
                max(peak.allocated for peak in peaks_of(profile, recipe, ranks))
                for profile in (whole, whole.of_blocks)
            )
            return 1 - of_blocks / of_all

        return from_store(self.source, ["most saved", recipe.model_dump(), args, asdict(ranks)], make, float)

    def _trace(self, recipe: Recipe, args: Args | None) -> tuple[Trace, ...]:
        """Return the trace of each stage that the rank has; without a pipeline, the trace of the model."""
        key = self._traced(recipe, args)
        if key not in self._traces:
            try:
                self._traces[key] = self._from_source(key.recipe, args, exact=key in self._not_affine)
            except NotAffineError:
                self._not_affine.add(key)
                return self._trace(recipe, args)
        return self._traces[key]

    def _from_source(self, recipe: Recipe, args: Args | None, *, exact: bool) -> tuple[Trace, ...]:
        """Return the source's traces, or the formulas' trace if there is none."""
        if self.untraced is None:
            try:
                return self._traced_by_source(recipe, args, exact=exact)
            except NoTraceError as error:
                self.untraced = str(error)
        about = self.source.about(args)
        if model_parallel(recipe) > 1 or not about.linear:  # the formulas do not know such a model
            message = f"not estimated, because the step cannot be traced: {self.untraced}"
            if not about.linear:
                message += "; formulas know only linear layers, embeddings and norms"
            raise NotEstimatedError([Problem("the job", "recipe", message)])
        return (
            formula_trace(
                self.model(recipe, args), recipe, self.ranks, about.tokens_per_sample, complete=exact
            ),
        )

    def _traced_by_source(self, recipe: Recipe, args: Args | None, *, exact: bool) -> tuple[Trace, ...]:
        if self.uncompiled is not None:
            recipe = recipe.model_copy(update={"compile": False})
        try:
            alone = stages_alone(recipe, self.ranks)
            return tuple(self.source.trace(stage, ranks, args, exact=exact) for stage, ranks in alone)
        except NotCompiledError as error:
            self.uncompiled = str(error)
            return self._traced_by_source(recipe, args, exact=exact)

    def _traced(self, recipe: Recipe, args: Args | None) -> _Key:
        affine = _Key(traced_as(recipe), args_key(args))
        if affine not in self._not_affine:
            return affine
        alone = _Key(completely_traced_as(recipe), affine.args)
        self._not_affine.add(alone)
        return alone


def keeping(recipe: Recipe) -> Recipe:
    update = {"activations": "keep", "checkpoint_ratio": 1.0, "activation_budget": 1.0}
    return recipe.model_copy(update=update)


def args_key(args: Mapping[str, Any] | None) -> Hashable:
    return repr(sorted((args or {}).items()))
