"""Plan a job whose model is known: the fastest recipe that fits, and the ladder below it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from launcher.planning.earlier_runs import earlier_runs, started_where_it_fitted, starting_rung
from launcher.planning.fastest_recipe import Bounds, Candidate, Capacity, Choice, choose
from launcher.planning.ladder import Rung, confirmed, ladder_of
from launcher.planning.model_source import Source
from launcher.planning.plan import Plan, PlanRefusedError, make_plan
from launcher.planning.recipe_costs import Evaluator
from launcher.planning.space import Space
from launcher.spec.cluster import Cluster
from launcher.spec.errors import LauncherError, Problem
from launcher.spec.job import Job
from launcher.spec.listed_names import listed
from launcher.spec.mesh import UNCUT, in_buckets
from launcher.spec.quantities import counted, format_bytes
from launcher.spec.recipe import WHOLE_LOSS, Recipe
from launcher.spec.recipe_rules import changes_line
from launcher.spec.value import Value

KEPT = "not searched, because another one changes what is learnt; try --what-if precision=bf16"
PARALLEL = 1.2
"Speed-up that justifies tensor parallelism, which depends on links inside a node being as fast as predicted."


class Decision(Value):
    """A Plan with the figures behind it."""

    plan: Plan
    trained: int
    "Number of parameters that have gradients."
    chosen: Candidate
    room: Capacity
    "The capacity. The field's name is a key in the output of `launcher plan --json`."
    explained: tuple[str, ...]
    rungs: tuple[Rung, ...] = ()
    notes: tuple[str, ...] = ()
    "Assumptions, and what is not modelled."

    @property
    def parameters(self) -> int:
        """Number of the model's parameters; tied ones count once."""
        assert self.plan.parameters is not None
        return self.plan.parameters


