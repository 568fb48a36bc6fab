"""A step that cannot be traced, written down from the shapes of the model's parameters alone.

What comes out is a Trace like any other, with one storage where a real one has dozens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.memory.parts import Part, Parts, parts_of
from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import BF16, FP32, Ranks, shard_of
from launcher.memory.trace import (
    ACTIVATIONS,
    ALL_GATHER,
    BATCH,
    COMMUNICATION,
    COMPUTE,
    GATHERED,
    GRADIENTS,
    REDUCE_SCATTER,
    TEMPORARIES,
    Law,
    Storage,
    Trace,
    Work,
)
from launcher.spec.recipe import SHARDED, Recipe

FORMULA_BAND = 0.3
"Relative half-width of an estimate made this way; tests/memory/test_formulas.py holds it against traces."
NOT_KNOWN = (
    "the model was not run: its activations are those of matrices that each token passes once",
    "FSDP's units: taken to be the modules with a number in their names",
)
NO_ACTIVATIONS = "activations, logits and the batch: not counted, as the tokens of a sample are not known"

TOKEN = 8
"Bytes: int64."
BETWEEN = 8
"""Bytes that a block keeps more under autocast for each element of its width: two inputs of norms in fp32.
Traces have 10 for Llama, 4 for GPT, and 33 for transformers' GPT-2, whose GELU is computed in pieces."""


def formula_trace(
    model: ModelShapes,
    recipe: Recipe,
    ranks: Ranks,
    tokens_per_sample: int | None,
    *,
    complete: bool = False,
) -> Trace:
    """`model`: as `recipe.precision` stores it. `tokens_per_sample` None: without activations. `complete`:
    with a second pass, where the recipe accumulates, and an evaluation. Always the law of all micro-batches.

    For the backward pass each matrix (out, in) keeps in + out elements of each token in the type it computes
    in: its input, and its output as what follows has saved it. For a block of Llama (width h, feed-forward f,
    keys k) in 16 bit that is 18h + 4k + 6f bytes, where its operators save 12h + 4k + 8f, and 24h + 4k + 8f
    with a norm in pieces; for GPT's block 32h, where Korthikanti et al. (arXiv 2205.05198) have 34h. Autocast
    computes in fp32 between the matrices: BETWEEN. Logits cost 14 bytes for each token and entry of the
    vocabulary: one of 16 bit, one in fp32, log-softmax and its gradient.

    FSDP2, in compute precision: a unit's parameters beside two all-gather buffers in the forward pass;
    parameters, the next unit's all-gather, gradients, and one reduce-scatter input in fp32 in the backward
    pass: 6 and 10 bytes for each parameter of two equal units. The root's stay gathered between the passes.
    """
    passes = 2 if complete and recipe.grad_accum > 1 else 1
    step = _Step(parts_of(model), recipe, ranks, tokens_per_sample or 0, passes)
    return step.trace(evaluates=complete)


