"""A model seen from the names and shapes of its parameters alone: its blocks, and what is outside of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.spec.recipe import Activations

_NUMBERED = re.compile(r"((?:[^.]+\.)*?\d+)\.")


@dataclass(frozen=True)
class Part:
    """A block, or the root: all that is in none, with an empty name."""

    name: str
    parameters: tuple[Parameter, ...]

    @cached_property
    def matrices(self) -> tuple[Parameter, ...]:
        """That tokens are multiplied with."""
        return tuple(p for p in self.parameters if len(p.shape) == 2 and not p.embedding)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def module(self) -> str:
        """The block, or in the root the module with the largest parameter."""
        if self.name or not self.parameters:
            return self.name
        return max(self.parameters, key=lambda p: p.numel).name.rpartition(".")[0]

    @property
    def width(self) -> int:
        """Elements of a token outside of the matrices: their most frequent dimension. Not the first one's
        second: some layers store (in, out)."""
        dimensions = [dimension for p in self.matrices for dimension in p.shape]
        return max(dimensions, key=dimensions.count, default=0)

    @property
    def kept(self) -> int:
        """Elements of a token that wait for the backward pass: what goes into and out of each matrix."""
        return sum(sum(p.shape) for p in self.matrices)

    def kept_results(self, activations: Activations) -> int:
        """Elements per token that come out of the matrices and that a policy keeps: not the last one's, which
        no backward pass reads."""
        if activations not in ("selective", "every-second"):
            return 0
        return sum(p.shape[0] for p in self.matrices[: -1 : 2 if activations == "every-second" else 1])

    @property
    def widest(self) -> int:
        """Elements of a token that go into and out of one matrix, at the most."""
        return max((sum(p.shape) for p in self.matrices), default=0)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.requires_grad)


@dataclass(frozen=True)
class Parts:
    root: Part
    blocks: tuple[Part, ...]

    @cached_property
    def embeddings(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.root.parameters if p.embedding)

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the first embedding, of which there are logits then; 0 without one."""
        return self.embeddings[0].shape[0] if self.embeddings else 0

    @cached_property
    def head(self) -> Parameter | None:
        """What makes logits: a matrix of the root, else the embedding, tied to it."""
        found = (p for p in self.root.matrices if p.shape[0] == self.vocabulary)
        return next(found, self.embeddings[0] if self.embeddings else None)

    @property
    def end(self) -> str:
        """The module that the loss follows on."""
        return self.head.name.rpartition(".")[0] if self.head is not None else self.root.module

    @cached_property
    def looked_up(self) -> tuple[Parameter, ...]:
        """Embeddings that no token is multiplied with."""
        return tuple(p for p in self.embeddings if p is not self.head)

    @property
    def kept_in_root(self) -> int:
        """Elements of a token, without logits."""
        others = sum(sum(p.shape) for p in self.root.matrices if p is not self.head)
        return others + (self.head.shape[1] if self.head is not None else 0)


def parts_of(model: ModelShapes) -> Parts:
    """Parameters whose names are the same up to the first number are one block, as in a ModuleList."""
    found: dict[str, list[Parameter]] = {"": []}
    for p in model.parameters:
        numbered = _NUMBERED.match(p.name)
        found.setdefault(numbered[1] if numbered else "", []).append(p)
    root, *blocks = (Part(name, tuple(parameters)) for name, parameters in found.items())
    return Parts(root, tuple(blocks))
