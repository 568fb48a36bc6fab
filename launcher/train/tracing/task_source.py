"""Traces and shapes from a task's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from launcher.memory.peaks import Like
from launcher.memory.shapes import ModelShapes
from launcher.memory.states import Ranks
from launcher.memory.trace import Trace
from launcher.planning.model_source import About, NotCompiledError, NoTraceError
from launcher.spec import optimizer_table
from launcher.spec.job import Job
from launcher.spec.mesh import WHOLE, Part
from launcher.spec.recipe import Precision, Recipe
from launcher.train.activations.activations import has_script
from launcher.train.batch_norm_modules import first_batch_norm
from launcher.train.on_meta import model_on_meta
from launcher.train.rank import SetupError
from launcher.train.shapes import read_shapes
from launcher.train.sharding.sharding import check_shardable, shared_with_root
from launcher.train.task import LossError, Task, blocks_of, check_varied, load_task, pipeline_of
from launcher.train.tracing.compiled import NotCapturedError
from launcher.train.tracing.cuda_devices import ignoring_cuda_devices, is_about_cuda
from launcher.train.tracing.dtensors import dtensors_of_real_values
from launcher.train.tracing.second_process import SecondProcess
from launcher.train.tracing.tracer import Tracer, UntraceableError, fake_ranks
from launcher.train.tracing.users_modules import files_of_modules

TO_DO = (
    "a trace knows no values but the integers of the sample: what a step allocates must not depend on what "
    "the model computes (sizes, branches, boolean masks), and each custom operator needs a fake "
    "implementation (torch.library.register_fake)"
)


EAGER = "compile: true: the estimate is that of the uncompiled step; a block cannot be captured as one graph"
REFUSED = "; with tensor above 1 the run will refuse it: use compile: false"
CONV1D = "Conv1D"
"The linear layer of transformers' GPT-2."
LARGEST = 2**20
"Maximum bytes of a file named by an argument that counts as source; larger files are data."
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _with_or_without_cuda(question: Callable[_P, _T]) -> Callable[_P, _T]:
    """Ask a TaskSource again without CUDA devices if the task's code names one and there is none."""

    @wraps(question)
    def asked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        source = args[0]
        assert isinstance(source, TaskSource)
        if not source.names_cuda:
            try:
                return question(*args, **kwargs)
            except Exception as error:
                if source.like != "cuda" or not is_about_cuda(error):
                    raise
                source.names_cuda = True
        with ignoring_cuda_devices():
            return question(*args, **kwargs)

    return asked


