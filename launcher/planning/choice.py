"""The fastest recipe that fits, and why the others lost."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from launcher.memory.estimate import Estimate
from launcher.planning.space import Space
from launcher.planning.speed import StepTime
from launcher.spec.base import Value, format_bytes
from launcher.spec.recipe import Recipe
from launcher.spec.rules import as_yaml

ANOTHER_OPTIMIZER = 1.2
"Times as fast another optimizer than the default must be: it trains another model than the one asked for."


class Candidate(Value):
    recipe: Recipe
    estimate: Estimate
    time: StepTime | None
    "None where nothing is known of the hardware's speed."

    @property
    def speed(self) -> float:
        """Samples per second; 0 where it is not known."""
        return self.time.samples_per_second if self.time is not None else 0.0


class Evaluate(Protocol):
    def __call__(self, recipe: Recipe, args: Mapping[str, Any] | None = None) -> Candidate:
        """`args`: arguments of the task that are not the job's."""


class Room(Value):
    """Bytes that there are; None: not known, or not limited."""

    card: int | None = None
    "On one GPU."
    host: int | None = None
    "On one node."

    def misfit(self, estimate: Estimate) -> str | None:
        """What does not fit, by how much; None when all of it does, with the estimate's band to spare."""
        most = estimate.needed * (1 + estimate.band)
        if self.card is not None and most > self.card:
            return (
                f"needs {format_bytes(estimate.needed)} +- {estimate.band:.0%} on the GPU, "
                f"{format_bytes(most - self.card)} more than there is"
            )
        if self.host is not None and estimate.host_per_node > self.host:
            return (
                f"needs {format_bytes(estimate.host_per_node)} of host memory per node, "
                f"{format_bytes(estimate.host_per_node - self.host)} more than there is"
            )
        return None


class Loser(Value):
    """A recipe that was not chosen."""

    recipe: Recipe
    why: str
    candidate: Candidate | None = None
    "None when something simpler than its estimate decided."


class Choice(Value):
    chosen: Candidate | None
    "None when nothing fits."
    reason: str
    losers: tuple[Loser, ...]
    "Each with the largest micro-batch that fits, or the smallest, which does not."

    def explain(self) -> tuple[str, ...]:
        """Why this one and not its neighbours: a line for each field, with those that differ in it alone."""
        if self.chosen is None:
            return (self.reason,)
        lines: dict[str, dict[str, list[str]]] = {}
        for loser in self.losers:
            changes = _differences(loser.recipe, self.chosen.recipe)
            for name, new in changes.items() if len(changes) == 1 else ():
                lines.setdefault(name, {}).setdefault(loser.why, []).append(as_yaml(new))
        told = (
            f"{name}: " + "; ".join(f"{', '.join(values)} {why}" for why, values in whys.items())
            for name, whys in lines.items()
        )
        return (self.reason, *told)


class Bounds(NamedTuple):
    """What can be said of recipes without knowing all of their memory."""

    least: Callable[[Recipe], tuple[int, int]]
    """Bytes that it needs on a GPU, and in the host memory of a node, with any micro-batch: its states, in
    closed form."""
    speed: Callable[[Recipe], float]
    """Samples per second that no micro-batch of a recipe passes, whether it fits or not; 0 where nothing is
    known."""
    roughly: Callable[[Recipe], Candidate]
    "Of its very micro-batch: its speed, and no more memory than it needs."


class _Hope(NamedTuple):
    """A recipe that may win. The first in order is looked at next."""

    other_optimizer: bool
    slowness: float
    "Negative bound of its speed, or its speed."
    place: int
    "In the space: of recipes that are equally fast the one that loses least comes first, and wins."
    rest: Recipe
    sized: bool = False
    "The bound is that of the micro-batches that may fit."
    found: Candidate | None = None
    "The largest that fits, whose speed it is."
    above: Loser | None = None
    "The next larger one, which does not."


