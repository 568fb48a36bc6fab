"""Task: the class that you subclass to train with the built-in entrypoint, and functions that load it."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeGuard, get_origin

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils.data import Dataset, default_collate

from launcher.spec.adapter import Adapter
from launcher.spec.errors import LauncherError
from launcher.spec.similar import similar
from launcher.train import task_metrics
from launcher.train.giant_layers import giant_layers
from launcher.train.pipeline_parts import Pipeline

Split = Literal["train", "eval"]
ParallelPlan = dict[str, ParallelStyle]

_ALWAYS_CALLED = {
    "model": (),
    "data": ("split",),
    "loss": ("model", "batch"),
    "collate": ("samples",),
    "blocks": ("model",),
    "outer_units": ("model",),
    "state": (),
}
"Methods that launcher calls on every task -> their arguments."


class TaskError(LauncherError):
    """The job's task cannot be used. The message is for the author of the task."""


class LossError(TaskError):
    """loss() does not return (sum, weight), whatever the recipe is."""


class Task(ABC):
    """A model, its data and its loss. Subclass it and name it as `task: package.module:Class`.

    `args:` of the job are the keyword arguments of the constructor.
    """

    uses_loss_chunks: ClassVar[bool] = False
    "True in a task that uses `self.loss_chunks`. Other tasks refuse a recipe with `loss_chunks` above 1."
    loss_chunks: int = 1
    "The recipe's value, for launcher.train.loss.chunked_cross_entropy; set before model() is called."

    current_step: int = 1
    """The optimizer step that `loss` is called for, counted from 1 over all attempts; in an evaluation, the
    step before it. A schedule that counts the calls of `loss` instead runs faster after an OOM, with smaller
    micro-batches. Read it in `loss`: DataLoader workers do not see it."""

    adapter: Adapter | None = None
    "The job's adapter, which is added to what model() returns."

    counts: ClassVar[Literal["samples", "tokens"]] = "samples"
    "The unit of the loss's weight and of the reported speed."

    couples_samples: ClassVar[bool] = False
    """True if the loss of a sample depends on the other samples of its micro-batch: contrastive or triplet
    losses, statistics over the batch. A smaller micro-batch then changes the objective. It also prevents the
    check that `loss` returns a sum, which splits a batch: a mean would train with too small gradients."""

    built_on_meta: ClassVar[bool] = False
    "If True, model() runs on the meta device and initialise() fills each rank's shards; for large models."

    metrics: ClassVar[tuple[str, ...]] = ()
    "Names for `log`. They appear in metrics.jsonl and the trackers; those of an evaluation begin with eval_."

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model on the CPU in fp32. The seed is set before; all ranks build the same model."""

    def initialise(self, model: nn.Module, seed: int) -> None:
        """Fill every parameter and buffer of a model that was built on the meta device, in place.

        It is called once, after sharding: parameters that FSDP shards are DTensors. The values must not
        depend on the sharding; launcher.train.initialise.draw_normal draws such values. For an adapter of
        kind qlora, and for `launcher export --merge`, it is called again for the weight of each linear layer
        of the blocks, with a model that has only this parameter.
        """
        raise NotImplementedError

    def weights_fingerprint(self) -> int | None:
        """Return a number that changes with the files from which `initialise` reads weights; None if it reads
        none.

        An adapter belongs to the weights that it was trained over: launcher compares this number when a run
        with an adapter is resumed, and in `launcher export --merge`. Called on rank 0.
        """
        return None

    @abstractmethod
    def data(self, split: Split) -> Any:
        """Return a map-style dataset (`len(data)`, `data[index]`). "eval" is used if the job evaluates."""

    def example(self) -> Any:
        """Return a sample of the largest size. The plan uses its shapes, and its integers where code
        reads them, such as lengths and masks; other values do not matter.

        The default is the first training sample. Override this if samples differ in size, or if the data
        are not on the machine that makes the plan.
        """
        data = self.data("train")
        if not samples_in(data):
            raise TaskError("the training data has no samples")
        return data[0]

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the *sum* of the losses in `batch`, a scalar, and its weight, e.g. the number of targets.

        Gradients are divided once, by the weight of the whole step over all ranks, so they do not depend on
        how the batch is split. Call `model(...)` itself, not its methods: sharding hooks into the call.
        """

    def log(self, name: str, total: torch.Tensor | float, weight: torch.Tensor | float = 1.0) -> None:
        """Add to one of `metrics`, in `loss` or the model: `self.log("accuracy", hits.sum(), len(y))`.

        A step's value is the sum of all totals divided by the sum of all weights, over its micro-batches and
        ranks. Logging adds no collective and does not wait for the device. Raises TaskError for a name not in
        `metrics`.
        """
        values: tuple[Any, ...] = (total, weight)
        for value in values:
            if not (isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)):
                raise TaskError(f"log: {name}: must be a number or a one-element tensor, not {value!r:.80}")
        try:
            task_metrics.log(name, total, weight)
        except KeyError:
            raise TaskError(f"log: {name!r} is not in {type(self).__name__}.metrics {self.metrics}") from None

    def collate(self, samples: list[Any]) -> Any:
        """Return one micro-batch from a list of samples; its tensors are moved to the device afterwards."""
        return default_collate(samples)

    def state(self) -> Any:
        """Return state that changes during training and is neither a parameter nor a buffer of the model: a
        running mean, a curriculum, the state of a generator. None means no such state.

        It may hold tensors, numbers, strings, and lists, tuples and dictionaries of them, as read by
        torch.load(weights_only=True). Each rank's state is saved in checkpoints, restored when a step is
        repeated, and passed to the next attempt. Called after each step.
        """
        return None

    def load_state(self, state: Any) -> None:
        """Restore what `state` returned."""
        raise TaskError(
            f"a checkpoint holds what state() returned, but {type(self).__name__} has no load_state()"
        )

    def export_files(self, folder: Path) -> None:  # noqa: B027 (most tasks need none)
        """Write into `folder` the files needed to load the exported weights: a config, a tokenizer.

        Called on rank 0 when an attempt begins. `launcher export` copies the files without running the task.
        """

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the units that FSDP shards and gathers one at a time: the children of every ModuleList.

        Each rank must call them in the same order. If experts or branches are not all called, or in an order
        that depends on the data, return the module that contains them instead. Recomputation, offload of
        activations and torch.compile use the same units.
        """
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                yield from module

    def outer_units(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return modules outside of the blocks that FSDP also shards and gathers one at a time.

        Each forward pass on each rank must call each of these modules, and use their weights in no other way.
        If that holds for your language model, return `embedding_and_head(model, self.blocks(model))` of
        launcher.train.outer_units, as launcher's own tasks do. By default FSDP gathers everything outside of
        the blocks together.
        """
        return []

    def pipeline(self, model: nn.Module) -> Pipeline | None:
        """Return the parts of the model, so that a recipe with `pipeline` can cut it into stages.

        None means that the model cannot be cut. Called once, with the whole model; `loss` is then not called.
        """
        return None

    def parallel_plan(self, model: nn.Module) -> ParallelPlan | None:
        """Return how `tensor` ranks share the layers: {name of a module, with * for a part: style}.

        The styles are those of torch.distributed.tensor.parallel and of launcher.train.tensor_parallel.
        Layers that are not named stay whole, and each rank of a group computes them. A layer that computes
        with a rank's part of a cut layer must not assume the full width. None means that there is no plan,
        and a recipe with `tensor` above 1 is refused.

        The default cuts linear layers of at least 2^28 weights, and is None for a model without one.
        """
        return giant_layers(model) or None


