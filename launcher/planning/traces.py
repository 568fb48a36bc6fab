"""What is known of one model: its shapes, and its steps as traces or, where it cannot be traced, formulas."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from launcher.memory.formulas import formula_trace
from launcher.memory.peaks import completely_traced_as, peaks_of, traced_as
from launcher.memory.profile import Kept, Profile, kept_of
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks
from launcher.memory.trace import NotAffineError, Trace, Work
from launcher.planning.source import Args, NoTraceError, Source
from launcher.spec.recipe import SHARDED, Recipe, Sharding

_WORTH_A_TRACE = 0.1
"Of the highest peak: what a loss in parts could save at most, for it to be traced."
_DECIDE_WORK = ("activations", "checkpoint_ratio", "loss_chunks", "precision")


class _Key(NamedTuple):
    """Of a trace: the recipe it was made of, and arguments of the task."""

    recipe: Recipe
    args: Hashable


class Traces:
    """Asks the source for each thing once, and only for what an answer needs.

    `plain`: the sharding whose traces tell what does not depend on sharding.
    """

    def __init__(self, source: Source, ranks: Ranks, plain: Sharding) -> None:
        self.source, self.ranks, self.plain = source, ranks, plain
        self._models: dict[Hashable, ModelShapes] = {}
        self._traces: dict[_Key, Trace] = {}
        self._passes: dict[Hashable, tuple[Work, Kept]] = {}
        self._lawless: set[_Key] = set()
        self._profiles: dict[Hashable, Profile] = {}
        self.untraced: str | None = None
        "Why formulas stand for a trace."

    def model(self, recipe: Recipe, args: Args | None = None) -> ModelShapes:
        key = (recipe.precision, args_key(args))
        if key not in self._models:
            self._models[key] = self.source.shapes(recipe.precision, args)
        return self._models[key]

    def profile(self, recipe: Recipe, args: Args | None = None) -> Profile:
        if recipe.loss_chunks > 1:
            whole = self.profile(recipe.model_copy(update={"loss_chunks": 1}), args)
            if self._most_saved(whole, recipe, args) < _WORTH_A_TRACE:
                return whole
        key = (self._traced(recipe, args), Profile.kind(recipe))
        if key not in self._profiles:
            self._profiles[key] = Profile(self._trace(recipe, args), recipe)
        return self._profiles[key]

    def complete(self, recipe: Recipe, args: Args | None = None) -> Profile:
        """Of the recipe's very micro-batch."""
        return Profile(self._ask(completely_traced_as(recipe), args, exact=True), recipe)

    def work(self, recipe: Recipe, args: Args | None = None) -> Work:
        """FLOPs and traffic are a rank's own, so any sharding's trace tells them; and nothing is computed
        again for activations that wait on the host."""
        return self._pass(keeping(recipe) if recipe.activations == "offload" else recipe, args)[0]

    def kept(self, recipe: Recipe, args: Args | None = None) -> Kept:
        """What waits for the backward pass, on the GPU or on the host, with the loss in one part."""
        return self._pass(recipe.model_copy(update={"loss_chunks": 1}), args)[1]

    def kept_under(self, recipe: Recipe, args: Args | None = None) -> Kept:
        """The same with what the recipe's kind of sharding adds: autocast keeps copies of weights, where
        FSDP has gathered them in 16 bit."""
        if (recipe.sharding in SHARDED) == (self.plain in SHARDED):
            return self.kept(recipe, args)
        return kept_of(self._trace(recipe.model_copy(update={"loss_chunks": 1}), args))

    def _pass(self, recipe: Recipe, args: Args | None) -> tuple[Work, Kept]:
        plain = recipe.model_copy(update={"sharding": self.plain})
        if recipe.loss_chunks > 1:
            known = (one for one in (recipe, plain) if self._traced(one, args) in self._traces)
            # Where there is no such trace: but for the head, computed once more.
            plain = next(known, plain.model_copy(update={"loss_chunks": 1}))
        wanted = traced_as(plain)
        key = (args_key(args), *(getattr(wanted, name) for name in _DECIDE_WORK))
        if key not in self._passes:
            trace = self._trace(plain, args)
            self._passes[key] = trace.work, kept_of(trace)
        return self._passes[key]

    def _most_saved(self, whole: Profile, recipe: Recipe, args: Args | None) -> float:
        """The share of the highest peak that a loss in parts may save: of what is outside of the blocks,
        where the logits are."""
        model, ranks = self.model(recipe, args), Ranks(self.ranks.world, self.ranks.per_node, on_gpu=True)
        of_all, of_blocks = (
            max(peak.allocated for peak in peaks_of(model, profile, recipe, ranks))
            for profile in (whole, whole.of_blocks)
        )
        return 1 - of_blocks / of_all

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

    def _traced(self, recipe: Recipe, args: Args | None) -> _Key:
        law = _Key(traced_as(recipe), args_key(args))
        if law not in self._lawless:
            return law
        alone = _Key(completely_traced_as(recipe), law.args)
        self._lawless.add(alone)
        return alone


def keeping(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"activations": "keep", "checkpoint_ratio": 1.0})


def args_key(args: Mapping[str, Any] | None) -> Hashable:
    return repr(sorted((args or {}).items()))