class _Script:
    """Storages and events in the making."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.phases: list[tuple[str, int]] = []

    def begin(self, phase: str) -> None:
        self.phases.append((phase, len(self.events)))

    def make(
        self, category: str, module: str, fixed: int = 0, each: int = 0, stream: str = COMPUTE
    ) -> list[int]:
        """Its number, or nothing when it has no size. `each`: bytes per sample."""
        if not fixed and not each:
            return []
        self.storages.append(Storage(fixed, each, category, module, stream))
        self.events.append(len(self.storages) - 1)
        return self.events[-1:]

    def free(self, *several: Sequence[int]) -> None:
        self.events += [~number for numbers in several for number in numbers]


class _Step(_Script):
    def __init__(self, model: Parts, recipe: Recipe, ranks: Ranks, tokens: int, passes: int) -> None:
        super().__init__()
        self.model, self.recipe, self.tokens, self.passes = model, recipe, tokens, passes
        mixed = recipe.precision not in ("fp32", "bf16")
        self.sharded = recipe.sharding in SHARDED
        self.autocast = mixed and not self.sharded
        self.compute = FP32 if recipe.precision == "fp32" else BF16
        self.reduce = FP32 if mixed else self.compute
        self.between = FP32 if self.autocast else self.compute
        self.shards = ranks.shards(recipe)
        self.waits = self.sharded and passes > 1 and recipe.grad_sync == "last"
        # Which blocks are recomputed makes no difference to the sum.
        ratio = recipe.checkpoint_ratio if recipe.activations == "checkpoint" else 1.0
        changed = 0 if recipe.activations == "keep" else max(1, round(ratio * len(model.blocks)))
        self.changed = {block.name for block in model.blocks[:changed]}
        self.logits = tokens * model.vocabulary // recipe.loss_chunks
        self.batch: list[int] = []
        self.kept: dict[str, list[int]] = {}
        self.gathered: dict[str, list[int]] = {}
        self.arrived: list[int] = []
        self.gradients: dict[str, list[int]] = {}
        self.reducing: list[int] = []

    def trace(self, *, evaluates: bool) -> Trace:
        for number, again in enumerate(("", " again")[: self.passes], start=1):
            self.begin(f"forward{again}")
            self.next_batch()
            self.forward()
            self.begin(f"backward{again}")
            self.backward(last=number == self.passes)
        if evaluates:
            self.begin("evaluation")
            self.next_batch()
            self.evaluation()
        self.free(self.batch)
        return Trace(tuple(self.storages), tuple(self.events), tuple(self.phases), self.work())

    def next_batch(self) -> None:
        before, self.batch = self.batch, self.make(BATCH, "", each=TOKEN * self.tokens)
        self.free(before)

    def forward(self) -> None:
        root, cached = self.model.root, list[int]()
        self.gather(root)
        for block in self.model.blocks:
            self.gather(block)
            copies = self.copies(block)
            self.kept[block.name] = self.make(ACTIVATIONS, block.name, each=self.kept_of(block))
            if block.name in self.changed:
                self.free(self.passing(block))
                cached += copies  # by autocast, until the pass ends; the recomputation makes its own
            else:
                self.kept[block.name] += copies
            if self.recipe.sharding != "fsdp-keep":
                self.scatter(block)
        in_root = self.make(
            ACTIVATIONS, root.module, each=self.model.kept_in_root * self.tokens * self.compute
        )
        self.kept[""] = self.copies(root) + in_root + self.loss(ACTIVATIONS)
        self.arrive([])
        self.free(cached)

    def backward(self, *, last: bool) -> None:
        root, looked_up = self.model.root, self.model.looked_up
        of_loss = self.make(TEMPORARIES, self.model.end, each=self.logits * FP32)
        self.free(of_loss)
        # The head comes first and the embedding last; FSDP reduces both at the end.
        early = self.gradient(root, [p for p in root.trained if p not in looked_up])
        self.free(self.kept.pop(""))
        prefetched: list[int] = []
        for number, block in reversed(list(enumerate(self.model.blocks))):
            if block.name not in self.gathered:
                arrived = prefetched or self.all_gather(block)
                self.unshard(block)
                self.free(arrived)
                prefetched = self.all_gather(self.model.blocks[number - 1]) if number else []
            passing = self.passing(block)
            if block.name in self.changed:
                again = max(self.whole(block) - self.kept_of(block), 0)
                passing += self.make(TEMPORARIES, block.name, each=again) + self.copies(block)
            gradient = self.gradient(block, block.trained)
            self.free(passing, self.kept.pop(block.name))
            self.scatter(block)
            self.reduced(block, gradient, last=last)
        late = self.gradient(root, [p for p in looked_up if p.requires_grad])
        self.scatter(root)
        self.reduced(root, early + late, last=last)
        self.free(self.reducing)
        self.reducing = []
        if last:
            self.free(*self.gradients.values())
            self.gradients = {}

    def evaluation(self) -> None:
        root, cached = self.model.root, list[int]()
        self.gather(root)
        for block in self.model.blocks:
            self.gather(block)
            cached += self.copies(block)
            self.free(self.passing(block))
            if self.recipe.sharding != "fsdp-keep":
                self.scatter(block)
        cached += self.copies(root) + self.loss(TEMPORARIES)
        self.arrive([])
        self.free(cached)
        for part in (*self.model.blocks, root):
            self.scatter(part)

    def whole(self, block: Part) -> int:
        """Bytes per sample that it would keep if it kept all."""
        between = BETWEEN * block.width if self.autocast else 0
        return self.tokens * (block.kept * self.compute + between)

    def kept_of(self, block: Part) -> int:
        """Bytes per sample. The input of a block is what runs between the blocks."""
        if block.name not in self.changed:
            return self.whole(block)
        if self.recipe.activations == "offload":
            return 0
        results = block.kept_results(self.recipe.activations) * self.compute
        return self.tokens * (block.width * self.between + results)

    def passing(self, block: Part) -> list[int]:
        """What goes into and out of the widest matrix, or the gradients of both."""
        return self.make(TEMPORARIES, block.name, each=block.widest * self.tokens * self.compute)

    def loss(self, category: str) -> list[int]:
        """Logits as computed and in fp32, and log-softmax."""
        each = 2 * FP32 + (self.compute if self.compute < FP32 else 0)
        return self.make(category, self.model.end, each=self.logits * each)

    def copies(self, part: Part) -> list[int]:
        """Autocast's, of the matrices that it multiplies with."""
        if not self.autocast:
            return []
        numel = sum(p.numel for p in part.parameters if len(p.shape) > 1 and p not in self.model.looked_up)
        return self.make(ACTIVATIONS, part.module, numel * self.compute)

    def gather(self, part: Part) -> None:
        """In the forward pass a unit's all-gather is let go when the next one's has been copied out."""
        if self.sharded and part.name not in self.gathered:
            arrived = self.all_gather(part)
            self.unshard(part)
            self.arrive(arrived)

    def arrive(self, numbers: list[int]) -> None:
        self.free(self.arrived)
        self.arrived = numbers

    def all_gather(self, part: Part) -> list[int]:
        whole = self.padded(part.parameters) * self.shards * self.compute
        return self.make(GATHERED, part.module, whole if self.sharded else 0, stream=ALL_GATHER)

    def unshard(self, part: Part) -> None:
        numel = part.numel if self.sharded else 0
        self.gathered[part.name] = self.make(GATHERED, part.module, numel * self.compute)

    def scatter(self, part: Part) -> None:
        self.free(self.gathered.pop(part.name, []))

    def padded(self, parameters: Iterable[Parameter]) -> int:
        """Elements of a rank's part, with the rows that FSDP pads."""
        return sum(shard_of(p, self.shards, 0).padded for p in parameters)

    def gradient(self, part: Part, trained: Sequence[Parameter]) -> list[int]:
        """Whole gradients that are not kept: all of them under FSDP; else one parameter's at a time, where it
        is cast or added to the one before."""
        module = part.module
        if self.sharded:
            return self.make(TEMPORARIES, module, sum(p.numel for p in trained) * self.compute)
        largest = max((p.numel for p in trained), default=0)
        added = max((p.nbytes for p in trained), default=0) if part.name in self.gradients else 0
        self.free(self.make(TEMPORARIES, module, added + largest * (self.compute if self.autocast else 0)))
        return [] if added else self.make(GRADIENTS, module, sum(p.nbytes for p in trained))

    def reduced(self, part: Part, whole: list[int], *, last: bool) -> None:
        """A unit's gradients meet, or wait whole for the last micro-batch."""
        before = self.gradients.get(part.name, [])
        if not self.sharded:
            self.gradients[part.name] = before or whole
        elif self.waits and not last:
            numel = sum(p.numel for p in part.trained)
            self.gradients[part.name] = self.make(GRADIENTS, part.module, numel * self.reduce)
            self.free(whole)
        else:
            self.free(self.reducing)
            mine = self.padded(part.trained) * self.reduce
            self.reducing = self.make(COMMUNICATION, part.module, mine * self.shards)
            self.free(whole, before if self.waits else [])
            made = self.make(GRADIENTS, part.module, mine, stream=REDUCE_SCATTER)
            if before and not self.waits:
                self.free(made)  # added to the first micro-batch's
            else:
                self.gradients[part.name] = made

    def work(self) -> Work:
        """2 FLOPs for each parameter and token forward, 4 backward, 2 to compute it again. Memory traffic:
        what is kept is written and read twice; weights are read, and copied by autocast or FSDP's gathering
        (8 bytes for each 16-bit one forward, 10 and 20 backward, as in traces)."""
        blocks, model = self.model.blocks, self.model
        numel = sum(part.numel for part in (model.root, *blocks)) - sum(p.numel for p in model.looked_up)
        again = sum(block.numel for block in blocks if block.name in self.changed)
        if self.recipe.activations not in ("every-second", "checkpoint"):
            again = 0
        elif self.recipe.activations == "every-second":
            again //= 2
        kept = model.kept_in_root + sum(block.kept for block in blocks)
        traffic = 4.0 * kept * self.tokens * self.compute + 4.0 * FP32 * self.logits * self.recipe.loss_chunks
        share = again / numel if numel else 0.0
        forward, backward = (4, 10) if self.sharded else (4, 5) if self.autocast else (1, 2)
        weights = float(numel * self.compute)
        return Work(
            forward_flops=Law(0.0, 2.0 * numel * self.tokens),
            backward_flops=Law(0.0, (4.0 * numel + 2.0 * again) * self.tokens),
            forward_bytes=Law(forward * weights, traffic),
            backward_bytes=Law((backward + share) * weights, (1.5 + share) * traffic),
        )
