"""Traces one training step of a rank on fake tensors, with fake ranks."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed import _meta_registrations
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from launcher.memory.states import Ranks
from launcher.memory.trace import COMPLETE, LATER, PRODUCT, Affine, Trace, Work, combine
from launcher.memory.unroll import NotUniformError, Recorded, Run, placed, unroll
from launcher.rundir.layout import RunDir
from launcher.spec.errors import UsageError, first_line
from launcher.spec.job import Job
from launcher.spec.mesh import model_parallel
from launcher.spec.recipe import Recipe
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.forward import computing, loss_of
from launcher.train.mesh import meshes
from launcher.train.model import arranged, new_model
from launcher.train.pipeline.channel import Form
from launcher.train.pipeline.cut import Batch, _Forward, blocks_of_stages
from launcher.train.pipeline.deferred_weight_gradients import LaterWeights
from launcher.train.pipeline_parts import chunks_of
from launcher.train.rank import Rank
from launcher.train.sharding.sharding import (
    accumulate,
    has_scripted_parameters,
    reduces_gradients,
    reshard_units,
)
from launcher.train.task import Task, blocks_of, outermost, pipeline_of
from launcher.train.tensor_parallel import placed_like
from launcher.train.tracing.as_cpu import as_cpu
from launcher.train.tracing.as_cuda import as_cuda
from launcher.train.tracing.compiled import NotCapturedError, compiled, compiling
from launcher.train.tracing.dtensors import dtensors_of_real_values
from launcher.train.tracing.fake_mode import ASSUMPTIONS, EndlessError, TraceMode, numbers_as_of_tensors
from launcher.train.tracing.fake_model import make_fake, no_packed_mask, only_chunks_that_are_read
from launcher.train.tracing.folding import KEPT, blocks_to_keep, fewer_stages, fold, fold_stage
from launcher.train.tracing.random_numbers import under_draws
from launcher.train.tracing.storage_recorder import StorageRecorder

SMALL = 2
"The smaller micro-batch of the two that an affine trace is fitted to."
Start = Callable[[Recipe, Ranks, int], Callable[[], Trace | None]]
"Starts Tracer.sample() elsewhere. The returned function waits for the sample; None if it failed."


class UntraceableError(Exception):
    """The step does not run on fake tensors, for example because a branch depends on the model's output."""

    def __init__(self, module: str, error: Exception) -> None:
        self.module, self.error = module, error
        super().__init__(f"{module}: {first_line(error)}")


_Values = Literal["none", "integers", "computed"]
"Values that code reads: none, integers of the sample, or also numbers that the model computes."

_READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"Exceptions of operators that need values which a trace does not know."

SCRIPTED = "TorchScript runs outside of Python: let model() return the module before torch.jit.script"
PASSES = (("forward", "backward"), ("forward again", "backward again"))


@dataclass(frozen=True)
class _FakeRank(Rank):
    """A rank of a fake group of ranks: the first one of a stage."""

    def say(self, text: str) -> None:
        pass


class _Built(NamedTuple):
    model: nn.Module
    names: dict[nn.Module, str]
    "Names of the modules in the whole model."
    runs: tuple[Run, ...]
    blocks: dict[nn.Module, tuple[int, int]]
    "(index of the run, index of the kept block) of each kept block."


class _Recording(NamedTuple):
    """The events of a pass, and the form of its output: the loss, or what a stage sends to the next one."""

    events: Recorded
    output: Form
    trained: list[str]
    "Names of the trained parameters."

    @property
    def unused(self) -> set[str]:
        """Names of the trained parameters that get no gradient."""
        complete = {storage.module for storage in self.events.storages if storage.category == COMPLETE}
        return set(self.trained) - complete

    def check_blocks(self) -> None:
        """Raise NotUniformError if a trained parameter of a block that stands for others gets no gradient:
        they may use theirs."""
        for name, run in itertools.product(self.unused, self.events.runs):
            if run.extra and run.split(name) is not None:
                raise NotUniformError(f"{name} of a block of the trace gets no gradient")


