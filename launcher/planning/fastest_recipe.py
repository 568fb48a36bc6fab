"""Choose the fastest recipe that fits, and explain why the others were not chosen."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from launcher.memory.estimate import Estimate
from launcher.planning.space import Space
from launcher.planning.speed import StepTime
from launcher.spec.quantities import format_bytes
from launcher.spec.recipe import Recipe
from launcher.spec.recipe_rules import as_yaml
from launcher.spec.value import Value

if TYPE_CHECKING:
    from launcher.spec.cluster import Cluster
    from launcher.spec.job import Job

ANOTHER_OPTIMIZER = 1.2
"Speed-up that justifies another optimizer than the default one, since this changes the trained model."


class Candidate(Value):
    recipe: Recipe
    estimate: Estimate
    time: StepTime | None
    "None if the speed of the hardware is unknown."

    @property
    def speed(self) -> float:
        """Samples per second; 0 if unknown."""
        return self.time.samples_per_second if self.time is not None else 0.0


class Evaluate(Protocol):
    def __call__(self, recipe: Recipe, args: Mapping[str, Any] | None = None) -> Candidate:
        """Return the memory and the speed of a recipe. `args`: task arguments that differ from the job's."""


class Capacity(Value):
    """Available bytes. None: unknown or unlimited."""

    card: int | None = None
    "Memory of one GPU. The name is a key in the output of `launcher plan --json`."
    host: int | None = None
    "Host memory of one node."

    @classmethod
    def of(cls, job: Job, cluster: Cluster, *, on_gpu: bool) -> Capacity:
        """Return the memory that the profile and the job declare."""
        gpu = cluster.node.gpu
        return cls(
            card=gpu.memory if gpu is not None and on_gpu else None,
            host=job.resources.memory_per_node or cluster.node.memory,
        )

    def is_unknown_for(self, recipe: Recipe) -> bool:
        """Whether nothing is known of the host memory that a recipe offloads to."""
        return self.host is None and recipe.offloads

    def misfit(self, estimate: Estimate) -> str | None:
        """Return what does not fit and by how much; None if the estimate plus its error band fits."""
        most = estimate.needed * (1 + estimate.band)
        if self.card is not None and most > self.card:
            return (
                f"needs {format_bytes(estimate.needed)} +- {estimate.band:.0%} on the GPU, "
                f"{format_bytes(most - self.card)} more than it has{self._slow_note(estimate)}"
            )
        if self.host is not None and estimate.host_per_node > self.host:
            return (
                f"needs {format_bytes(estimate.host_per_node)} of host memory per node, "
                f"{format_bytes(estimate.host_per_node - self.host)} more than it has"
            )
        return None

    def _slow_note(self, estimate: Estimate) -> str:
        """Return a note if the tensors alone fit, but not together with the memory that the allocator
        keeps."""
        tensors = estimate.allocated * estimate.correction if estimate.peaks else math.inf
        if self.card is None or not tensors + sum(estimate.overhead.values()) <= self.card < estimate.needed:
            return ""
        return "; its tensors alone fit, so it may run slowly: the allocator would free its cache and retry"


class Loser(Value):
    """A recipe that was not chosen."""

    recipe: Recipe
    why: str
    candidate: Candidate | None = None
    "None if it was excluded without an estimate."


class Choice(Value):
    chosen: Candidate | None
    "None if nothing fits."
    reason: str
    losers: tuple[Loser, ...]
    "Each with the largest micro-batch that fits, or with the smallest one if none fits."
    lines: tuple[str, ...] = ()
    "Further lines of the explanation."

    def explain(self) -> tuple[str, ...]:
        """Explain the choice: one line per field, with the recipes that differ only in that field."""
        if self.chosen is None:
            return (self.reason, *self.lines)
        lines: dict[str, dict[str, list[str]]] = {}
        for loser in self.losers:
            changes = _differences(loser.recipe, self.chosen.recipe)
            for name, new in changes.items() if len(changes) == 1 else ():
                lines.setdefault(name, {}).setdefault(loser.why, []).append(as_yaml(new))
        compared = (
            f"{name}: " + "; ".join(f"{', '.join(values)} {why}" for why, values in whys.items())
            for name, whys in lines.items()
        )
        return (self.reason, *compared, *self.lines)