class Decider:
    """Plans one job on one cluster. `ledger`: the folder with measurements of earlier runs."""

    def __init__(self, job: Job, cluster: Cluster, source: Source, ledger: Path | None = None) -> None:
        about = source.about()
        self._inputs = job, cluster, source, ledger
        self._parts: dict[int, Decider] = {}
        self._leaves_out_ddp = False
        self.notes: list[str] = []
        if about.batch_norm and not job.model.batch_norm:
            self.notes.append("the model has BatchNorm: no micro-batch below 2 (set model.batch_norm: true)")
        if about.couples_samples and not job.model.couples_samples:
            self.notes.append(
                "the loss couples samples: the micro-batch shrinks last (set model.couples_samples: true)"
            )
        # If the job fixes FSDP, the trace raises the error of a run.
        self._unshardable = about.unshardable if job.recipe.sharding is None else None
        if self._unshardable is not None:
            self.notes.append(f"FSDP is left out: {self._unshardable}")
        job = job.with_model(batch_norm=about.batch_norm, couples_samples=about.couples_samples)
        self.job, self.cluster, self.about = job, cluster, about
        plan = make_plan(job, cluster, shardable=self._unshardable is None)
        if job.task is not None and plan.recipe.loss_chunks > 1 and not about.loss_chunks:
            raise PlanRefusedError([Problem("the job", "recipe.loss_chunks", WHOLE_LOSS)])
        self.layout = plan.layout
        on_gpu = self.layout.gpus_per_node > 0
        if on_gpu and not about.recomputable and job.recipe.activations is None:
            self.notes.append(
                "activations are not recomputed: a block contains TorchScript, which cannot run again"
            )
        self._earlier = earlier_runs(job, cluster, ledger, on_gpu=on_gpu) if ledger is not None else ()
        self.plan = started_where_it_fitted(plan, job, cluster, self._earlier)
        self.evaluate = Evaluator(source, job, cluster, self.layout, self._earlier)
        self._bounds = Bounds(
            least=self.evaluate.least,
            speed=functools.cache(self.evaluate.speed),
            at_least=functools.cache(self.evaluate.at_least),
            traces_for=self.evaluate.traces_for,
            roughly=functools.cache(self.evaluate.roughly),
        )
        self.notes += self.evaluate.hardware.assumed if self.evaluate.hardware is not None else ()
        self.capacity = Capacity.of(job, cluster, on_gpu=on_gpu)

    @property
    def fixed(self) -> frozenset[str]:
        return frozenset(name for name, value in self.job.recipe.model_dump().items() if value is not None)

    def space(self, fixed: frozenset[str] | None = None) -> Space:
        return Space(
            base=self.plan.recipe,
            fixed=self.fixed if fixed is None else fixed,
            setting=dataclasses.replace(
                self.layout.setting(self.job, shardable=self._unshardable is None),
                every_gradient=not self._leaves_out_ddp,
            ),
            chunks=self.about.loss_chunks,
            blocks=self.about.blocks,
            recomputable=self.about.recomputable,
            closed=self.job.task is None,
            stages=self.about.stages,
            works=self._works_by_layers,
        )

    def choose(self, space: Space, *, nearest: bool = True, than: Candidate | None = None) -> Choice:
        """Choose a recipe that also fits by an exact trace. `nearest`, `than`: see `fastest_recipe.choose`.

        The affine model may accept recipes that the exact trace then rejects. Each round traces another one.
        """
        while True:
            choice = choose(space, self.evaluate, self.capacity, self._bounds, nearest=nearest, than=than)
            if choice.chosen is None:
                return choice
            recipe = choice.chosen.recipe
            if "sharding" in space.axes and space.setting.shardable and (unused := self._unused(recipe)):
                self._leaves_out_ddp = True
                self.notes.append(f"DDP is left out: {unused}")
                setting = dataclasses.replace(space.setting, every_gradient=False)
                space = dataclasses.replace(space, setting=setting)
            elif self.evaluate.is_certain(recipe):
                return choice
            else:
                self.evaluate.confirm(recipe)  # the next round uses the confirmed figures

    def _unused(self, recipe: Recipe) -> str | None:
        """Return why DDP would fail in the second step of this recipe, or None if it would not."""
        if not in_buckets(recipe) or self.job.train.find_unused_parameters or self.job.task is None:
            return None
        names = self.evaluate.traces.without_gradient(recipe)
        if not names:
            return None
        return (
            f"the loss does not use {listed(names)}, which DDP refuses in the second step unless "
            "train.find_unused_parameters is true"
        )

    def best(self) -> Choice:
        """Choose among the recipes that the job leaves open.

        On a CPU, only the ladder is searched: see `_on_cpu`.
        """
        if self.layout.gpus_per_node:
            choice = self._by_layers(self._with_tensor(self.choose(self.space(), nearest=False)))
            if choice.chosen is not None:
                return choice
            return self.choose(self.space()).model_copy(update={"lines": choice.lines})
        chosen, plan = self._on_cpu()
        return Choice(chosen=chosen, reason=plan.reason, losers=())

    def _on_cpu(self) -> tuple[Candidate, Plan]:
        """Return the job's recipe or the first rung of its ladder that fits, and the plan that begins so.

        There is one memory and no known speed, so nothing else is tried. If the job sets its micro-batch or
        if no rung fits, return the job's recipe.
        """
        chosen = self.evaluate.confirm(self.plan.recipe)
        if self.capacity.misfit(chosen.estimate) is None or self.fixed & {"micro_batch_size", "grad_accum"}:
            return chosen, self.plan
        for at, rung in enumerate(self.plan.ladder, 1):
            if self.capacity.misfit(self.evaluate(rung).estimate) is not None:
                continue
            smaller = self.evaluate.confirm(rung)
            if self.capacity.misfit(smaller.estimate) is None:
                why = f"{self.plan.reason}; the first rung of its ladder that fits in host memory"
                started = {"recipe": rung, "ladder": self.plan.ladder[at:], "reason": why}
                return smaller, self.plan.model_copy(update=started)
        return chosen, self.plan

    def decide(
        self, vary: Mapping[str, Sequence[JsonValue]] | None = None, *, confirm_rungs: bool = False
    ) -> Decision:
        """Return the plan with its ladder. Raises PlanRefusedError if nothing fits, with what would fit.

        `confirm_rungs`: trace each rung completely, too. Its figures are then the same as in a plan with its
        recipe. The ladder is the same.
        """
        if self.layout.gpus_per_node == 0:
            return self._decision(*self._on_cpu(), ())
        choice = self.best()
        if choice.chosen is None:
            raise PlanRefusedError(self._refusals(choice))
        tensor = choice.chosen.recipe.tensor
        decider = self if tensor == self.plan.recipe.tensor else self._part(tensor)
        return decider._decided(choice, choice.chosen, vary, confirm_rungs=confirm_rungs)

    def _by_layers(self, choice: Choice) -> Choice:
        """Return the best choice in which FSDP gathers single layers, if nothing fits otherwise, or only with
        offload, which is slower."""
        without = choice.chosen
        fits = without is not None and not without.recipe.offloads
        space = self.space().by_layers() if not fits else None
        if space is None:
            return choice
        tried = self.choose(space, nearest=False, than=without)
        if tried.chosen is None or tried.chosen == without:
            return choice
        why = "nothing fits without" if without is None else "the others that fit offload, and are slower"
        reason = f"{tried.reason}; {tried.chosen.recipe.sharding} because {why}"
        return tried.model_copy(update={"reason": reason, "lines": choice.lines})

    def _works_by_layers(self, recipe: Recipe) -> bool:
        """Return whether the step works if single layers are gathered. A note says why not."""
        if (refusal := self.evaluate.refusal(recipe)) is not None:
            note = f"fsdp-layers is left out: {refusal}"
            self.notes += [note] if note not in self.notes else []
        return refusal is None

    def _with_tensor(self, choice: Choice) -> Choice:
        """Return the best choice with tensor parallelism if nothing fits without it, or if it is much faster.

        Its recipes are traced only if model states alone fit, or if a step that never waits for other GPUs
        would be that much faster.
        """
        without, ranks = choice.chosen, self.evaluate.ranks
        states_alone = without is None and not any(loser.candidate for loser in choice.losers)
        if states_alone and any(ranks.shards(loser.recipe) == ranks.world for loser in choice.losers):
            return choice  # tensor parallelism divides no more of them
        if without is not None and (
            without.time is None
            or without.time.total < PARALLEL * (without.time.total - without.time.exposed)
        ):
            return choice
        speeds = [f"1 {without.speed:.3g} samples/s" if without is not None else "1 does not fit"]
        for tensor in self._sizes():
            try:
                part = self._part(tensor)
                tried = part.choose(part.space(), nearest=False)
            except LauncherError as error:
                speeds.append(f"{tensor} is not possible: {error}")
                continue
            candidate = tried.chosen
            speeds.append(
                f"{tensor} {candidate.speed:.3g} samples/s"
                if candidate is not None
                else f"{tensor} does not fit"
            )
            least = 0.0 if without is None else PARALLEL * without.speed
            best = choice.chosen
            if candidate is not None and (best is None or candidate.speed > max(least, best.speed)):
                why = (
                    f"it is {candidate.speed / without.speed:.2g} times as fast as the best recipe without"
                    if without is not None
                    else "nothing fits without"
                )
                choice = tried.model_copy(update={"reason": f"{tried.reason}; tensor {tensor} because {why}"})
        lines = (f"tensor: {', '.join(speeds)}",) if len(speeds) > 1 else ()
        return choice.model_copy(update={"lines": lines})

    def _sizes(self) -> list[int]:
        """Return the numbers of ranks that could share a layer: powers of two within a node."""
        if "tensor" in self.fixed or not self.about.tensor:
            return []
        per_node = self.layout.ranks_per_node
        return [size for power in range(1, per_node.bit_length()) if per_node % (size := 2**power) == 0]

    def _part(self, tensor: int) -> Decider:
        """Return a decider for the same job with a fixed `tensor`. Raises PlanRefusedError."""
        if tensor not in self._parts:
            job, cluster, source, ledger = self._inputs
            recipe = job.recipe.model_copy(update={"tensor": tensor})
            job = job.model_copy(update={"recipe": recipe})
            self._parts[tensor] = Decider(job, cluster, source, ledger)
        return self._parts[tensor]

    def _decided(
        self,
        choice: Choice,
        best: Candidate,
        vary: Mapping[str, Sequence[JsonValue]] | None,
        *,
        confirm_rungs: bool,
    ) -> Decision:
        chosen, above, reason = self._started(best, choice.reason)
        # All unconfirmed: the allocator's rounding of the chosen recipe alone would count as saved.
        evaluate = self.evaluate.unconfirmed
        top = evaluate(chosen.recipe)
        rungs, left_out = ladder_of(top, self.space(), evaluate, self.capacity, vary)
        if confirm_rungs:
            rungs = confirmed(chosen, rungs, self.evaluate.confirm, self.space(), self.capacity)
        speeds = itertools.accumulate((1 - rung.slower for rung in rungs), operator.mul)
        plan = self.plan.model_copy(
            update={
                "recipe": chosen.recipe,
                "ladder": tuple(rung.recipe for rung in rungs if not rung.args),
                "ladder_speed": tuple(
                    speed for rung, speed in zip(rungs, speeds, strict=True) if not rung.args
                ),
                "above": above,
                "reason": reason,
            }
        )
        explained = choice.explain()
        if "precision" not in self.fixed:
            explained = (*explained, f"precision: {chosen.recipe.precision}, {KEPT}")
        return self._decision(chosen, plan, explained, rungs, left_out)

    def _started(self, chosen: Candidate, reason: str) -> tuple[Candidate, tuple[Recipe, ...], str]:
        """Return the candidate that a run begins with, the recipes that it tries again, and the reason.

        The run begins with a smaller micro-batch if an earlier run ran out of memory under the chosen recipe.
        Exceptions: the micro-batch is fixed or is lowered last.
        """
        setting = self.layout.setting(self.job)
        if setting.keeps_micro_batch or setting.why_micro_batch_stays is not None:
            return chosen, (), reason
        most = chosen.recipe.micro_batch_size
        sizes = [size for size in self.space().sizes(chosen.recipe) if size.micro_batch_size <= most][::-1]
        lower = starting_rung(sizes, self._earlier, self.layout.ranks, self.capacity.card)
        started = self.evaluate.confirm(sizes[lower.at]) if lower.at else chosen
        if started == chosen or self.capacity.misfit(started.estimate) is not None:
            return chosen, (), reason
        return started, lower.above, f"{reason}; {lower.reason}"

    def _decision(
        self,
        chosen: Candidate,
        plan: Plan,
        explained: tuple[str, ...],
        rungs: tuple[Rung, ...] = (),
        left_out: tuple[str, ...] = (),
    ) -> Decision:
        if misfit := self.capacity.misfit(chosen.estimate):
            raise PlanRefusedError([Problem("the job", "recipe", misfit)])
        whole = chosen.recipe.model_copy(update=UNCUT)
        model = self.evaluate.traces.model(whole)
        warnings = plan.warnings
        if self.evaluate.ranks.world > 1 and (unused := self._unused(chosen.recipe)):
            warnings = (*warnings, unused)
        if self.capacity.is_unknown_for(chosen.recipe):
            on_host = format_bytes(chosen.estimate.host_per_node)
            warnings = (
                *warnings,
                f"the recipe fits only if each node has at least {on_host} of host memory: `node.memory` is "
                "not set in the profile",
            )
        plan = plan.model_copy(
            update={
                "warnings": warnings,
                "estimate": chosen.estimate,
                "parameters": model.numel,
                "samples_per_second": chosen.speed or None,
            }
        )
        return Decision(
            plan=plan,
            trained=sum(p.whole_numel for p in model.trained),
            chosen=chosen,
            room=self.capacity,
            explained=explained,
            rungs=rungs,
            notes=(*self.notes, *left_out, *self._notes_on(chosen)),
        )

    def _notes_on(self, chosen: Candidate) -> list[str]:
        recipe, on_host = chosen.recipe, chosen.estimate.host_per_node
        traces = self.evaluate.traces
        notes = [why for why in (traces.untraced, traces.uncompiled) if why is not None]
        if self.capacity.host is None and not recipe.offloads:  # else a warning says it
            notes.append(
                "`node.memory` is not set in the profile; "
                f"the job needs {format_bytes(on_host)} of host memory per node"
            )
        if (learnt := self.evaluate.learnt(recipe)) is not None:
            differs = f", which differ in {', '.join(learnt.differs)}" if learnt.differs else ""
            notes.append(
                f"corrected by {learnt.factor:.3f}, from {counted(learnt.entries, 'earlier run')}{differs}"
            )
        return notes

    def _refusals(self, choice: Choice) -> list[Problem]:
        problems = [Problem("the job", "recipe", choice.reason)]
        if self._unshardable is not None:
            problems.append(Problem("the job", "recipe", f"FSDP is left out: {self._unshardable}"))
        smallest = self.space().sizes(self.plan.recipe)[:1] or [self.plan.recipe]
        if (failure := self.evaluate.failure(smallest[0])) is not None:
            problems.append(Problem("the job", "recipe", str(failure)))
        space = dataclasses.replace(self.space(self.fixed & {"precision"}), closed=False)
        free = self.choose(space)
        if free.chosen is None and (by_layers := space.by_layers()) is not None:
            free = self.choose(by_layers, nearest=False)
        if free.chosen is not None:
            change = changes_line(free.chosen.recipe, self.plan.recipe)
            if_so = "fits" if self.job.task is not None else "would fit if the command trained with"
            problems.append(Problem("the job", "recipe", f"{if_so}: {change}"))
        else:
            other = "no other recipe fits: use more or larger GPUs"
            if self.capacity.host is not None:
                other += ", or nodes with more host memory"
            if (halved := self._in_bf16()) is not None:
                change = changes_line(halved, self.plan.recipe)
                other = f"fits only with parameters in bf16, which learn worse: {change}"
            problems.append(Problem("the job", "recipe", other))
        return problems

    def _in_bf16(self) -> Recipe | None:
        """Return a recipe that fits with bf16 parameters, if the job leaves the precision open."""
        job, cluster, source, ledger = self._inputs
        if "precision" in self.fixed or self.plan.recipe.precision == "bf16":
            return None
        open_recipe = type(job.recipe).model_validate({"precision": "bf16"})
        try:
            decider = Decider(job.model_copy(update={"recipe": open_recipe}), cluster, source, ledger)
            chosen = decider.choose(decider.space(), nearest=False).chosen
        except LauncherError:
            return None
        return chosen.recipe if chosen is not None else None
