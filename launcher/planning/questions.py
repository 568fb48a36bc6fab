"""Questions before you submit: the largest micro-batch, the fewest GPUs, the best GPU, the cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from launcher.planning.fastest_recipe import Candidate, Capacity, Choice, Evaluate
from launcher.spec.recipe import Recipe


def largest_micro_batch(
    recipe: Recipe, evaluate: Evaluate, capacity: Capacity, limit: int = 2**16
) -> Candidate | None:
    """Return the largest micro-batch at the recipe's accumulation, or None if not even 1 fits.

    The global batch grows with the micro-batch.
    """

    def fitting(micro: int) -> Candidate | None:
        candidate = evaluate(recipe.model_copy(update={"micro_batch_size": micro}))
        return candidate if capacity.misfit(candidate.estimate) is None else None

    largest, low, high = None, 0, 1
    while high <= limit and (found := fitting(high)) is not None:
        largest, low, high = found, high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if middle <= limit and (found := fitting(middle)) is not None:
            largest, low = found, middle
        else:
            high = middle
    return largest


class Answer(NamedTuple):
    """The choice for one of several places to run."""

    label: str
    choice: Choice
    hours: float | None = None
    "Time for the tokens that were asked about. None: without such a question, or if the speed is unknown."
    usd: float | None = None
    "Price of these hours; None if the profile has no price."

    @property
    def speed(self) -> float:
        """Samples per second; 0 if nothing fits."""
        return self.choice.chosen.speed if self.choice.chosen is not None else 0.0


class Comparison(NamedTuple):
    """A question with one answer for each place or change."""

    question: str
    answers: tuple[Answer, ...]
    conclusion: str


def least_gpus(counts: Iterable[int], choice_on: Callable[[int], Choice]) -> tuple[int, Choice] | None:
    """Return the first of `counts` on which a recipe fits. `counts` ascends; each one is planned."""
    for count in counts:
        choice = choice_on(count)
        if choice.chosen is not None:
            return count, choice
    return None


def compare_gpus(labels: Iterable[str], choice_on: Callable[[str], Choice]) -> list[Answer]:
    """Return an answer for each GPU, the fastest first; GPUs on which nothing fits come last."""
    answers = [Answer(label, choice_on(label)) for label in labels]
    return sorted(answers, key=lambda answer: (answer.choice.chosen is None, -answer.speed))


def for_tokens(
    answer: Answer, tokens: float, tokens_per_sample: float, gpus: int, usd_per_gpu_hour: float | None
) -> Answer:
    """Return the answer with the time and the price of training on `tokens` tokens.

    Excludes set-up, evaluation, checkpoints and failures.
    """
    if not answer.speed:
        return answer
    hours = tokens / (answer.speed * tokens_per_sample) / 3600
    usd = None if usd_per_gpu_hour is None else hours * gpus * usd_per_gpu_hour
    return answer._replace(hours=hours, usd=usd)


def cheapest_first(answers: Iterable[Answer]) -> list[Answer]:
    """Return the cheapest answer first; those without a price come later, and those without a time last."""
    return sorted(answers, key=lambda a: (a.hours is None, a.usd is None, a.usd or 0.0, a.hours or 0.0))