def samples_in(data: Any) -> int:
    """Return the number of samples that data() returned. Raises TaskError for other than map-style data."""
    try:
        if getattr(type(data), "__getitem__", Dataset.__getitem__) is Dataset.__getitem__:
            raise TypeError
        return len(data)
    except TypeError:
        raise TaskError(
            f"{type(data).__name__} has no length or no [index]; data() must return a map-style dataset "
            "(len and [index]), without a DataLoader"
        ) from None


def blocks_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the task's model. Raises TaskError for what is no module of this model."""
    return called(_modules_from(task, "blocks", model))


def outer_units_of(task: Task, model: nn.Module) -> list[nn.Module]:
    """Return the task's units outside of the blocks. Raises TaskError for what is no module of this model."""
    return _modules_from(task, "outer_units", model)


def pipeline_of(task: Task, model: nn.Module) -> Pipeline | None:
    """Return the parts into which the task cuts its model. Raises TaskError for anything else."""
    parts: Any = task.pipeline(model)
    if not (parts is None or isinstance(parts, Pipeline)):
        name = f"pipeline() of {type(task).__name__}"
        raise TaskError(f"{name} must return launcher.train.Pipeline or None, not {type(parts).__name__}")
    return parts


def _modules_from(task: Task, method: str, model: nn.Module) -> list[nn.Module]:
    name, inside = f"{method}() of {type(task).__name__}", set(model.modules())
    returned = getattr(task, method)(model)
    if not isinstance(returned, Iterable):
        raise TaskError(f"{name} must return a list of modules, not {type(returned).__name__}")
    modules = list(returned)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TaskError(f"{name} returned {module!r:.80}, which is not a module")
        if module not in inside:
            raise TaskError(f"{name} returned {type(module).__name__}, which is not in the model that it got")
    return modules


