"""The fastest recipe that fits, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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


def choose(
    space: Space,
    evaluate: Evaluate,
    room: Room,
    *,
    least: Callable[[Recipe], tuple[int, int]],
    speed: Callable[[Recipe], float],
) -> Choice:
    """Rank by predicted samples per second among what fits.

    `least`: bytes that a recipe needs on a GPU, and in the host memory of a node, with any micro-batch: its
    states, in closed form. `speed`: samples per second that no micro-batch of a recipe passes, whether it
    fits or not; 0 where nothing is known. Both are asked of every recipe; `evaluate`, which knows the memory,
    only of what may win.
    """
    hopeless: list[tuple[float, Loser]] = []
    hopeful: list[tuple[float, Recipe]] = []
    for rest in space.rests():
        on_gpu, on_host = least(rest)
        if room.card is not None and on_gpu > room.card:
            why = f"has states of {format_bytes(on_gpu)} on each GPU alone"
            hopeless.append((on_gpu / room.card, Loser(recipe=rest, why=why)))
        elif room.host is not None and on_host > room.host:
            why = f"takes {format_bytes(on_host)} of {format_bytes(room.host)} of host memory"
            hopeless.append((on_host / room.host, Loser(recipe=rest, why=why)))
        else:
            hopeful.append((speed(rest), rest))
    losers = [loser for _, loser in sorted(hopeless, key=lambda one: one[0])]
    default, of = space.base.optimizer, len(hopeful) + len(losers)
    # In stable order: of recipes that are equally fast the one that loses least comes first, and wins.
    hopeful.sort(key=lambda one: (one[1].optimizer != default, -one[0]))
    fitting: list[Candidate] = []
    best: Candidate | None = None
    above: Loser | None = None
    for bound, rest in hopeful:
        if best is not None and not _beats(bound, rest, best, default):
            losers.append(Loser(recipe=rest, why=_no_faster(bound, best, default)))
            continue
        found, misfit = largest_that_fits(space.sizes(rest), evaluate, room)
        if found is None:
            losers += [misfit] if misfit is not None else []
            continue
        fitting.append(found)
        if best is None or _beats(found.speed, rest, best, default):
            best, above = found, misfit
    if best is None:
        return Choice(chosen=None, reason=_nothing_fits(losers, room), losers=tuple(losers))
    losers += [above] if above is not None else []
    losers += [
        Loser(recipe=one.recipe, why=_slower(one, best, default), candidate=one)
        for one in fitting
        if one != best
    ]
    return Choice(chosen=best, reason=_reason(best, default, fitting, of), losers=tuple(losers))


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
