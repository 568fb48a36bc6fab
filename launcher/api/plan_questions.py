"""Answer the questions of `launcher plan`: other recipes, GPUs, numbers of GPUs, sizes, clusters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.api.job_source import Given
from launcher.api.prepare import runs_root
from launcher.api.sources import UsersCode, source_of
from launcher.memory.ledger import default_folder
from launcher.memory.peaks import Like
from launcher.planning.choice import Choice
from launcher.planning.decide import Decider, Decision
from launcher.planning.hardware import GPU_TYPES, gpu_type_of, gpu_types_of, memory_of
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
from launcher.planning.source import Source
from launcher.spec.cluster import Cluster, Gpu
from launcher.spec.errors import UsageError
from launcher.spec.job import Job
from launcher.spec.mesh import data_ranks
from launcher.spec.typed import Override

LARGEST_ASKED = 2**16
"The largest micro-batch that is tried. No training uses more samples per GPU."


@dataclass
class Asker:
    """Plans one job on one cluster, and variations of both."""

    given: Given
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
                job, workdir, self.store, like, lambda: UsersCode(job, workdir, like)
            )
        return Decider(job, cluster, self._sources[key], default_folder(runs_root(cluster)))

    def choice(self, job: Job | None = None, cluster: Cluster | None = None) -> Choice:
        """The best recipe there. `chosen` is None if nothing fits or the job cannot run."""
        try:
            decider = self.decider(job, cluster)
            choice = decider.best()
        except PlanRefusedError as error:
            return Choice(chosen=None, reason=str(error).replace("\n", "; "), losers=())
        misfit = choice.chosen and decider.capacity.misfit(choice.chosen.estimate)
        return choice.model_copy(update={"chosen": None, "reason": misfit}) if misfit else choice

    def changed(self, changes: Sequence[str]) -> Mapping[str, Job]:
        """Apply each change to the job. Raises SpecError.

        A change is `field=value`, or several with commas between them. A field without a dot is one of the
        recipe.
        """
        found = {}
        for change in changes:
            sets = [_changed_field(text) for text in change.split(",")]
            found[change] = self.given.job([*self.sets, *sets])
        return found

    def what_if(self, jobs: Mapping[str, Job]) -> Comparison:
        answers = (Answer(label, self.choice(job)) for label, job in jobs.items())
        return Comparison("what if", tuple(answers), "")

    def family(self, text: str) -> Mapping[str, Job]:
        """The jobs of `ARG=V1,V2,V3`. Raises SpecError."""
        name, _, values = text.partition("=")
        if not name or not values:
            raise UsageError(
                f"--largest {text}: write an argument of the task and its values, e.g. shape=1b,7b,70b"
            )
        labels = [f"{name}={value}" for value in values.split(",")]
        sets = {label: Override(f"args.{label}", f"--largest {label}") for label in labels}
        return {label: self.given.job([*self.sets, one]) for label, one in sets.items()}

    def largest(self, family: Mapping[str, Job]) -> Comparison:
        """Plan each job by rising number of parameters, until one does not fit. Ties keep their order."""
        order = sorted(family, key=lambda label: self._parameters(family[label]))
        answers: list[Answer] = []
        for label in order:
            answers.append(Answer(label, self.choice(family[label])))
            if answers[-1].choice.chosen is None:
                break
        fitting = [answer.label for answer in answers if answer.choice.chosen is not None]
        summary = f"the largest that fits: {fitting[-1]}" if fitting else f"not even {answers[0].label} fits"
        if len(fitting) == len(family):
            summary = f"all of them fit, {fitting[-1]} too"
        if rest := order[len(answers) :]:
            summary += f"; not asked about: {', '.join(rest)}"
        return Comparison("the largest that fits", tuple(answers), summary)

    def _parameters(self, job: Job) -> int:
        try:
            decider = self.decider(job)
        except PlanRefusedError:
            return 0  # `choice` reports the reason
        return decider.evaluate.traces.model(decider.plan.recipe).numel

    def with_gpus(self, names: Sequence[str]) -> Mapping[str, Cluster]:
        """The cluster with each of these GPUs in place of its own.

        Memory and speed are from the data sheet.
        """
        if names and self.job.resources.gpus_per_node == 0:
            raise UsageError("--gpu: the job asks for no GPUs (resources.gpus_per_node: 0)")
        found = {}
        for name in names:
            wanted = gpu_type_of(name)
            if wanted is None:
                several = gpu_types_of(name)
                labels = ", ".join(known.label for known in several or GPU_TYPES)
                raise UsageError(f"--gpu {name!r}: {'name one of' if several else 'known are'} {labels}")
            count = self.cluster.gpus_per_node or 1
            gpu = Gpu(type=wanted.label, count=count, memory=memory_of(wanted))
            node = self.cluster.node.model_copy(update={"gpu": gpu})
            label = f"{count} x {wanted.label} ({wanted.memory:g} GiB)"
            found[label] = self.cluster.model_copy(update={"node": node})
        return found

    def gpus(self, clusters: Mapping[str, Cluster]) -> Comparison:
        answers = compare_gpus(clusters, lambda label: self.choice(cluster=clusters[label]))
        fits = answers[0].choice.chosen is not None
        summary = f"the fastest of --gpu: {answers[0].label}" if fits else "nothing fits on any of them"
        return Comparison("another GPU in each node", tuple(answers), summary)

    def min_gpus(self) -> Comparison:
        """Try 1, 2, 4, ... GPUs of a node, then whole nodes, if they divide the global batch equally."""
        layouts = {nodes * gpus: (nodes, gpus) for nodes, gpus in self._layouts()}
        tried: list[Answer] = []

        def on(count: int) -> Choice:
            nodes, gpus = layouts[count]
            where = {"nodes": nodes, "gpus_per_node": gpus, "ranks_per_node": None}
            resources = self.job.resources.model_copy(update=where)
            choice = self.choice(self.job.model_copy(update={"resources": resources}))
            tried.append(Answer(f"{nodes} node(s) x {gpus}", choice))
            return choice

        least = least_gpus(layouts, on)
        summary = "nothing fits on any number of them" if least is None else f"the fewest: {least[0]}"
        return Comparison("the fewest GPUs", tuple(tried), summary)

    def _layouts(self) -> Iterator[tuple[int, int]]:
        """(nodes, GPUs per node)."""
        per_node, batch = self.cluster.gpus_per_node, self.job.batch.global_
        powers = [2**power for power in range(per_node.bit_length()) if 2**power < per_node]
        layouts = [(1, gpus) for gpus in (*powers, per_node)]
        layouts += [(nodes, per_node) for nodes in range(2, self.cluster.max_nodes + 1)]
        return ((nodes, gpus) for nodes, gpus in layouts if batch % (nodes * gpus) == 0)

    def max_micro_batch(self, decider: Decider, decision: Decision) -> Comparison:
        """The largest micro-batch of the chosen recipe. Accumulation stays, so the global batch grows."""
        capacity, evaluate, recipe = decider.capacity, decider.evaluate, decision.plan.recipe
        found = largest_micro_batch(recipe, evaluate, capacity, LARGEST_ASKED)
        while found is not None and capacity.misfit(evaluate.confirm(found.recipe).estimate):
            # Confirmed answers are kept, so this micro-batch counts as too large from now on.
            found = largest_micro_batch(recipe, evaluate, capacity, found.recipe.micro_batch_size)
        if found is None:
            raise UsageError("--max-micro-batch: with its own accumulation not even a micro-batch of 1 fits")
        found = evaluate(found.recipe)
        micro = found.recipe.micro_batch_size
        ranks = data_ranks(recipe, decision.plan.layout.ranks)
        summary = f"batch.global {micro * recipe.grad_accum * ranks}"
        if micro == LARGEST_ASKED:
            summary += "; larger ones were not asked about"
        answer = Answer(f"micro-batch {micro}", Choice(chosen=found, reason=summary, losers=()))
        return Comparison("the largest micro-batch of this recipe", (answer,), summary)


def _changed_field(text: str) -> str:
    field = text if "." in text.partition("=")[0] else f"recipe.{text}"
    return Override(field, f"--what-if {text}")


def tokens_on(askers: Sequence[Asker], tokens: float) -> Comparison:
    """What the tokens cost on each cluster, cheapest first."""
    answers = []
    for asker in askers:
        answer = Answer(asker.cluster.name, asker.choice())
        if answer.choice.chosen is not None:
            decider = asker.decider()
            per_sample = decider.about.tokens_per_sample
            if per_sample is None:
                raise UsageError(
                    "--tokens: a sample of this task has no tokens, which is to say no row of whole numbers"
                )
            gpus = decider.layout.nodes * decider.layout.gpus_per_node
            answer = for_tokens(answer, tokens, per_sample, gpus, asker.cluster.usd_per_gpu_hour)
        answers.append(answer)
    answers = cheapest_first(answers)
    priced = [answer for answer in answers if answer.usd is not None]
    summary = f"the cheapest: {priced[0].label}" if len(priced) > 1 else ""
    return Comparison(f"{tokens:.4g} tokens", tuple(answers), summary)