def called(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return each block once. A block without a forward, such as a ModuleList in a ModuleList, cannot be
    called and is replaced by the modules in it."""
    modules: dict[nn.Module, None] = {}
    for block in blocks:
        container = getattr(block.forward, "__func__", None) is nn.Module.forward
        modules |= dict.fromkeys(called(block.children()) if container else [block])
    return list(modules)


def outermost(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return each block once, without blocks that are inside another block."""
    distinct = called(blocks)
    inner = {id(child) for block in distinct for child in block.modules() if child is not block}
    return [block for block in distinct if id(block) not in inner]


_NOISY = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
"Loggers of libraries that warn about missing kernels when transformers or peft imports them."


def load_task(reference: str, args: Mapping[str, Any], workdir: str) -> Task:
    """Return an instance of the task `package.module:Class`. `workdir` becomes importable. Raises TaskError.

    Exceptions raised by the user's own module or constructor propagate unchanged.
    """
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if workdir not in sys.path:
        sys.path.insert(0, workdir)
    module_name, _, class_name = reference.partition(":")
    module = _import(module_name, workdir)
    task_class = getattr(module, class_name, None)
    if task_class is None and (hidden := _hidden_file(module, workdir)) is not None:
        raise TaskError(
            f"task {reference}: {hidden} is not imported, because another module has the name "
            f"{module_name!r} ({getattr(module, '__file__', None) or 'built-in'}): rename the file"
        )
    if task_class is None:
        raise TaskError(f"task {reference}: {module_name} has no {class_name!r}{_tasks_of(module_name)}")
    if not _is_task(task_class):
        raise TaskError(f"task {reference}: {class_name} is not a subclass of launcher.train.Task")
    missing: frozenset[str] = getattr(task_class, "__abstractmethods__", frozenset())
    if missing:
        raise TaskError(f"task {reference}: {class_name} does not define {', '.join(sorted(missing))}")
    _check_args(task_class, args)
    task = task_class(**args)
    for name in _ALWAYS_CALLED.keys() & vars(task).keys():
        if isinstance(vars(task)[name], nn.Module) or not callable(vars(task)[name]):
            raise TaskError(
                f"task {reference}: {class_name} sets self.{name}, which hides its method {name}(); give the "
                "attribute another name"
            )
    methods = dict(_ALWAYS_CALLED)
    if task.built_on_meta:
        methods["initialise"] = ("model", "seed")
    for name, arguments in methods.items():
        if not _takes(getattr(task, name), len(arguments)):
            needed = ", ".join(("self", *arguments))
            raise TaskError(f"task {reference}: {class_name} must define {name}({needed})")
    if task.built_on_meta and task_class.initialise is Task.initialise:
        raise TaskError(f"task {reference}: {class_name} sets built_on_meta, but has no initialise()")
    if _is_default(task, "load_state") and not _is_default(task, "state"):
        raise TaskError(f"task {reference}: {class_name} has state(), but no load_state()")
    check_metrics(task)
    return task


def check_metrics(task: Task) -> None:
    """Raise TaskError for metrics that are not names, or are names that launcher writes itself: `loss` would
    take the place of the held-out loss."""
    of, names = f"metrics of {type(task).__name__}", task.metrics
    listed = isinstance(names, Iterable) and not isinstance(names, str)
    if not (listed and all(isinstance(name, str) for name in names)):
        raise TaskError(f'{of}: must be a tuple of names, such as ("accuracy",), not {names!r:.80}')
    reserved = task_metrics.RESERVED
    if taken := [name for name in names if name in reserved or name.startswith(task_metrics.MEMORY)]:
        raise TaskError(f"{of}: launcher records {', '.join(taken)} itself; choose another name")


def check_varied(task: Task, args: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]) -> None:
    """Check that the values of each argument in `vary` begin with the task's default, unless `args` sets it.

    Raises TaskError.
    """
    parameters = inspect.signature(type(task)).parameters
    for name, values in vary.items():
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        if name in args or default == values[0]:
            continue
        has = "no default" if default is inspect.Parameter.empty else f"the default {default!r}"
        raise TaskError(
            f"plan.vary.{name}: begins with {values[0]!r}, but {type(task).__name__} has {has} for it: the "
            "first value must be the one that the job uses; set it in args, too"
        )