class Bounds(NamedTuple):
    """Bounds on the memory and speed of recipes, which are faster to compute than an estimate."""

    least: Callable[[Recipe], tuple[int, int]]
    """Lower bound of the bytes on a GPU and in a node's host memory, for any micro-batch: the states, in
    closed form."""
    speed: Callable[[Recipe], float]
    "Upper bound of samples per second, for any micro-batch, whether it fits or not; 0 if unknown."
    at_least: Callable[[Recipe], Estimate]
    "Lower bound of the memory for the recipe's own micro-batch, from existing traces."
    traces_for: Callable[[Recipe], bool]
    "Whether `roughly` has to trace a step for the recipe."
    roughly: Callable[[Recipe], Candidate]
    "The speed and a lower bound of the memory, for the recipe's own micro-batch."


class _Contender(NamedTuple):
    """A recipe that may win. The smallest in the order of the fields is examined next."""

    unknown_host: bool
    "It offloads, and the host memory of a node is unknown."
    other_optimizer: bool
    slowness: float
    "Negative upper bound of its speed; the negative speed once `found` is set."
    place: int
    "Index in the space. Among equally fast recipes, the first one gives up least and wins."
    recipe: Recipe
    sized: bool = False
    "True if the bound covers only micro-batches that may fit."
    found: Candidate | None = None
    "The largest micro-batch that fits."
    above: Loser | None = None
    "The next larger micro-batch, which does not fit."


def choose(
    space: Space,
    evaluate: Evaluate,
    capacity: Capacity,
    bounds: Bounds,
    *,
    nearest: bool = True,
    than: Candidate | None = None,
) -> Choice:
    """Return the recipe with the most predicted samples per second among those that fit.

    Computes closed-form bounds for every recipe, and rough bounds for those that can still win. Calls
    `evaluate` for the contender with the highest bound, until no other contender can be faster. `nearest`: if
    nothing fits, estimate the recipe that is nearest to fitting. Otherwise its lower bound is returned.
    `than`: a recipe of another space, which is returned if none is better.
    """
    losers, contenders = _split_by_states(space, capacity, bounds)
    default, total = space.base.optimizer, len(contenders) + len(losers)
    fitting = [than] if than is not None else []
    misfits: list[Candidate] = []
    best = than
    above: Loser | None = None
    heapq.heapify(contenders)
    while contenders:
        contender = heapq.heappop(contenders)
        recipe = contender.recipe
        wins = best is None or (
            contender.unknown_host <= capacity.is_unknown_for(best.recipe)
            and _beats(-contender.slowness, recipe, best, default)
        )
        if contender.found is not None:
            fitting.append(contender.found)
            best, above = (contender.found, contender.above) if wins else (best, above)
        elif best is not None and not wins:
            unknown = contender.unknown_host > capacity.is_unknown_for(best.recipe)
            why = _UNKNOWN_HOST if unknown else _no_faster(-contender.slowness, best, default)
            losers.append(Loser(recipe=recipe, why=why))
        elif contender.sized:
            search = fastest_that_fits if recipe.pipeline > 1 else largest_that_fits
            found, misfit = search(space.sizes(recipe), evaluate, capacity)
            if found is not None:
                heapq.heappush(
                    contenders, contender._replace(slowness=-found.speed, found=found, above=misfit)
                )
            elif misfit is not None:
                losers.append(misfit)
        else:
            sizes = space.sizes(recipe)
            if (too_large := _without_trace(sizes, space, evaluate, capacity, bounds)) is not None:
                misfits.append(too_large)
                continue
            rough = [bounds.roughly(size) for size in sizes]
            may_fit = [each.speed for each in rough if capacity.misfit(each.estimate) is None]
            if may_fit:
                heapq.heappush(contenders, contender._replace(slowness=-max(may_fit), sized=True))
            else:
                misfits.append(rough[0])
    if best is None:
        losers += _nearest(misfits, evaluate, bounds, capacity) if nearest else _too_large(misfits, capacity)
        return Choice(chosen=None, reason=_nothing_fits(losers, capacity), losers=tuple(losers))
    losers += [loser.model_copy(update={"candidate": None}) for loser in _too_large(misfits, capacity)]
    losers += [above] if above is not None else []
    losers += [
        Loser(recipe=other.recipe, why=_slower(other, best, default), candidate=other)
        for other in fitting
        if other != best
    ]
    return Choice(chosen=best, reason=_reason(best, default, fitting, total), losers=tuple(losers))


