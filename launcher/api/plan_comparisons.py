"""Answer the questions of `launcher plan`: other recipes, GPUs, numbers of GPUs, sizes, clusters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.api.given_job import GivenJob
from launcher.api.model_sources import UserCode, source_of
from launcher.api.prepare import runs_root
from launcher.memory.ledger import default_folder
from launcher.memory.peaks import Like
from launcher.planning.fastest_recipe import Choice
from launcher.planning.hardware import GPU_TYPES, gpu_type_of, gpu_types_of, memory_of
from launcher.planning.model_source import Source
from launcher.planning.plan import PlanRefusedError
from launcher.planning.questions import (
    Answer,
    Comparison,
    cheapest_first,
    compare_gpus,
    for_tokens,
    largest_micro_batch,
    least_gpus,
)
from launcher.planning.recipe_and_ladder import Decider, Decision
from launcher.spec.cluster import Cluster, Gpu
from launcher.spec.errors import UsageError
from launcher.spec.field_types import Override
from launcher.spec.job import Job
from launcher.spec.mesh import data_ranks

MAX_MICRO_BATCH = 2**16
"The largest micro-batch to try. No training uses more samples per GPU."


@dataclass
class Comparer:
    """Plans one job on one cluster, and variations of both."""

    given: GivenJob
    sets: Sequence[str]
    cluster: Cluster
    store: Path
    job: Job = field(init=False)
    _sources: dict[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.job = self.given.job(self.sets)

    def decider(self, job: Job | None = None, cluster: Cluster | None = None) -> Decider:
        """Return a decider for the job on the cluster. Raises PlanRefusedError if it cannot run there."""
        job, cluster = job or self.job, cluster or self.cluster
        workdir = (self.given.file.parent / job.workdir).resolve()
        on_gpu = job.resources.gpus_per_node != 0 and cluster.gpus_per_node > 0
        key = repr((job.task, sorted(job.shaped_by.items()), job.plan, workdir, on_gpu))
        if key not in self._sources:
            like: Like = "cuda" if on_gpu else "cpu"
            self._sources[key] = source_of(
                job, workdir, self.store, like, lambda: UserCode(job, workdir, like)
            )
        return Decider(job, cluster, self._sources[key], default_folder(runs_root(cluster)))

    def choice(self, job: Job | None = None, cluster: Cluster | None = None) -> Choice:
        """Return the best recipe. `chosen` is None if nothing fits or the job cannot run there."""
        try:
            decider = self.decider(job, cluster)
            choice = decider.best()
        except PlanRefusedError as error:
            return Choice(chosen=None, reason=str(error).replace("\n", "; "), losers=())
        misfit = choice.chosen and decider.capacity.misfit(choice.chosen.estimate)
        return choice.model_copy(update={"chosen": None, "reason": misfit}) if misfit else choice

    def changed(self, changes: Sequence[str]) -> Mapping[str, Job]:
        """Apply each change to the job. Raises SpecError.

        A change is `field=value`, or several separated by commas. A field without a dot is a field of the
        recipe.
        """
        jobs = {}
        for change in changes:
            sets = [_changed_field(text) for text in change.split(",")]
            jobs[change] = self.given.job([*self.sets, *sets])
        return jobs

    def what_if(self, jobs: Mapping[str, Job]) -> Comparison:
        answers = (Answer(label, self.choice(job)) for label, job in jobs.items())
        return Comparison("what if", tuple(answers), "")

    def family(self, text: str) -> Mapping[str, Job]:
        """Return the jobs of `ARG=V1,V2,V3`. Raises SpecError."""
        name, _, values = text.partition("=")
        if not name or not values:
            raise UsageError(
                f"--largest {text}: write an argument of the task and its values, e.g. shape=1b,7b,70b"
            )
        labels = [f"{name}={value}" for value in values.split(",")]
        sets = {label: Override(f"args.{label}", f"--largest {label}") for label in labels}
        return {label: self.given.job([*self.sets, override]) for label, override in sets.items()}

    def largest(self, family: Mapping[str, Job]) -> Comparison:
        """Plan the jobs by increasing number of parameters until one does not fit. Ties keep their order."""
        order = sorted(family, key=lambda label: self._parameters(family[label]))
        answers: list[Answer] = []
        for label in order:
            answers.append(Answer(label, self.choice(family[label])))
            if answers[-1].choice.chosen is None:
                break
        fitting = [answer.label for answer in answers if answer.choice.chosen is not None]
        summary = f"the largest that fits: {fitting[-1]}" if fitting else f"not even {answers[0].label} fits"
        if len(fitting) == len(family):
            summary = f"all of them fit, including {fitting[-1]}"
        if not_tried := order[len(answers) :]:
            summary += f"; not tried: {', '.join(not_tried)}"
        return Comparison("the largest that fits", tuple(answers), summary)

    def _parameters(self, job: Job) -> int:
        try:
            decider = self.decider(job)
        except PlanRefusedError:
            return 0  # `choice` reports the reason
        return decider.evaluate.traces.model(decider.plan.recipe).numel

    def with_gpus(self, names: Sequence[str]) -> Mapping[str, Cluster]:
        """Return the cluster with each of these GPUs in place of its own.

        Memory and speed are those of the data sheet.
        """
        if names and self.job.resources.gpus_per_node == 0:
            raise UsageError("--gpu: the job asks for no GPUs (resources.gpus_per_node: 0)")
        clusters = {}
        for name in names:
            gpu_type = gpu_type_of(name)
            if gpu_type is None:
                matches = gpu_types_of(name)
                labels = ", ".join(known.label for known in matches or GPU_TYPES)
                raise UsageError(f"--gpu {name!r}: {'name one of' if matches else 'known are'} {labels}")
            count = self.cluster.gpus_per_node or 1
            gpu = Gpu(type=gpu_type.label, count=count, memory=memory_of(gpu_type))
            label = f"{count} x {gpu_type.label} ({gpu_type.memory:g} GiB)"
            clusters[label] = self.cluster.with_node(gpu=gpu)
        return clusters

    def gpus(self, clusters: Mapping[str, Cluster]) -> Comparison:
        answers = compare_gpus(clusters, lambda label: self.choice(cluster=clusters[label]))
        fits = answers[0].choice.chosen is not None
        summary = f"the fastest of --gpu: {answers[0].label}" if fits else "nothing fits on any of them"
        return Comparison("another GPU in each node", tuple(answers), summary)

    def min_gpus(self) -> Comparison:
        """Try 1, 2, 4, ... GPUs of a node, then whole nodes, if they divide the global batch equally."""
        layouts = {nodes * gpus: (nodes, gpus) for nodes, gpus in self._layouts()}
        tried: list[Answer] = []

        def choice_on(count: int) -> Choice:
            nodes, gpus = layouts[count]
            changes = {"nodes": nodes, "gpus_per_node": gpus, "ranks_per_node": None}
            resources = self.job.resources.model_copy(update=changes)
            choice = self.choice(self.job.model_copy(update={"resources": resources}))
            tried.append(Answer(f"{nodes} node(s) x {gpus}", choice))
            return choice

        least = least_gpus(layouts, choice_on)
        summary = "nothing fits on any number of them" if least is None else f"the fewest: {least[0]}"
        return Comparison("the fewest GPUs", tuple(tried), summary)

    def _layouts(self) -> Iterator[tuple[int, int]]:
        """Yield (nodes, GPUs per node)."""
        per_node, batch = self.cluster.gpus_per_node, self.job.batch.global_
        powers = [2**power for power in range(per_node.bit_length()) if 2**power < per_node]
        layouts = [(1, gpus) for gpus in (*powers, per_node)]
        layouts += [(nodes, per_node) for nodes in range(2, self.cluster.max_nodes + 1)]
        return ((nodes, gpus) for nodes, gpus in layouts if batch % (nodes * gpus) == 0)

    def max_micro_batch(self, decider: Decider, decision: Decision) -> Comparison:
        """Find the largest micro-batch of the chosen recipe. Accumulation is kept: the global batch grows."""
        capacity, evaluate, recipe = decider.capacity, decider.evaluate, decision.plan.recipe
        largest = largest_micro_batch(recipe, evaluate, capacity, MAX_MICRO_BATCH)
        while largest is not None and capacity.misfit(evaluate.confirm(largest.recipe).estimate):
            # Confirmed estimates are kept, so that this micro-batch counts as too large from now on.
            largest = largest_micro_batch(recipe, evaluate, capacity, largest.recipe.micro_batch_size)
        if largest is None:
            raise UsageError("--max-micro-batch: with this accumulation not even a micro-batch of 1 fits")
        largest = evaluate(largest.recipe)
        micro = largest.recipe.micro_batch_size
        ranks = data_ranks(recipe, decision.plan.layout.ranks)
        summary = f"batch.global {micro * recipe.grad_accum * ranks}"
        if micro == MAX_MICRO_BATCH:
            summary += "; larger ones were not tried"
        answer = Answer(f"micro-batch {micro}", Choice(chosen=largest, reason=summary, losers=()))
        return Comparison("the largest micro-batch of this recipe", (answer,), summary)


def _changed_field(text: str) -> str:
    field = text if "." in text.partition("=")[0] else f"recipe.{text}"
    return Override(field, f"--what-if {text}")


def tokens_on(comparers: Sequence[Comparer], tokens: float) -> Comparison:
    """Return what training on the tokens costs on each cluster, cheapest first."""
    answers = []
    for comparer in comparers:
        answer = Answer(comparer.cluster.name, comparer.choice())
        if answer.choice.chosen is not None:
            decider = comparer.decider()
            per_sample = decider.about.tokens_per_sample
            if per_sample is None:
                raise UsageError(
                    "--tokens: a sample of this task has no tokens, which would be a row of whole numbers"
                )
            gpus = decider.layout.nodes * decider.layout.gpus_per_node
            answer = for_tokens(answer, tokens, per_sample, gpus, comparer.cluster.usd_per_gpu_hour)
        answers.append(answer)
    answers = cheapest_first(answers)
    priced = [answer for answer in answers if answer.usd is not None]
    summary = f"the cheapest: {priced[0].label}" if len(priced) > 1 else ""
    return Comparison(f"{tokens:.4g} tokens", tuple(answers), summary)