def _is_task(value: object) -> TypeGuard[type[Task]]:
    """Return whether the value is a task's class. Python 3.10 takes `list[int]` for a type, too."""
    return isinstance(value, type) and get_origin(value) is None and issubclass(value, Task)


def _import(name: str, workdir: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A missing module that the user's module imports is another error, which propagates unchanged.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise TaskError(
            f"task: no module named {error.name!r} in {workdir} or among the installed packages"
        ) from None


def _hidden_file(module: Any, workdir: str) -> Path | None:
    """Return the file in `workdir` that has the name of the module, if the module is another file."""
    path = Path(workdir, *module.__name__.split("."))
    files = [file.resolve() for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    imported = Path(getattr(module, "__file__", None) or "").resolve()
    return files[0] if files and imported not in files else None


def _is_default(task: Task, method: str) -> bool:
    return getattr(getattr(task, method), "__func__", None) is getattr(Task, method)


def _tasks_of(module_name: str) -> str:
    members = vars(sys.modules[module_name]).items()
    names = sorted(name for name, value in members if _is_task(value) and value is not Task)
    return f"; its tasks are {', '.join(names)}" if names else ""


def _takes(method: Callable[..., Any], arguments: int) -> bool:
    """Return whether a method can be called with this number of arguments, as far as Python knows."""
    try:
        inspect.signature(method).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _check_args(task_class: type[Task], args: Mapping[str, Any]) -> None:
    signature = inspect.signature(task_class)
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    try:
        signature.bind(**args)
        return
    except TypeError as error:
        problems = [str(error)]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    wrong = [] if takes_any else [name for name in args if name not in parameters]
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in args and parameter.default is inspect.Parameter.empty
    ]
    if wrong or missing:  # Python's message names only one of them
        problems.clear()
    meant: set[str] = set()
    for name in wrong:
        free = [parameter for parameter in parameters if parameter not in args and parameter not in meant]
        if (near := similar(name, free)) is not None:
            meant.add(near)
        problems.append(f"unknown argument {name!r}" + (f" (did you mean {near!r}?)" if near else ""))
    problems += [f"missing argument {name!r}" for name in missing if name not in meant]
    accepted = ", ".join(str(parameter) for parameter in parameters.values()) or "none"
    raise TaskError(f"args of {task_class.__name__}: {'; '.join(problems)}; it accepts: {accepted}")
