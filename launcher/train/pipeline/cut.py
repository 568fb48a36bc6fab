"""Cut a model into stages: a rank keeps the modules of its stage, under the model's own names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from launcher.spec.errors import described
from launcher.spec.mesh import stages_of
from launcher.spec.pipeline_schedule import balanced
from launcher.spec.recipe import Recipe
from launcher.train.pipeline_parts import CHUNKS, Pipeline
from launcher.train.precision import inputs
from launcher.train.rank import Rank, SetupError
from launcher.train.task import Task, TaskError, pipeline_of
from launcher.train.tensor_parallel import whole as gathered


class Elsewhere(nn.Module):
    """Stands for a module of another stage. It has the module's plain attributes, and no parameter."""

    def __init__(self, module: nn.Module, name: str, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        plain = {k: v for k, v in vars(module).items() if isinstance(v, str | int | float | bool | None)}
        self.__dict__.update({**plain, **vars(self), "_name": name, "_run": run})

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.__dict__["_run"](next(iter((*args, *kwargs.values()))))  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.__dict__['_name']} is in another stage of the pipeline, and so is its {name!r}"
        )


class Batch:
    """A micro-batch as an argument of a stage. FSDP casts no tensor in it, as it would in a dataclass."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Chunk(nn.Module):
    """One stage of the model: some of its blocks, and what comes before or after them.

    Its modules are the model's own. FSDP treats it as a separate model, so that its passes do not touch the
    parameters of the rank's other chunks.

    The first stage takes the batch, the others take the output of the previous stage; each also takes
    the micro-batch as a `Batch`. The last stage returns sum and weight like `Task.loss`.
    """

    def __init__(
        self, modules: Iterable[nn.Module], blocks: Sequence[nn.Module], run: Callable[[Any, Batch], Any]
    ) -> None:
        """`blocks`: the blocks of the model among `modules`."""
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.blocks = tuple(blocks)
        self._run = run

    def forward(self, value: Any, batch: Batch) -> Any:
        return self._run(value, batch)


def cut(model: nn.Module, task: Task, rank: Rank) -> None:
    """Replace the modules of other ranks' stages. `chunks_of` then returns the stages of this rank.

    Raises SetupError if the model cannot be cut.
    """
    parts, ranks = pipeline_of(task, model), rank.mesh.pipeline
    if parts is None:
        raise SetupError(
            f"pipeline: {ranks} needs pipeline() of the task, which {type(task).__name__} does not have: "
            "return a launcher.train.Pipeline that says what comes before and after the blocks, as "
            "docs/tasks.md shows, or use pipeline: 1"
        )
    names = _names(parts, model, type(task).__name__)
    numbers = blocks_of_stages(parts, rank)
    rank.say(f"pipeline: {' + '.join(map(str, numbers))} blocks")
    ends = [*itertools.accumulate(numbers)]
    stages = [list(parts.blocks[end - number : end]) for number, end in zip(numbers, ends, strict=True)]
    stages[0][:0], stages[-1][:] = parts.before, [*stages[-1], *parts.after]
    forward = _Forward(model, parts, names, type(task).__name__, rank.recipe)
    absent = [{names[one]: forward.stand_in(one, names[one]) for one in modules} for modules in stages]
    own_stages = stages_of(rank.recipe, rank.coordinates.pipeline)
    for stage, stand_ins in enumerate(absent):
        if stage not in own_stages:
            _set_modules(model, stand_ins)
    chunks, of_model = [], set(parts.blocks)
    for stage in own_stages:
        others = {name: one for other in own_stages if other != stage for name, one in absent[other].items()}
        run = forward.of_stage(others, first=stage == 0, last=stage == len(stages) - 1)
        chunks.append(Chunk(stages[stage], [one for one in stages[stage] if one in of_model], run))
    vars(model)[CHUNKS] = tuple(chunks)


def blocks_of_stages(parts: Pipeline, rank: Rank) -> Sequence[int]:
    """Return the number of blocks of each stage. Raises SetupError."""
    recipe, count = rank.recipe, len(parts.blocks)
    stages = recipe.pipeline * recipe.virtual_stages
    if recipe.stages is not None:
        if sum(recipe.stages) != count:
            raise SetupError(
                f"stages: {list(recipe.stages)} are {sum(recipe.stages)} blocks, but the model has {count}"
            )
        return recipe.stages
    if count < stages:
        each = f", virtual_stages: {recipe.virtual_stages}" if recipe.virtual_stages > 1 else ""
        raise SetupError(
            f"pipeline: {recipe.pipeline}{each}: {stages} stages are more than the {count} blocks of the "
            "model"
        )
    return balanced(
        [_parameters([block]) for block in parts.blocks],
        _parameters(parts.before),
        _parameters(parts.after),
        stages,
    )


def _parameters(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def _names(parts: Pipeline, model: nn.Module, task: str) -> dict[nn.Module, str]:
    """Return the name of each module in `parts`. Raises SetupError if a parameter is in none or in two."""
    called, source = {module: name for name, module in model.named_modules()}, f"pipeline() of {task}"
    names: dict[nn.Module, str] = {}
    owner: dict[nn.Parameter, str] = {}
    for module in (*parts.before, *parts.blocks, *parts.after):
        if not (name := called.get(module)):
            raise SetupError(f"{source} returned {type(module).__name__}, which is not in the model")
        names[module] = name
        for key, parameter in module.named_parameters(prefix=name):
            if parameter in owner:
                raise SetupError(
                    f"{source}: {key} is used in {owner[parameter]} and in {name} (tied weights). A stage "
                    "would have only its own part of the gradient: use two parameters, or pipeline: 1"
                )
        owner |= dict.fromkeys(module.parameters(), name)
    if left := [name for name, parameter in model.named_parameters() if parameter not in owner]:
        raise SetupError(
            f"{source} does not say where {', '.join(left[:3])} is used: return its module in before, blocks "
            "or after"
        )
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise SetupError("SyncBatchNorm waits for all ranks, but a stage runs on some: use BatchNorm")
    return names


class _Forward:
    """Makes the forward of a stage, and the stand-ins for modules of other stages. Holds only names of
    modules: the modules of other stages must be freed."""

    def __init__(
        self,
        model: nn.Module,
        parts: Pipeline,
        names: Mapping[nn.Module, str],
        task: str,
        recipe: Recipe,
    ) -> None:
        self.model, self.task, self.recipe = model, f"pipeline() of {task}", recipe
        self.begin, self.middle, self.end = parts.begin, parts.middle, parts.end
        self.before, self.blocks, self.after = (
            [names[module] for module in modules] for modules in (parts.before, parts.blocks, parts.after)
        )
        self._called: list[str] | None = None
        "Modules of other stages that `middle` has called; None outside of it."

    def stand_in(self, module: nn.Module, name: str) -> Elsewhere:
        passes = name not in self.before

        def run(x: torch.Tensor) -> torch.Tensor:
            if self._called is None or not passes:
                who = "only middle may call it" if passes else "only begin may call it"
                raise TaskError(f"{self.task}: {name} is in another stage, and {who}")
            self._called.append(name)
            return x

        return Elsewhere(module, name, run)

    def of_stage(
        self, others: Mapping[str, nn.Module], *, first: bool, last: bool
    ) -> Callable[[Any, Batch], Any]:
        """Return the forward pass of a stage. `others`: stand-ins for the modules of this rank's other
        stages."""
        unchecked = True

        def forward(value: Any, batch: Batch) -> Any:
            nonlocal unchecked
            with self._replaced(others):
                # As a whole model would get it. The end has targets, which keep their type.
                content = inputs(self.recipe, batch.content)
                x = value
                if first:
                    x = self.begin(content if value is batch.content else value)  # or FSDP has cast it
                if unchecked:
                    self._check(x, content)
                    unchecked = False
                x = self._middle(x, content)
                del content
                return self.end(x, batch.content) if last else x

        return forward

    def _middle(self, x: torch.Tensor, content: Any) -> torch.Tensor:
        self._called = []
        try:
            return self.middle(x, content)
        finally:
            self._called = None

    @torch.no_grad()
    def _check(self, x: torch.Tensor, content: Any) -> None:
        """Run `middle` with every block left out. Raises TaskError if it then changes its input, as it would
        in each stage, or does not call each block once."""
        if not isinstance(x, torch.Tensor):
            raise TaskError(f"{self.task}: begin returned {type(x).__name__}, not a tensor")
        called, original = list[str](), x.clone()

        def noting(name: str) -> Elsewhere:
            def run(x: torch.Tensor) -> torch.Tensor:
                called.append(name)
                return x

            return Elsewhere(self.model.get_submodule(name), name, run)

        try:
            with self._replaced({name: noting(name) for name in (*self.blocks, *self.after)}):
                passed = self.middle(x, content)
        except Exception as error:  # any type: it is the task's code, and may be a model of a library
            raise TaskError(
                f"{self.task}: with every block left out, middle must return its input, but it fails: "
                f"{described(error)}. A block takes one tensor and returns one; a block of "
                "another stage returns what it gets"
            ) from error
        if called[: len(self.blocks)] != self.blocks:
            raise TaskError(
                f"{self.task}: middle must call each block once and in order, and look it up in the model at "
                f"each call; it called {', '.join(called) or 'none'}"
            )
        # Plain tensors: comparing DTensors asks all ranks, also of other stages.
        if not all(_same(gathered(one), gathered(original)) for one in (x, passed)):
            raise TaskError(
                f"{self.task}: with every block left out, middle must return its input, but it changes it "
                "(scales or shifts it, drops some of it), which each stage would do again: do it in begin"
            )

    @contextmanager
    def _replaced(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Replace modules of the model, by name, for a while."""
        kept = {name: self.model.get_submodule(name) for name in modules}
        try:
            _set_modules(self.model, modules)
            yield
        finally:
            _set_modules(self.model, kept)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def is_elsewhere(model: nn.Module, name: str) -> bool:
    """Return whether a parameter or buffer of the whole model is in another stage."""
    module: nn.Module | None = model
    for part in name.split(".")[:-1]:
        if module is None or isinstance(module, Elsewhere):
            break
        module = module._modules.get(part)
    return isinstance(module, Elsewhere)


def _set_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._modules[key] = module
