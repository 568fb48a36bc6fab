"""The memory and the speed of a recipe, computed once for each recipe that the planner asks about."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from launcher.memory.accuracy import error_band
from launcher.memory.assess import UNCOMPILED, assess, assess_at_least, assess_in_part, failure_of
from launcher.memory.estimate import Estimate
from launcher.memory.formulas import FORMULA_BAND, NO_ACTIVATIONS, NOT_KNOWN
from launcher.memory.host import Surroundings, host_of
from launcher.memory.ledger import Correction, Entry, correction, too_large
from launcher.memory.oom_point import Failure
from launcher.memory.recipe_trace import Profile
from launcher.memory.states import states_of
from launcher.memory.trace import Affine, Moment, Work
from launcher.planning.cached import from_store
from launcher.planning.fastest_recipe import Candidate
from launcher.planning.hardware import hardware_of
from launcher.planning.micro_batches import with_micro_batch
from launcher.planning.model_source import Args, Source
from launcher.planning.plan import Layout, ranks_of
from launcher.planning.speed import StepTime, step_time
from launcher.planning.traces import Traces, args_key, keeping
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.pipeline_schedule import held_beside
from launcher.spec.recipe import SHARDED, Recipe, Sharding

LEAST_BAND = 0.02
"Minimum error band, even if earlier runs agree better."
CUDNN_RNN = "cuDNN's LSTM, GRU and RNN: counted as if composed of other operators"


class Evaluator:
    """Computes the memory and the speed of recipes for one job on one layout of a cluster."""

    def __init__(
        self, source: Source, job: Job, cluster: Cluster, layout: Layout, earlier: Sequence[Entry] = ()
    ) -> None:
        """`earlier`: the ledger's entries of the same family."""
        self.source, self.ranks, self._earlier = source, ranks_of(layout), earlier
        # A job that is short of memory needs FSDP's traces anyway.
        about = source.about()
        several: Sharding = "fsdp" if about.unshardable is None else "ddp"
        plain: Sharding = job.recipe.sharding or (several if self.ranks.world > 1 else "none")
        stages = range(job.recipe.pipeline or 1)
        every = not job.train.find_unused_parameters
        self.stages = tuple(
            Traces(source, replace(self.ranks, stage=stage), plain, every_gradient=every) for stage in stages
        )
        self.traces = self.stages[0]
        self._one_policy = job.recipe.activations is not None
        self.hardware = hardware_of(cluster, self.ranks, job.env)
        self._cudnn_rnn = about.recurrent and self.ranks.on_gpu
        in_background = job.train.async_checkpoints
        self.surroundings = Surroundings(
            gpu=cluster.node.gpu,
            workers=job.train.workers,
            on_meta=about.on_meta,
            copies=self.ranks.on_gpu if in_background is None else in_background,
        )
        self._answers: dict[Hashable, Candidate] = {}
        self._confirmed: dict[Hashable, Candidate] = {}
        self._least: dict[Recipe, tuple[int, int]] = {}

    def __call__(self, recipe: Recipe, args: Args | None = None) -> Candidate:
        """Return the confirmed estimate, or the unconfirmed one."""
        return self._confirmed.get((recipe, args_key(args))) or self.unconfirmed(recipe, args)

    def unconfirmed(self, recipe: Recipe, args: Args | None = None) -> Candidate:
        """Estimate a recipe from an affine trace, without the allocator's model."""
        key = (recipe, args_key(args))
        if key not in self._answers:
            estimates = (
                self._assessed(stage, recipe, args, stage.profile(recipe, args)) for stage in self.stages
            )
            estimate = self._worst(recipe, args, estimates)
            self._answers[key] = Candidate(recipe=recipe, estimate=estimate, time=self.time(recipe, args))
        return self._answers[key]

    def _worst(self, recipe: Recipe, args: Args | None, estimates: Iterable[Estimate]) -> Estimate:
        """Return the estimate of the stage that needs most of its GPU, with the most host memory of any."""
        estimates = list(estimates)
        hosts = [
            self._host(estimate, stage, recipe, args)
            for estimate, stage in zip(estimates, self.stages, strict=True)
        ]
        host = max(hosts, key=lambda parts: sum(parts.values()))
        worst = max(estimates, key=lambda estimate: estimate.needed)
        return self._corrected(recipe, worst.model_copy(update={"host": host}))

    def _host(self, estimate: Estimate, stage: Traces, recipe: Recipe, args: Args | None) -> dict[str, int]:
        """Return the host memory of a node, with the activations that its ranks offload."""
        offloaded = self._offloaded(stage, recipe, args) if self.ranks.on_gpu else 0.0
        if not offloaded:
            return estimate.host
        waiting = max(max(moment.held) for moment in held_beside(recipe, stage.ranks.stage))
        return {**estimate.host, "activations": round(self.ranks.per_node * (1 + waiting) * offloaded)}

    def _offloaded(self, stage: Traces, recipe: Recipe, args: Args | None) -> float:
        """Return the bytes of activations that a rank moves to the host for one micro-batch."""
        if recipe.activations != "offload":
            return 0.0
        kept = stage.kept_under(keeping(recipe), args)
        return (kept.in_blocks or kept.everywhere).at(recipe.micro_batch_size)

    def refusal(self, recipe: Recipe) -> str | None:
        """Return why a step of this recipe cannot be traced. None if it can, or if none can."""
        return next(filter(None, (stage.refusal(recipe) for stage in self.stages)), None)

    def is_certain(self, recipe: Recipe, args: Args | None = None) -> bool:
        return (recipe, args_key(args)) in self._confirmed

    def confirm(self, recipe: Recipe, args: Args | None = None) -> Candidate:
        """Estimate a recipe from a complete trace of its own micro-batch and the allocator's model.

        Later calls for this recipe return this answer.
        """
        estimate = self._worst(recipe, args, (self._assessed(stage, recipe, args) for stage in self.stages))
        candidate = Candidate(recipe=recipe, estimate=estimate, time=self.time(recipe, args))
        self._confirmed[recipe, args_key(args)] = candidate
        return candidate

    def _assessed(
        self, stage: Traces, recipe: Recipe, args: Args | None, profile: Profile | None = None
    ) -> Estimate:
        """Return the estimate of one stage, which is kept in the source's store.

        Without `profile` it is computed from a complete trace, if it is not there yet, and the allocator's
        model.
        """
        replayed = profile is None

        def computed() -> Estimate:
            of_step = stage.complete(recipe, args) if profile is None else profile
            return assess(of_step, recipe, stage.ranks, self.surroundings, replayed=replayed)

        def make() -> dict[str, Any]:
            estimate = computed()
            return estimate.model_dump() if stage.untraced is None and stage.uncompiled is None else {}

        where = [asdict(stage.ranks), self.surroundings, error_band()]
        what = "replayed" if replayed else "assessed"
        kept = from_store(self.source, [what, recipe.model_dump(), args, where], make, dict)
        return Estimate.model_validate(kept) if kept else computed()

    def failure(self, recipe: Recipe) -> Failure | None:
        """Return where the recipe runs out of GPU memory, or None if it fits."""
        gpu = self.surroundings.gpu
        if gpu is None or not self.ranks.on_gpu:
            return None
        failures = (failure_of(stage.complete(recipe), recipe, stage.ranks, gpu) for stage in self.stages)
        return next((failure for failure in failures if failure is not None), None)

    def least(self, recipe: Recipe) -> tuple[int, int]:
        """Return (bytes on a GPU, bytes of a node's host memory) of the states alone."""
        # Recipes that differ only in these fields have the same states.
        key = recipe.model_copy(update={"activations": "keep", "loss_chunks": 1})
        if key not in self._least:
            model = self.traces.model_with_gradients(recipe)
            on_host = host_of(model, recipe, self.ranks, self.surroundings)
            on_gpu = states_of(model, recipe, self.ranks).gpu.total
            self._least[key] = on_gpu, sum(on_host.values())
        return self._least[key]

    def speed(self, recipe: Recipe) -> float:
        """Return an upper bound of samples per second for the recipe's micro-batch and smaller ones, whether
        they fit or not; 0 if unknown."""
        if self.hardware is None:
            return 0.0
        work, moved = Work(*map(_at_any_size, self._least_work(recipe))), 0.0
        if recipe.activations == "offload" and self._plain_is_lower_bound(recipe):
            inside = self.traces.kept(keeping(recipe)).in_blocks
            moved = _in_any_sharding(_at_any_size(inside), recipe) if inside is not None else 0.0
        if not any(work.forward_flops):
            return 0.0
        return self._time(recipe, self.traces, work, moved, None).least.samples_per_second

    def at_least(self, recipe: Recipe) -> Estimate:
        """Return a lower bound of the memory on GPUs from existing traces."""
        least = self.traces.least
        if (profile := least(recipe)) is not None:
            return self._corrected(recipe, assess_in_part(profile, recipe, self.ranks, self.surroundings))
        plain = least(recipe.model_copy(update={"sharding": self.traces.plain}))
        beside = 0.0
        if plain is not None and self._plain_is_lower_bound(recipe):
            beside = max(_in_any_sharding(moment, recipe) for moment in plain.highest["forward"])
        model = self.traces.model_with_gradients(recipe)
        return self._corrected(recipe, assess_at_least(model, beside, recipe, self.ranks, self.surroundings))

    def traces_for(self, recipe: Recipe) -> bool:
        """Return whether `roughly` has to trace a step for this recipe."""
        plain = recipe.model_copy(update={"sharding": self.traces.plain, "loss_chunks": 1})
        return (
            self._plain_is_lower_bound(recipe)
            and recipe.activations != "offload"
            and not self.traces.has(plain)
        )

    def _plain_is_lower_bound(self, recipe: Recipe) -> bool:
        """Return whether the activations under the plain sharding are a lower bound for the recipe.

        FSDP computes everything in the type that autocast uses only for some operators, so its activations
        are no larger.
        """
        return self.traces.plain in SHARDED or recipe.sharding not in SHARDED

    def roughly(self, recipe: Recipe) -> Candidate:
        """Return the speed and a lower bound of the memory on GPUs, from a trace of the same activations.

        That trace may have another sharding.
        """
        kept = 0.0
        if recipe.activations != "offload" and self._plain_is_lower_bound(recipe):
            everywhere, in_blocks = self.traces.kept(recipe)
            kept_bytes = everywhere if recipe.loss_chunks == 1 else in_blocks
            if kept_bytes is not None and self.traces.untraced is None:
                kept = _in_any_sharding(kept_bytes, recipe)
        model = self.traces.model_with_gradients(recipe)
        estimate = assess_at_least(model, kept, recipe, self.ranks, self.surroundings)
        return Candidate(recipe=recipe, estimate=self._corrected(recipe, estimate), time=self.time(recipe))

    def time(self, recipe: Recipe, args: Args | None = None) -> StepTime | None:
        """Return the time of a step, or None if the hardware's speed or the computation is unknown."""
        times = [self._time_of(stage, recipe, args) for stage in self.stages]
        known = [time for time in times if time is not None]
        return max(known, key=lambda time: time.total) if len(known) == len(times) else None

    def _time_of(self, stage: Traces, recipe: Recipe, args: Args | None) -> StepTime | None:
        if self.hardware is None:
            return None
        work = stage.work(recipe, args)
        if not any(work.forward_flops):
            return None
        return self._time(recipe, stage, work, self._offloaded(stage, recipe, args), args)

    def _time(self, recipe: Recipe, stage: Traces, work: Work, moved: float, args: Args | None) -> StepTime:
        assert self.hardware is not None
        model = stage.model_with_gradients(recipe, args)
        return step_time(recipe, work, model, self.ranks, self.hardware, offloaded=moved)

    def _least_work(self, recipe: Recipe) -> Work:
        """Return a lower bound of a rank's work: the work of a step that recomputes nothing. If the recipe's
        activations are traced anyway, the work of the recipe with the loss in one part."""
        whole = recipe.model_copy(update={"loss_chunks": 1})
        plain = whole.model_copy(update={"sharding": self.traces.plain, "compile": False})
        traced = self._one_policy or self.traces.has(plain)
        return self.traces.work(whole if traced else keeping(whole))

    def learnt(self, recipe: Recipe) -> Correction | None:
        """Return the correction from earlier runs with the same task arguments."""
        return correction(self._earlier, recipe) if self._earlier else None

    def _corrected(self, recipe: Recipe, estimate: Estimate) -> Estimate:
        if self.traces.untraced is not None:
            activations = (NO_ACTIVATIONS,) if self.source.about().tokens_per_sample is None else ()
            missing = (*activations, *NOT_KNOWN, *estimate.not_modelled)
            update = {"basis": "formulas", "band": FORMULA_BAND, "not_modelled": missing}
            return estimate.model_copy(update=update)
        if self._cudnn_rnn:
            missing = (CUDNN_RNN, *estimate.not_modelled)
            band = max(estimate.band, FORMULA_BAND)
            estimate = estimate.model_copy(update={"not_modelled": missing, "band": band})
        if recipe.compile and self.traces.uncompiled is not None:
            missing = (UNCOMPILED, *estimate.not_modelled)
            estimate = estimate.model_copy(update={"not_modelled": missing})
        if (learnt := self.learnt(recipe)) is not None:
            band = estimate.band if learnt.band is None else max(LEAST_BAND, learnt.band)
            estimate = estimate.model_copy(update={"correction": learnt.factor, "band": band})
        memory = self.surroundings.gpu.memory if self.surroundings.gpu is not None else None
        if memory is not None and self._too_large(recipe, memory):
            least = memory / estimate.reserved  # earlier runs ran out of memory, so raise the estimate
            estimate = estimate.model_copy(update={"correction": max(estimate.correction, least)})
        return estimate

    def _too_large(self, recipe: Recipe, gpu_memory: int) -> bool:
        """Return whether earlier runs show the recipe to be too large.

        A single run may have met a transient failure. It counts only if a micro-batch of 1 is known to be too
        large as well. Otherwise the plan begins with a smaller micro-batch.
        """
        runs, least = (
            too_large(self._earlier, size, self.ranks.world, gpu_memory)
            for size in (recipe, with_micro_batch(recipe, 1))
        )
        return len(runs) > 1 or bool(runs and least)


def _at_any_size(cost: Affine) -> Affine:
    """Return a lower bound of the cost of a micro-batch, also if it is computed as several smaller ones.

    A negative fixed part, such as from differences between neighbouring samples, is saved in each smaller
    one.
    """
    return cost if cost.fixed >= 0 else Affine(0.0, max(0.0, cost.fixed + cost.per_sample))


def _in_any_sharding(bytes_: Affine | Moment, recipe: Recipe) -> float:
    """Return a lower bound of bytes that were traced under another sharding.

    A positive fixed part may be due to that sharding: gathered parameters, or autocast's copies of weights. A
    negative one is due to the model, such as differences between neighbouring samples.
    """
    return max(0.0, min(0, bytes_.fixed) + bytes_.per_sample * recipe.micro_batch_size)