class Tracer:
    """Traces steps of one task. `like` is the device whose kernels determine the tensors saved for backward.

    This process must not have a process group.
    """

    def __init__(self, task: Task, job: Job, like: Literal["cuda", "cpu"]) -> None:
        self.task, self.job, self.like = task, job, like
        self._models: dict[Any, _Built] = {}
        self._stages: dict[Any, _Recording] = {}
        self._blocks: dict[Any, Sequence[int]] = {}
        "How a pipeline is cut -> the number of blocks of each stage."
        self._values: _Values = "none"
        "The values that the task's code reads, as an earlier trace has shown."
        self._too_few = 0
        "Number of equal blocks per run that did not represent the model in an earlier trace."

    def trace(self, recipe: Recipe, ranks: Ranks, beside: Start | None = None) -> Trace:
        """Return a trace with sizes as affine functions of the micro-batch, whatever the recipe's value is.

        `beside`: starts sample() in another process, which computes one of the two samples.

        Raises: NotAffineError if sizes are not affine, and UntraceableError.
        """
        result = beside(recipe, ranks, SMALL + 1) if beside is not None else None
        try:
            small = self.sample(recipe, ranks, SMALL)
        except Exception:
            if result is not None:
                result()
            raise
        large = result() if result is not None else None
        return combine(small, large or self.sample(recipe, ranks, SMALL + 1), SMALL)

    def sample(
        self,
        recipe: Recipe,
        ranks: Ranks,
        micro_batch: int,
        *,
        whole: bool = False,
        complete: bool = False,
    ) -> Trace:
        """Return a trace whose figures hold for one micro-batch size. `whole` runs every block. `complete`
        adds a second pass, if the recipe accumulates gradients, and an evaluation."""
        recipe = recipe.model_copy(update={"micro_batch_size": micro_batch})
        if recipe.sharding == "none":
            # Other ranks are independent until the gradients are reduced.
            ranks = Ranks(model_parallel(recipe), recipe.tensor, ranks.on_gpu, ranks.stage)
        # If only some blocks are recomputed, the blocks are not equal.
        if not whole and recipe.checkpoint_ratio == 1:
            for most in blocks_to_keep(recipe, complete=complete):
                if most <= self._too_few:
                    continue
                # Some models cannot run with fewer blocks; run those with all.
                try:
                    recorded = self.record(recipe, ranks, most, complete=complete)
                    return _trace_of(unroll(recorded))
                except NotUniformError:
                    pass
                except UntraceableError as error:
                    if isinstance(error.error, EndlessError):
                        raise
                if most < KEPT:
                    self._too_few = most
        return _trace_of(self.record(recipe, ranks, None, complete=complete))

    def record(
        self, recipe: Recipe, ranks: Ranks, most: int | None = KEPT, *, complete: bool = False
    ) -> Recorded:
        """Return the events of rank 0. Each run of equal blocks has at most `most`; None keeps them all.

        Raises: UntraceableError, and NotUniformError if blocks are removed.
        """
        if recipe.pipeline == 1:
            return self._record(recipe, ranks, None, most, complete=complete).events
        events = self._stage(recipe, ranks, most, complete=complete).events
        if most is None:
            return events
        blocks = self._blocks_of_stages(recipe, ranks)
        return placed(events, sum(blocks[: ranks.stage]), blocks[ranks.stage])

    def _stage(self, recipe: Recipe, ranks: Ranks, most: int | None, *, complete: bool) -> _Recording:
        """Record a stage of a pipeline. Unless `most` is None, stages share a recording if they receive the
        same and differ only in their place and their number of blocks."""
        received = None
        if ranks.stage > 0:
            previous = replace(ranks, stage=ranks.stage - 1)
            received = self._stage(recipe, previous, most, complete=complete).output
        if most is not None:
            blocks, stage = fewer_stages(self._blocks_of_stages(recipe, ranks), ranks.stage)
            world = ranks.world // recipe.pipeline * len(blocks)
            update: dict[str, Any] = {"pipeline": len(blocks), "stages": blocks}
            if stage < len(blocks) - 1:
                update["loss_chunks"] = 1  # the last stage computes the loss
            recipe = recipe.model_copy(update=update)
            ranks = replace(ranks, world=world, stage=stage)
        key = recipe, ranks, received, most, complete
        if key not in self._stages:
            self._stages[key] = self._record(recipe, ranks, received, most, complete=complete)
        return self._stages[key]

    def _blocks_of_stages(self, recipe: Recipe, ranks: Ranks) -> Sequence[int]:
        key = recipe.pipeline, recipe.stages
        if key not in self._blocks:
            parts = pipeline_of(self.task, new_model(self.task, recipe, on_meta=True))
            if parts is None:
                raise NotUniformError("the model is not cut into stages")
            self._blocks[key] = blocks_of_stages(parts, self.rank(recipe, ranks))
        return self._blocks[key]

    def _record(
        self, recipe: Recipe, ranks: Ranks, form: Form | None, most: int | None, *, complete: bool
    ) -> _Recording:
        """`form`: of the previous stage's output; None in the first stage."""

        def run(mode: Callable[[], TraceMode]) -> _Recording:
            recordings = under_draws(lambda: self._run(recipe, ranks, form, most, mode(), complete=complete))
            largest = _largest(recordings)
            largest.check_blocks()
            return largest

        if self._values == "none":
            with suppress(UntraceableError):
                return run(TraceMode)
        refused = UntraceableError("loss()", ValueError("allocates by numbers that the model computes"))
        if self._values != "computed":
            try:
                recording = run(partial(TraceMode, knows_integers=True))
                self._values = "integers"  # otherwise the code failed for another reason
                return recording
            except UntraceableError as error:
                if not isinstance(error.error, _READS_VALUES):
                    raise
                refused = error  # it says where a number is read
        traces = []
        for assumed in ASSUMPTIONS:
            try:
                recording = run(partial(TraceMode, knows_integers=True, assumed=assumed))
            except UntraceableError as error:
                if assumed.usual or isinstance(error.error, (*_READS_VALUES, EndlessError)):
                    raise
                continue  # the code raises unless numbers and conditions are as usual
            # At once: the next run frees what the task keeps of this one.
            traces.append(_trace_of(recording.events))
        if any(trace != traces[0] for trace in traces):
            raise refused
        self._values = "computed"
        return recording

    def _run(
        self,
        recipe: Recipe,
        ranks: Ranks,
        form: Form | None,
        most: int | None,
        fake: TraceMode,
        *,
        complete: bool,
    ) -> _Recording:
        rank = self.rank(recipe, ranks)
        batch = self.task.collate([self.example] * recipe.micro_batch_size)
        self.task.loss_chunks = recipe.loss_chunks
        with fake_ranks(ranks.world, rank.number), ExitStack() as stack:
            if recipe.tensor > 1:
                stack.enter_context(dtensors_of_real_values())
            # A run checks by values that the stages add up to the model. Fake tensors have none.
            stack.enter_context(patch.object(_Forward, "_check", lambda *_: None))
            # A mesh holds real values, so it is created before the fake mode is on.
            mesh = meshes(rank)
            model, names, runs, blocks = self._built(rank, most)
            if scripted := [name for m, name in names.items() if has_scripted_parameters(m)]:
                raise UntraceableError(scripted[0], TypeError(SCRIPTED))
            make_fake(model, fake)  # before the mode is on, in which tensors with values cannot be used
            stack.enter_context(fake)
            stack.enter_context(no_packed_mask())
            stack.enter_context(only_chunks_that_are_read())
            stack.enter_context(numbers_as_of_tensors())
            stack.enter_context(as_cuda() if self.like == "cuda" else as_cpu())
            try:
                units = set(outermost(blocks_of(self.task, model)))
                model = arranged(model, self.task, rank, Unlimited(), mesh, partial(compiled, like=self.like))
            except Exception as error:
                if most is None:
                    raise
                # The task may name blocks that were removed.
                raise NotUniformError(f"the model cannot have fewer blocks: {error}") from error
            empty = partial(Form.empty, device=rank.device, mesh=mesh.tensor)
            recorder = StorageRecorder(names, units, blocks, runs, sums_in_place=self.like == "cuda")
            recorder.learn_streams(model)
            trained = recorder.follow_gradients(model)
            recorder.leave_out([*model.parameters(), *model.buffers()])
            stack.enter_context(compiling(fake, recorder))
            try:
                with recorder.following():
                    arrive = partial(_arriving, batch, fake, recorder)
                    returned = self._step(model, rank, recorder, arrive, form, empty, complete=complete)
            except NotCapturedError:
                raise
            except Exception as error:
                raise UntraceableError(recorder.module, error) from error
        return _Recording(recorder.recorded, returned, trained)

    def _built(self, rank: Rank, most: int | None) -> _Built:
        """Return a new model on the meta device: a copy of one built earlier if the modules can be copied.
        `most`: as for `record`."""
        recipe, stage = rank.recipe, rank.coordinates.pipeline
        key = (recipe.precision, recipe.pipeline, recipe.stages, stage, most)
        if key not in self._models:
            model = new_model(self.task, recipe, on_meta=True)
            runs: tuple[Run, ...] = ()
            blocks: dict[nn.Module, tuple[int, int]] = {}
            parts = pipeline_of(self.task, model) if recipe.pipeline > 1 else None
            if most is not None and parts is not None and recipe.stages is not None:
                runs, blocks = fold_stage(model, parts.blocks, recipe.stages, stage)
            names = {m: name or type(m).__name__ for name, m in model.named_modules()}
            if most is not None and parts is None:
                runs, blocks = fold(model, blocks_of(self.task, model), most)
            names = {m: names[m] for m in model.modules()}  # otherwise removed modules would be copied too
            self._models[key] = _Built(model, names, runs, blocks)
        with suppress(Exception):
            return copy.deepcopy(self._models[key])
        return self._models.pop(key)

    def _step(
        self,
        model: nn.Module,
        rank: Rank,
        recorder: StorageRecorder,
        arrive: Callable[[], Any],
        form: Form | None,
        empty: Callable[[Form], torch.Tensor],
        *,
        complete: bool,
    ) -> Form:
        """Run the passes, with the tensors that the training loop holds on the device during them. Return the
        form of the forward pass's output: the loss, or what a stage sends to the next one. `form`: of its
        input from the previous stage. `empty` makes a tensor of a form.

        As in launcher.train.pipeline.channel, what is sent stays until the next message or the step's end.
        """
        later = None
        if rank.recipe.schedule == "zero-bubble" and rank.recipe.pipeline > 1:
            [chunk] = chunks_of(model)
            later = LaterWeights(chunk, "pipeline()")
            later.begins = recorder.begin_weights
        last_stage, sent = rank.coordinates.pipeline == rank.mesh.pipeline - 1, None
        passes = PASSES if complete and rank.recipe.grad_accum > 1 else PASSES[:1]
        sums: list[torch.Tensor] = []
        waits: torch.Tensor | None = None
        for number, (forward, backward) in enumerate(passes, start=1):
            recorder.begin(forward)
            if self.like == "cuda":  # a CPU rank adds up numbers
                sums = sums or [torch.zeros((), dtype=torch.float64) for _ in ("loss", "weight")]
            arrived = arrive()
            last = number == len(passes)
            with accumulate(model, rank.recipe, last=last), ExitStack() as stack:
                received = empty(form).requires_grad_() if form is not None else None
                output, weight = self._forward(model, rank, arrived, received)
                waits = None
                recorder.send(None if last_stage else output)
                recorder.begin(backward)
                if later is not None:
                    stack.enter_context(later.postponing())
                gradient = None if last_stage else torch.empty_like(output)
                torch.autograd.backward(output, gradient)
                sent = None
                if received is not None and received.grad is not None:
                    sent = placed_like(received, received.grad)
                recorder.send(sent)
            returned = Form.of(output)
            # The loop keeps no graph, which would keep what was received, and adds the loss to a sum.
            waits = None if last_stage else output.detach()
            del arrived, received, gradient, weight, output
            if later is not None:
                recorder.begin(backward.replace("backward", LATER))
                later.compute(reduce=reduces_gradients(rank.recipe, last=last))
        del waits, sent
        if complete:
            recorder.begin("evaluation")
            model.eval()
            sent_before = None if last_stage else empty(returned)
            arrived = arrive()
            with torch.no_grad():
                received = empty(form) if form is not None else None
                self._forward(model, rank, arrived, received)
            del sent_before  # before the next message, a stage waits until this one has arrived
        return returned

    def _forward(
        self, model: nn.Module, rank: Rank, batch: Any, received: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the output, and the weight if the loop holds it until the backward pass ends."""
        if rank.recipe.pipeline == 1:
            return loss_of(self.task, model, batch, rank)
        [chunk] = chunks_of(model)
        with computing("pipeline()", rank):
            result = chunk(batch if received is None else received, Batch(batch))
        if not torch.is_grad_enabled():
            reshard_units(chunk)
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output, 0.0

    @cached_property
    def example(self) -> Any:
        """The task's sample. The task may load its data for it, so it is asked once."""
        return self.task.example()

    def rank(self, recipe: Recipe, ranks: Ranks) -> Rank:
        run, number = RunDir(Path("/nowhere")), ranks.stage * (ranks.world // recipe.pipeline)
        return _FakeRank(
            run=run,
            attempt=run.attempt(0),
            number=number,
            node=number // ranks.per_node,
            job=self.job,
            recipe=recipe,
            workdir=".",
            local=number % ranks.per_node,
            world=ranks.world,
            per_node=ranks.per_node,
            device=torch.device("cpu"),
            stop_file=Path("/nowhere/stop"),
        )


_IDS = random.Random(0)
"Draws the ids of fake collectives, for which torch would use up the task's random numbers."


@contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Set up a process group of fake ranks around `rank`, whose collectives return at once."""
    if dist.is_initialized():
        raise UsageError(
            "this process has a process group of torch.distributed, and a plan needs its own: plan before "
            "init_process_group(), after destroy_process_group(), or in another process"
        )
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    sys.excepthook = hook  # init_process_group installs one that prefixes tracebacks with the rank
    try:
        with patch.object(_meta_registrations, "random", _IDS, create=True):  # a private name
            yield
    finally:
        dist.destroy_process_group()


def _arriving(batch: Any, fake: TraceMode, recorder: StorageRecorder) -> Any:
    """Return a new batch of the same form, and record its arrival."""
    made = tree_map_only(torch.Tensor, fake.new, batch)
    recorder.arrive(made)
    return made


def _largest(recordings: Sequence[_Recording]) -> _Recording:
    """Return the recording that allocates most, of those under different random numbers.

    Raises UntraceableError if another one gives a gradient to further parameters: all of them get one in some
    step.
    """
    largest = max(recordings, key=lambda one: sum(storage.fixed for storage in one.events.storages))
    if not all(largest.unused <= one.unused for one in recordings):
        error = ValueError("uses other parameters under other random numbers that it draws")
        raise UntraceableError("loss()", error)
    return largest


def _trace_of(recorded: Recorded) -> Trace:
    recorded = _with_first_products(recorded)
    events: list[int] = []
    phases: list[tuple[str, int]] = []
    work = dict.fromkeys(Work._fields, 0.0)
    for phase, group in itertools.groupby(recorded.segments, key=lambda segment: segment.phase):
        segments = list(group)
        phases.append((phase, len(events)))
        events += _ordered(event for segment in segments for event in segment.events)
        if phase in (*PASSES[0], LATER):
            kinds = ("backward", "later") if phase == LATER else (phase,)
            for kind in kinds:
                work[f"{kind}_flops"] += sum(segment.flops for segment in segments)
                work[f"{kind}_bytes"] += sum(segment.traffic for segment in segments)
            work[f"{kinds[0]}_exchanged"] += sum(segment.exchanged for segment in segments)
            work[f"{kinds[0]}_sent"] += sum(segment.sent for segment in segments)
    figures = Work(*(Affine(value, 0.0) for value in work.values()))
    return Trace(tuple(recorded.storages), tuple(events), tuple(phases), figures)


def _with_first_products(recorded: Recorded) -> Recorded:
    """Return the step with the first matrix product of each phase alone, whichever segments had one."""
    first: dict[str, int] = {}
    for segment in recorded.segments:
        for event in segment.events:
            if event >= 0 and recorded.storages[event].category == PRODUCT:
                first.setdefault(segment.phase, event)
    marks = set(first.values())
    kept = [i for i, each in enumerate(recorded.storages) if each.category != PRODUCT or i in marks]
    numbers = {old: new for new, old in enumerate(kept)}
    numbers |= {~old: ~new for old, new in numbers.items()}
    return Recorded(
        [recorded.storages[i] for i in kept],
        [
            replace(each, events=[numbers[i] for i in each.events if i in numbers])
            for each in recorded.segments
        ],
    )


def _ordered(events: Iterable[int]) -> list[int]:
    """Sort consecutive frees: storages freed at one time, such as autocast's copies of weights, have no fixed
    order."""
    ordered: list[int] = []
    for frees, group in itertools.groupby(events, key=lambda event: event < 0):
        consecutive = list(group)
        ordered += sorted(consecutive, reverse=True) if frees else consecutive
    return ordered