def choose(space: Space, evaluate: Evaluate, room: Room, bounds: Bounds) -> Choice:
    """Rank by predicted samples per second among what fits.

    The bounds in closed form are asked of every recipe, the rough ones of those that may win by these, and
    `evaluate` of the one that may be the fastest of all, until nothing else can be faster.
    """
    losers, hopes = _first_look(space, room, bounds)
    default, of = space.base.optimizer, len(hopes) + len(losers)
    fitting: list[Candidate] = []
    misfits: list[Candidate] = []
    best: Candidate | None = None
    above: Loser | None = None
    heapq.heapify(hopes)
    while hopes:
        hope = heapq.heappop(hopes)
        rest, wins = hope.rest, best is None or _beats(-hope.slowness, hope.rest, best, default)
        if hope.found is not None:
            fitting.append(hope.found)
            best, above = (hope.found, hope.above) if wins else (best, above)
        elif best is not None and not wins:
            losers.append(Loser(recipe=rest, why=_no_faster(-hope.slowness, best, default)))
        elif hope.sized:
            found, misfit = largest_that_fits(space.sizes(rest), evaluate, room)
            if found is not None:
                heapq.heappush(hopes, hope._replace(slowness=-found.speed, found=found, above=misfit))
            elif misfit is not None:
                losers.append(misfit)
        else:
            asked = [bounds.roughly(one) for one in space.sizes(rest)]
            may_fit = [one.speed for one in asked if room.misfit(one.estimate) is None]
            if may_fit:
                heapq.heappush(hopes, hope._replace(slowness=-max(may_fit), sized=True))
            else:
                misfits.append(asked[0])
    if best is None:
        losers += _nearest(misfits, evaluate, room)
        return Choice(chosen=None, reason=_nothing_fits(losers, room), losers=tuple(losers))
    losers += [Loser(recipe=one.recipe, why=f"at the least {room.misfit(one.estimate)}") for one in misfits]
    losers += [above] if above is not None else []
    losers += [
        Loser(recipe=one.recipe, why=_slower(one, best, default), candidate=one)
        for one in fitting
        if one != best
    ]
    return Choice(chosen=best, reason=_reason(best, default, fitting, of), losers=tuple(losers))


def _first_look(space: Space, room: Room, bounds: Bounds) -> tuple[list[Loser], list[_Hope]]:
    """Those whose states alone do not fit, the nearest first, and the others."""
    hopeless: list[tuple[float, Loser]] = []
    hopes: list[_Hope] = []
    for place, rest in enumerate(space.rests):
        on_gpu, on_host = bounds.least(rest)
        of_card = on_gpu / room.card if room.card is not None else 0.0
        of_host = on_host / room.host if room.host is not None else 0.0
        if room.host is not None and of_host > max(1, of_card):
            why = f"takes {format_bytes(on_host)} of {format_bytes(room.host)} of host memory"
            hopeless.append((of_host, Loser(recipe=rest, why=why)))
        elif of_card > 1:
            why = f"has states of {format_bytes(on_gpu)} on each GPU alone"
            hopeless.append((of_card, Loser(recipe=rest, why=why)))
        else:
            other = rest.optimizer != space.base.optimizer
            hopes.append(_Hope(other, -bounds.speed(rest), place, rest))
    return [loser for _, loser in sorted(hopeless, key=lambda one: one[0])], hopes


def _nearest(misfits: Sequence[Candidate], evaluate: Evaluate, room: Room) -> list[Loser]:
    """When nothing fits: what the nearest by rough figures really needs."""
    if not misfits:
        return []
    candidate = evaluate(min(misfits, key=lambda one: one.estimate.needed).recipe)
    why = room.misfit(candidate.estimate)
    return [Loser(recipe=candidate.recipe, why=why, candidate=candidate)] if why is not None else []