class TaskSource:
    """Traces and shapes of the job's task. Its code runs in this process, in `workdir`."""

    names_cuda = False
    "Whether the task's code names a CUDA device, as its first exception has shown."

    def __init__(self, job: Job, workdir: Path, like: Like = "cuda") -> None:
        self.job, self.workdir, self.like = job, workdir, like
        self._tracers: dict[str, Tracer] = {}

    @_with_or_without_cuda
    def about(self, args: Mapping[str, Any] | None = None) -> About:
        task = self._task(args)
        model = model_on_meta(task)
        blocks = blocks_of(task, model)
        leaves = [leaf for leaf in tree_leaves(self._tracer(args).example) if isinstance(leaf, torch.Tensor)]
        rows = [leaf.numel() for leaf in leaves if leaf.dtype == torch.int64 and leaf.ndim == 1]
        # Without a second row for the targets, these are the same tokens shifted by one.
        shifted = task.counts == "tokens" and len(rows) == 1
        return About(
            on_meta=task.built_on_meta,
            loss_chunks=task.uses_loss_chunks,
            batch_norm=first_batch_norm(model) is not None,
            tokens_per_sample=max(rows) - shifted if rows else None,
            blocks=bool(blocks),
            couples_samples=task.couples_samples,
            tensor=_has_parallel_plan(task, model),
            stages=_stages(task, model),
            linear=_is_linear(model),
            recurrent=any(isinstance(module, nn.RNNBase) for module in model.modules()),
            unshardable=_unshardable(task, model),
            recomputable=not any(map(has_script, blocks)),
        )

    @_with_or_without_cuda
    def shapes(
        self, precision: Precision, args: Mapping[str, Any] | None = None, part: Part = WHOLE
    ) -> ModelShapes:
        recipe = Recipe(
            precision=precision,
            optimizer=optimizer_table.DEFAULT,
            sharding="none",
            tensor=part.tensor,
            pipeline=part.pipeline,
            virtual_stages=part.virtual_stages,
            stages=part.stages,
            micro_batch_size=1,
            grad_accum=1,
        )
        if part == WHOLE:
            return read_shapes(self._task(args), recipe)
        ranks = Ranks(part.tensor * part.pipeline, part.tensor, on_gpu=True, stage=part.stage)
        rank = self._tracer(args).rank(recipe, ranks)
        with fake_ranks(rank.world, rank.number), dtensors_of_real_values():
            return read_shapes(self._task(args), recipe, rank)

    @_with_or_without_cuda
    def trace(
        self, recipe: Recipe, ranks: Ranks, args: Mapping[str, Any] | None = None, *, exact: bool = False
    ) -> Trace:
        tracer = self._tracer(args)
        try:
            if exact:
                return tracer.sample(recipe, ranks, recipe.micro_batch_size, complete=True)
            second = self._second
            return tracer.trace(recipe, ranks, partial(second.start, args) if second is not None else None)
        except NotCapturedError as error:
            refused = REFUSED if recipe.tensor > 1 else ""
            raise NotCompiledError(f"{EAGER}: {error}{refused}") from error
        except UntraceableError as error:
            if isinstance(error.error, LossError):  # of the whole model: a run would raise it too
                raise error.error from None
            raise NoTraceError(f"{error}; {_reason(error.error)}") from error

    @cached_property
    def _second(self) -> SecondProcess[..., Trace] | None:
        """Computes one of the two samples of a trace. None if it is impossible."""
        if not SecondProcess.is_possible():
            return None
        _ = self._tracer(None).example  # before the process is copied, so that the data are loaded once
        return SecondProcess(self._sample)

    @_with_or_without_cuda
    def _sample(
        self, args: Mapping[str, Any] | None, recipe: Recipe, ranks: Ranks, micro_batch: int
    ) -> Trace:
        return self._tracer(args).sample(recipe, ranks, micro_batch)

    def files(self) -> list[Path]:
        """Return the files that the traces depend on: all loaded code outside libraries, the files that
        arguments name, and the JSON files of directories that they name.

        Raises OSError if a file has changed since its code was loaded.
        """
        files = set(files_of_modules(self.workdir))
        for value in tree_leaves(dict(self.job.args)):
            if isinstance(value, str):
                with suppress(OSError, ValueError):
                    path = self.workdir / value
                    named = path.glob("*.json") if path.is_dir() else [path]
                    files |= {file for file in named if file.is_file() and file.stat().st_size < LARGEST}
        return sorted(files)

    def _task(self, args: Mapping[str, Any] | None) -> Task:
        return self._tracer(args).task

    def _tracer(self, args: Mapping[str, Any] | None) -> Tracer:
        key = repr(sorted((args or {}).items()))
        if key not in self._tracers:
            task = load_task(str(self.job.task), {**self.job.args, **(args or {})}, str(self.workdir))
            task.adapter = self.job.adapter
            check_varied(task, self.job.args, self.job.plan.vary)
            self._tracers[key] = Tracer(task, self.job, self.like)
        return self._tracers[key]


def _has_parallel_plan(task: Task, model: nn.Module) -> bool:
    try:
        return task.parallel_plan(model) is not None
    except Exception:  # as below; a job with recipe.tensor raises it
        return False


def _stages(task: Task, model: nn.Module) -> int:
    try:
        parts = pipeline_of(task, model)
    except Exception:  # any type: it is the task's code, and most jobs have no pipeline
        return 0
    return len(parts.blocks) if parts is not None else 0


def _unshardable(task: Task, model: nn.Module) -> str | None:
    try:
        check_shardable(model)
        shared_with_root(model, blocks_of(task, model))
    except SetupError as error:
        return str(error)
    return None


def _is_linear(model: nn.Module) -> bool:
    """Return whether the formulas cover the model: no matrices but those of linear layers and embeddings, no
    convolutions and no recurrent layers."""
    linear = (nn.Linear, nn.Embedding)
    others = (m for m in model.modules() if not isinstance(m, linear) and type(m).__name__ != CONV1D)
    return all(p.dim() < 2 for module in others for p in module.parameters(recurse=False))


def _reason(error: Exception) -> str:
    """Return why the step is not traced: an operator of torch itself, or the task's code."""
    if isinstance(error, DynamicOutputShapeException) and error.func.namespace == "aten":
        return (
            f"{error.func} is an operator of torch whose results have sizes that depend on values, and a "
            "trace knows none but the integers of the sample; boolean masks call such operators"
        )
    return TO_DO