def _split_by_states(
    space: Space, capacity: Capacity, bounds: Bounds
) -> tuple[list[Loser], list[_Contender]]:
    """Split the recipes into those whose states alone do not fit, nearest first, and the others."""
    too_large: list[tuple[float, Loser]] = []
    contenders: list[_Contender] = []
    for place, recipe in enumerate(space.combinations):
        on_gpu, on_host = bounds.least(recipe)
        of_gpu = on_gpu / capacity.card if capacity.card is not None else 0.0
        of_host = on_host / capacity.host if capacity.host is not None else 0.0
        if capacity.host is not None and of_host > max(1, of_gpu):
            why = f"needs {format_bytes(on_host)} of {format_bytes(capacity.host)} of host memory"
            too_large.append((of_host, Loser(recipe=recipe, why=why)))
        elif of_gpu > 1:
            why = f"needs {format_bytes(on_gpu)} on each GPU for model states alone"
            too_large.append((of_gpu, Loser(recipe=recipe, why=why)))
        else:
            other = recipe.optimizer != space.base.optimizer
            unknown = capacity.is_unknown_for(recipe)
            contenders.append(_Contender(unknown, other, -bounds.speed(recipe), place, recipe))
    return [loser for _, loser in sorted(too_large, key=lambda pair: pair[0])], contenders


def _keeps_more(recipe: Recipe, space: Space) -> bool:
    """Return whether the blocks keep their inputs, as with `checkpoint`, and more."""
    return recipe.activations in ("selective", "every-second") and "activations" in space.axes


def _without_trace(
    sizes: Sequence[Recipe], space: Space, evaluate: Evaluate, capacity: Capacity, bounds: Bounds
) -> Candidate | None:
    """Return the smallest micro-batch, with a lower bound of its memory, if no micro-batch fits.

    None if one may fit, as far as that is known without a trace of its activations.
    """
    ends = sizes[0], sizes[-1]  # the largest one may need less than the others: `largest_that_fits`

    def bound(least: Callable[[Recipe], Estimate]) -> Estimate | None:
        """Return the bound of the smallest micro-batch, or None if a micro-batch may fit."""
        if any(capacity.misfit(least(end)) is None for end in ends):
            return None
        return least(ends[0]).model_copy(update={"peaks": ()})  # they are not the recipe's

    estimate = bound(bounds.at_least)
    if estimate is None and _keeps_more(sizes[0], space) and bounds.traces_for(sizes[0]):
        # A trace of `checkpoint` answers for these, too, and the ladder needs it in any case.
        estimate = bound(
            lambda size: evaluate(size.model_copy(update={"activations": "checkpoint"})).estimate
        )
    return Candidate(recipe=sizes[0], estimate=estimate, time=None) if estimate is not None else None


def _too_large(misfits: Sequence[Candidate], capacity: Capacity) -> list[Loser]:
    """Return the recipes whose lower bound of memory does not fit."""
    return [
        Loser(recipe=c.recipe, why=f"{capacity.misfit(c.estimate)}, as a lower bound", candidate=c)
        for c in misfits
    ]


def _nearest(
    misfits: Sequence[Candidate], evaluate: Evaluate, bounds: Bounds, capacity: Capacity
) -> list[Loser]:
    """Estimate the recipe that is nearest by rough bounds, if nothing fits."""
    heap = [(misfit.estimate.needed, place, False) for place, misfit in enumerate(misfits)]
    heapq.heapify(heap)
    while heap:
        needed, place, rough = heapq.heappop(heap)
        recipe = misfits[place].recipe
        if not rough:
            heapq.heappush(heap, (max(needed, bounds.roughly(recipe).estimate.needed), place, True))
            continue
        candidate = evaluate(recipe)
        why = capacity.misfit(candidate.estimate)
        return [Loser(recipe=recipe, why=why, candidate=candidate)] if why is not None else []
    return []


def largest_that_fits(
    sizes: Sequence[Recipe], evaluate: Evaluate, capacity: Capacity
) -> tuple[Candidate | None, Loser | None]:
    """Return the largest micro-batch that fits, and the next larger one, which does not.

    `sizes`: one recipe in ascending micro-batch. Memory grows with the micro-batch, except for the largest
    one: it may need no accumulation, and so no gradients between micro-batches. It is tried first.
    """
    found: Candidate | None = None
    misfit: Loser | None = None
    # `low` fits or is before the first; `high` does not fit or is after the last.
    low, high, middle = -1, len(sizes), len(sizes) - 1
    while high - low > 1:
        candidate = evaluate(sizes[middle])
        why = capacity.misfit(candidate.estimate)
        if why is None:
            low, found = middle, candidate
        else:
            high, misfit = middle, Loser(recipe=candidate.recipe, why=why, candidate=candidate)
        middle = (low + high) // 2
    return found, misfit