def largest_that_fits(
    sizes: Sequence[Recipe], evaluate: Evaluate, room: Room
) -> tuple[Candidate | None, Loser | None]:
    """Of one recipe in ascending micro-batch, and the next larger one, which does not fit.

    Memory grows with the micro-batch, but for the largest one, which may do without accumulation and so
    without gradients between two micro-batches: it is asked first, by itself.
    """
    found: Candidate | None = None
    misfit: Loser | None = None
    # `low` fits or is before the first, `high` does not fit or is behind the last.
    low, high, middle = -1, len(sizes), len(sizes) - 1
    while high - low > 1:
        candidate = evaluate(sizes[middle])
        why = room.misfit(candidate.estimate)
        if why is None:
            low, found = middle, candidate
        else:
            high, misfit = middle, Loser(recipe=candidate.recipe, why=why, candidate=candidate)
        middle = (low + high) // 2
    return found, misfit


def _beats(speed: float, recipe: Recipe, best: Candidate, default: str) -> bool:
    """Whether a recipe of this speed is to be preferred to the best so far, which may be of the default
    optimizer while `recipe` is not."""
    other = recipe.optimizer != default and best.recipe.optimizer == default
    return speed > best.speed * (ANOTHER_OPTIMIZER if other else 1.0)


def _slower(loser: Candidate, best: Candidate, default: str) -> str:
    if not best.speed:
        return "fits, but gives up more; nothing is known of the speed of this hardware"
    if loser.speed > 1.005 * best.speed:
        return f"fits, {loser.speed / best.speed - 1:.0%} faster: {_too_little(default)}"
    if loser.speed > 0.995 * best.speed:
        return "fits and is as fast"
    return f"fits, {1 - loser.speed / best.speed:.0%} slower: {loser.speed:.3g} samples/s"


def _no_faster(bound: float, best: Candidate, default: str) -> str:
    if not best.speed:
        return "gives up more; nothing is known of the speed of this hardware"
    if bound > 1.005 * best.speed:
        return f"at most {bound / best.speed - 1:.0%} faster: {_too_little(default)}"
    if bound > 0.995 * best.speed:
        return "no faster, whatever fits"
    return f"at least {1 - bound / best.speed:.0%} slower, whatever fits"


def _too_little(default: str) -> str:
    return f"too little to train with another optimizer than {default}"


def _reason(best: Candidate, default: str, fitting: Sequence[Candidate], of: int) -> str:
    estimate = best.estimate
    pace = f", {best.speed:.3g} samples/s predicted" if best.speed else ""
    superlative = "the fastest that fits" if best.speed else "what loses least and fits"
    words = (
        f"{superlative} of {of} recipes: {format_bytes(estimate.needed)} +- {estimate.band:.0%} on the GPU"
        f"{pace}"
    )
    if best.recipe.optimizer == default:
        return words
    speeds = [one.speed for one in fitting if one.recipe.optimizer == default]
    why = f"it is {best.speed / max(speeds):.2g} times as fast as" if speeds else "nothing fits with"
    return f"{words}; {best.recipe.optimizer} because {why} {default}"


def _nothing_fits(losers: Sequence[Loser], room: Room) -> str:
    tried = [one.candidate for one in losers if one.candidate is not None]
    if not tried:
        return f"nothing fits: the nearest {losers[0].why}" if losers else "nothing fits: none is valid"
    nearest = min(tried, key=lambda one: one.estimate.needed)
    fields = ("sharding", "offload", "optimizer", "activations", "micro_batch_size")
    named = ", ".join(f"{name}: {as_yaml(getattr(nearest.recipe, name))}" for name in fields)
    return f"nothing fits; {named} is nearest and {room.misfit(nearest.estimate)}"


def _differences(recipe: Recipe, chosen: Recipe) -> dict[str, object]:
    """Field -> value, without the micro-batch, which follows from the rest; it when nothing else differs."""
    changes = {name: new for name, (_, new) in recipe.changes_from(chosen).items()}
    rest = {name: new for name, new in changes.items() if name not in ("micro_batch_size", "grad_accum")}
    return rest or {"micro_batch_size": recipe.micro_batch_size}
