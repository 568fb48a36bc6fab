"""Plan a job: which recipe fits, its memory over time, and its speed. Nothing is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.api.given_job import JobLike, Values, as_given_job, overrides_of
from launcher.api.model_sources import WHOLE_PROCESS, traces_dir
from launcher.api.plan_comparisons import Comparer, tokens_on
from launcher.api.prepare import named_cluster, with_hardware
from launcher.planning.cost import Cost, cost_of
from launcher.planning.plan import PlanRefusedError
from launcher.planning.zero_stages import stages_of
from launcher.report.content import Page
from launcher.spec.errors import UsageError
from launcher.spec.recipe import Recipe

if TYPE_CHECKING:
    from launcher.memory.estimate import Estimate
    from launcher.planning.recipe_and_ladder import Decision


@dataclass(frozen=True)
class Questions:
    """Further questions to `launcher plan`. The options of the same names document their syntax."""

    explain: bool = False
    what_if: Sequence[str] = ()
    gpus: Sequence[str] = ()
    max_micro_batch: bool = False
    min_gpus: bool = False
    tokens: float | None = None
    largest: str | None = None
    zero: bool = False
    rungs: bool = False
    """Whether to estimate each rung of the ladder from a complete trace, which takes about a second each.
    Otherwise the ladder is right, but the memory of its rungs is not."""


@dataclass(frozen=True)
class Answered:
    """The answer to a plan and its questions."""

    page: Page
    refused: PlanRefusedError | None = None
    "Set if nothing fits. The page still answers the questions."


def answer(job: JobLike, clusters: Sequence[str], sets: Sequence[str], questions: Questions) -> Answered:
    """Plan one job on one cluster, or with `tokens` on several.

    Raises SpecError, UsageError, UserCodeError, SchedulerError, and PlanRefusedError if the job cannot run
    there at all.
    """
    if len(clusters) > 1 and questions.tokens is None:
        raise UsageError(
            "several clusters are compared by the cost of tokens: add --tokens N, or name one cluster"
        )
    source = as_given_job(job)
    wanted = source.job(sets)
    profiles = [with_hardware(named_cluster(name, sets), wanted) for name in clusters]
    comparers = [Comparer(source, sets, profile, traces_dir()) for profile in profiles]
    comparer = comparers[0]
    # Report errors in the questions before anything takes time.
    changed, other_gpus = comparer.changed(questions.what_if), comparer.with_gpus(questions.gpus)
    family = comparer.family(questions.largest) if questions.largest else {}
    decider = comparer.decider()
    if questions.min_gpus and not decider.layout.gpus_per_node:
        raise UsageError("--min-gpus: the job runs without GPUs here")
    if questions.max_micro_batch and decider.capacity.card is None and decider.capacity.host is None:
        raise UsageError(
            "--max-micro-batch: the profile has neither the memory of a GPU (node.gpu) nor of a node "
            "(node.memory)"
        )
    if questions.zero and decider.layout.ranks == 1:
        raise UsageError(
            "--zero: the job has one rank, so there is nothing to shard; ask for several, e.g. "
            "--set resources.gpus_per_node=8"
        )
    refused, decision = None, None
    try:
        decision = decider.decide(comparer.job.plan.vary, confirm_rungs=questions.rungs)
    except PlanRefusedError as error:
        refused = error
    comparisons = []
    if changed:
        comparisons.append(comparer.what_if(changed))
    if other_gpus:
        comparisons.append(comparer.gpus(other_gpus))
    if questions.max_micro_batch and decision is not None:
        comparisons.append(comparer.max_micro_batch(decider, decision))
    if questions.min_gpus:
        comparisons.append(comparer.min_gpus())
    if family:
        comparisons.append(comparer.largest(family))
    if questions.tokens is not None:
        comparisons.append(tokens_on(comparers, questions.tokens))
    zero = None
    if questions.zero:
        smallest = decider.space().sizes(decider.plan.recipe)[:1] or [decider.plan.recipe]
        zero = stages_of(decider, decision.chosen.recipe if decision is not None else smallest[0])
    page = Page(
        job=comparer.job,
        cluster=comparer.cluster,
        decision=decision,
        tokens_per_sample=decider.about.tokens_per_sample,
        comparisons=tuple(comparisons),
        explain=questions.explain,
        refusal=str(refused or ""),
        zero=zero,
    )
    return Answered(page, refused)


class Plan:
    """The decision of `launcher plan` about a job on a cluster.

    It prints like `launcher plan`, and as a page in a notebook.
    """

    def __init__(self, page: Page) -> None:
        assert page.decision is not None
        self._page, self._decision = page, page.decision

    @property
    def recipe(self) -> Recipe:
        """The fastest recipe that fits."""
        return self._decision.plan.recipe

    @property
    def ladder(self) -> tuple[Recipe, ...]:
        """The recipes that the run falls back to, in order, if memory runs out anyway."""
        return self._decision.plan.ladder

    @property
    def reason(self) -> str:
        return self._decision.plan.reason

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._decision.plan.warnings

    @property
    def estimate(self) -> Estimate:
        """The memory of one rank in bytes, by category and moment."""
        return self._decision.chosen.estimate

    @property
    def needed(self) -> int:
        """Total bytes that one rank needs of its GPU, or of host memory on a CPU."""
        return self.estimate.needed

    @property
    def capacity(self) -> int | None:
        """Bytes of a GPU according to the cluster's profile; None on a CPU."""
        return self._decision.room.card

    @property
    def fits(self) -> bool:
        return self._decision.room.misfit(self.estimate) is None

    @property
    def seconds_per_step(self) -> float | None:
        """Predicted time; None if the speed is not known, as on a CPU."""
        time = self._decision.chosen.time
        return time.total if time is not None else None

    @property
    def cost(self) -> Cost | None:
        """The price of the whole job, if the profile has one and the number of steps is known."""
        return cost_of(self._page.job, self._page.cluster, self._decision.plan)

    @property
    def decision(self) -> Decision:
        """All values from which the plan was decided."""
        return self._decision

    def as_dict(self) -> dict[str, Any]:
        """Return what `launcher plan --json` prints."""
        from launcher.report.data import as_data

        return as_data(self._page)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        from launcher.report.plan import show_page

        text = StringIO()
        show_page(Console(file=text, width=100, highlight=False), self._page)
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        from launcher.report.terminal import recipe_line
        from launcher.spec.quantities import format_bytes

        return (
            f"<Plan of {self._page.job.name}: {recipe_line(self.recipe)}; needs {format_bytes(self.needed)}>"
        )

    def _repr_html_(self) -> str:
        from html import escape

        from launcher.report.plan_html import as_html

        return f'<iframe srcdoc="{escape(as_html(self._page))}" width="100%" height="700"></iframe>'


def plan(job: JobLike, cluster: str = "local", *, set: Values | Sequence[str] | None = None) -> Plan:
    """Choose the recipe of a job on a cluster. This imports torch and the task's code.

    `job` is a file, a mapping with the fields of one, or a Job. `cluster` is the name or the file of a
    profile. `set` overrides fields, such as `{"train.lr": 1e-4}`; the profile's fields begin with `cluster.`.

    Raises SpecError for errors in a file, PlanRefusedError if nothing fits, UserCodeError.
    """
    with WHOLE_PROCESS:
        answered = answer(job, [cluster], overrides_of(set), Questions(rungs=True))
    if answered.refused is not None:
        raise answered.refused
    return Plan(answered.page)