def fastest_that_fits(
    sizes: Sequence[Recipe], evaluate: Evaluate, capacity: Capacity
) -> tuple[Candidate | None, Loser | None]:
    """Like `largest_that_fits` for a pipeline, whose bubble grows with the micro-batch."""
    found: Candidate | None = None
    for size in sizes:
        candidate = evaluate(size)
        why = capacity.misfit(candidate.estimate)
        if why is not None:
            return found, Loser(recipe=candidate.recipe, why=why, candidate=candidate)
        if found is None or candidate.speed > found.speed:
            found = candidate
    return found, None


def _beats(speed: float, recipe: Recipe, best: Candidate, default: str) -> bool:
    """Return whether a recipe of this speed is better than the best so far.

    If only the best has the default optimizer, the recipe must be ANOTHER_OPTIMIZER times as fast.
    """
    other = recipe.optimizer != default and best.recipe.optimizer == default
    return speed > best.speed * (ANOTHER_OPTIMIZER if other else 1.0)


def _slower(loser: Candidate, best: Candidate, default: str) -> str:
    if not best.speed:
        return f"fits, {_GIVES_UP_MORE}"
    if loser.speed > 1.005 * best.speed:
        return f"fits, {loser.speed / best.speed - 1:.0%} faster: {_too_little(default)}"
    if loser.speed > 0.995 * best.speed:
        return "fits and is as fast"
    return f"fits, {1 - loser.speed / best.speed:.0%} slower: {loser.speed:.3g} samples/s"


def _no_faster(bound: float, best: Candidate, default: str) -> str:
    if not best.speed:
        return _GIVES_UP_MORE
    if bound > 1.005 * best.speed:
        return f"at most {bound / best.speed - 1:.0%} faster: {_too_little(default)}"
    if bound > 0.995 * best.speed:
        return "no faster at any micro-batch"
    return f"at least {1 - bound / best.speed:.0%} slower at any micro-batch"


_UNKNOWN_HOST = "offloads to host memory, and `node.memory` is not set in the profile"
_GIVES_UP_MORE = "gives up more, and the speed of this hardware is unknown"


def _too_little(default: str) -> str:
    return f"not enough to replace the optimizer {default}"


def _reason(best: Candidate, default: str, fitting: Sequence[Candidate], total: int) -> str:
    estimate = best.estimate
    pace = f", {best.speed:.3g} samples/s predicted" if best.speed else ""
    superlative = "the fastest that fits" if best.speed else "the one that fits and gives up least"
    which = f"{superlative}, of {total} recipes" if total > 1 else "the only recipe"
    words = f"{which}: {format_bytes(estimate.needed)} +- {estimate.band:.0%} on the GPU{pace}"
    if best.recipe.optimizer == default:
        return words
    speeds = [c.speed for c in fitting if c.recipe.optimizer == default]
    why = f"it is {best.speed / max(speeds):.2g} times as fast as" if speeds else "nothing fits with"
    return f"{words}; {best.recipe.optimizer} because {why} {default}"


def _nothing_fits(losers: Sequence[Loser], capacity: Capacity) -> str:
    tried = [loser.candidate for loser in losers if loser.candidate is not None]
    if not tried:
        return f"nothing fits: the nearest {losers[0].why}" if losers else "nothing fits: no recipe is valid"
    nearest = min(tried, key=lambda candidate: candidate.estimate.needed)
    fields = ("sharding", "offload", "optimizer", "activations", "micro_batch_size")
    named = ", ".join(f"{name}: {as_yaml(getattr(nearest.recipe, name))}" for name in fields)
    return f"nothing fits; {named} is nearest and {capacity.misfit(nearest.estimate)}"


def _differences(recipe: Recipe, chosen: Recipe) -> dict[str, object]:
    """Return field -> value, without the micro-batch, which follows from the other fields.

    Returns the micro-batch if nothing else differs.
    """
    changes = {name: new for name, (_, new) in recipe.changes_from(chosen).items()}
    others = {name: new for name, new in changes.items() if name not in ("micro_batch_size", "grad_accum")}
    return others or {"micro_batch_size": recipe.micro_batch_size}
