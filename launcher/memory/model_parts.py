"""A model's blocks and the rest of the model, found from the names and shapes of its parameters alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.spec.recipe import Activations

_NUMBERED = re.compile(r"((?:[^.]+\.)*?\d+)\.")


@dataclass(frozen=True)
class Part:
    """A block, or the root: the parameters outside of all blocks, with an empty name."""

    name: str
    parameters: tuple[Parameter, ...]

    @cached_property
    def matrices(self) -> tuple[Parameter, ...]:
        """The matrices that tokens are multiplied with."""
        return tuple(p for p in self.parameters if len(p.shape) == 2 and not p.embedding)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def module(self) -> str:
        """The block's name, or for the root the module with the largest parameter."""
        if self.name or not self.parameters:
            return self.name
        return max(self.parameters, key=lambda p: p.numel).name.rpartition(".")[0]

    @property
    def width(self) -> int:
        """Elements per token between the matrices: the most frequent dimension of all matrices.

        The second dimension of the first matrix would be wrong for layers that store (in, out).
        """
        dimensions = [dimension for p in self.matrices for dimension in p.shape]
        return max(dimensions, key=dimensions.count, default=0)

    @property
    def kept(self) -> int:
        """Elements per token kept for the backward pass: the inputs and outputs of all matrices."""
        return sum(sum(p.shape) for p in self.matrices)

    def kept_results(self, activations: Activations) -> int:
        """Elements per token in the outputs of matrices that a policy keeps.

        The last output is not among them, because no backward pass reads it.
        """
        if activations not in ("selective", "every-second"):
            return 0
        return sum(p.shape[0] for p in self.matrices[: -1 : 2 if activations == "every-second" else 1])

    @property
    def widest(self) -> int:
        """Maximum elements per token in the input and output of one matrix."""
        return max((sum(p.shape) for p in self.matrices), default=0)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.requires_grad)


@dataclass(frozen=True)
class Parts:
    root: Part
    blocks: tuple[Part, ...]
    outer_units: tuple[str, ...] = ()
    "As in ModelShapes."

    @cached_property
    def embeddings(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.root.parameters if p.embedding)

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the first embedding, which is also the number of logits per token; 0 without one."""
        return self.embeddings[0].shape[0] if self.embeddings else 0

    @cached_property
    def head(self) -> Parameter | None:
        """The parameter that computes the logits: a matrix of the root, else the tied embedding."""
        matrices = (p for p in self.root.matrices if p.shape[0] == self.vocabulary)
        return next(matrices, self.embeddings[0] if self.embeddings else None)

    @property
    def end(self) -> str:
        """The last module before the loss."""
        return self.head.name.rpartition(".")[0] if self.head is not None else self.root.module

    @cached_property
    def looked_up(self) -> tuple[Parameter, ...]:
        """Embeddings that are only looked up, never multiplied with."""
        return tuple(p for p in self.embeddings if p is not self.head)

    @cached_property
    def outer(self) -> tuple[Part, ...]:
        """The embedding and the head if FSDP shards them as units of their own, else nothing."""
        looked_up = [p.name.rpartition(".")[0] for p in self.embeddings]
        units = sorted(self.outer_units, key=lambda name: name not in looked_up)  # the embedding first
        if len(units) != 2 or units[0] not in looked_up:
            return ()
        return tuple(
            Part(unit, tuple(p for p in self.root.parameters if p.name.rpartition(".")[0] == unit))
            for unit in units
        )

    @cached_property
    def inner(self) -> Part:
        """The root without the units of `outer`."""
        taken = {p for part in self.outer for p in part.parameters}
        return Part("", tuple(p for p in self.root.parameters if p not in taken))

    @property
    def kept_in_root(self) -> int:
        """Elements per token that the root keeps for the backward pass, without logits."""
        others = sum(sum(p.shape) for p in self.root.matrices if p is not self.head)
        return others + (self.head.shape[1] if self.head is not None else 0)


def parts_of(model: ModelShapes) -> Parts:
    """Group parameters into blocks: names that agree up to the first number, as in a ModuleList."""
    groups: dict[str, list[Parameter]] = {"": []}
    for p in model.parameters:
        numbered = _NUMBERED.match(p.name)
        groups.setdefault(numbered[1] if numbered else "", []).append(p)
    root, *blocks = (Part(name, tuple(parameters)) for name, parameters in groups.items())
    return Parts(root, tuple(blocks), model.outer_units)
