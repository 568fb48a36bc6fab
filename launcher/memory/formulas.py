"""Build the trace of a step that cannot be traced, from the shapes of the model's parameters alone.

The result is an ordinary Trace, with one storage where a real trace has dozens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.memory.model_parts import Part, Parts, parts_of
from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import FP32, Ranks, computes_in, shard_of
from launcher.memory.trace import (
    ACTIVATIONS,
    ALL_GATHER,
    BATCH,
    COMMUNICATION,
    COMPLETE,
    COMPUTE,
    GATHERED,
    GRADIENTS,
    REDUCE_SCATTER,
    TEMPORARIES,
    Affine,
    Storage,
    Trace,
    Work,
)
from launcher.spec.recipe import SHARDED, Recipe

FORMULA_BAND = 0.3
"Relative error band of such an estimate; tests/memory/test_formulas.py compares it with traces."
NOT_KNOWN = (
    "the model was not run: activations are estimated as if each token passes each matrix once",
    "FSDP's units: assumed to be the modules with a number in their names",
)
NO_ACTIVATIONS = "activations, logits and the batch: not counted, since the tokens per sample are unknown"

TOKEN = 8
"Bytes of a token: int64."
BETWEEN = 8
"""Extra bytes that a block keeps under autocast per element of its width: two inputs of norms in fp32.
Traces have 10 for Llama, 4 for GPT, and 33 for transformers' GPT-2, whose GELU is computed in pieces."""


def formula_trace(
    model: ModelShapes,
    recipe: Recipe,
    ranks: Ranks,
    tokens_per_sample: int | None,
    *,
    complete: bool = False,
) -> Trace:
    """Return the trace of a step. Its sizes are affine in the micro-batch.

    `model`: shapes as `recipe.precision` stores them. `tokens_per_sample`: None leaves out activations.
    `complete`: adds an evaluation, and a second pass if the recipe accumulates.

    Activations: each matrix (out, in) keeps in + out elements per token for the backward pass, in its compute
    type: its input, and its output as the next operator saves it. For a block of Llama (width h, feed-forward
    f, keys k) in 16 bit that is 18h + 4k + 6f bytes per token. Its operators save 12h + 4k + 8f, or
    24h + 4k + 8f with a norm in pieces. For a block of GPT it is 32h; Korthikanti et al. (arXiv 2205.05198)
    have 34h. Between matrices autocast computes in fp32: BETWEEN. Logits take 14 bytes per token and
    vocabulary entry: one copy in 16 bit, one in fp32, log-softmax and its gradient.

    FSDP2, in compute precision: the forward pass holds a unit's parameters and two all-gather buffers. The
    backward pass holds parameters, the next unit's all-gather, gradients, and one reduce-scatter input in
    fp32. For two equal units that is 6 and 10 bytes per parameter. The root stays gathered between passes,
    and so does the head if it is a separate unit. An embedding that is a separate unit is gathered in the
    forward pass only.
    """
    passes = 2 if complete and recipe.grad_accum > 1 else 1
    step = _Step(parts_of(model), recipe, ranks, tokens_per_sample or 0, passes)
    return step.trace(evaluates=complete)


class _Script:
    """Collects storages, events and phases."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[int] = []
        self.phases: list[tuple[str, int]] = []

    def begin(self, phase: str) -> None:
        self.phases.append((phase, len(self.events)))

    def make(
        self, category: str, module: str, fixed: int = 0, each: int = 0, stream: str = COMPUTE
    ) -> list[int]:
        """Allocate a storage and return [its number], or [] if its size is 0. `each`: bytes per sample."""
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
        self.compute = computes_in(recipe)
        self.reduce = FP32 if mixed else self.compute
        self.between = FP32 if self.autocast else self.compute
        self.root = model.inner if self.sharded else model.root
        self.embedding: Part | None = None
        self.head: Part | None = None
        if self.sharded and model.outer:
            self.embedding, self.head = model.outer
        self.shards = ranks.shards(recipe)
        self.waits = self.sharded and passes > 1 and recipe.grad_sync == "last"
        # The sum does not depend on which blocks are recomputed.
        ratio = recipe.checkpoint_ratio if recipe.activations == "checkpoint" else 1.0
        all_kept = recipe.activations in ("keep", "budget", "compress")
        changed = 0 if all_kept else max(1, round(ratio * len(model.blocks)))
        self.changed = {block.name for block in model.blocks[:changed]}
        self.logits = tokens * model.vocabulary // recipe.loss_chunks
        self.batch: list[int] = []
        self.kept: dict[str, list[int]] = {}
        self.gathered: dict[str, list[int]] = {}
        self.arrived: list[int] = []
        self.waiting: dict[str, list[int]] = {}
        "Whole gradients of a unit that wait for the last micro-batch."
        self.complete: set[Parameter] = set()
        "Parameters with a gradient."
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
        self.look_up()
        for block in self.model.blocks:
            self.gather(block)
            copies = self.copies(block)
            self.kept[block.name] = self.make(ACTIVATIONS, block.name, each=self.kept_of(block))
            if block.name in self.changed:
                self.free(self.passing(block))
                cached += copies  # autocast keeps them until the pass ends; recomputation makes new ones
            else:
                self.kept[block.name] += copies
            if self.recipe.sharding != "fsdp-keep":
                self.scatter(block)
        in_root = self.make(
            ACTIVATIONS, root.module, each=self.model.kept_in_root * self.tokens * self.compute
        )
        self.gather(self.head)
        self.kept[""] = self.copies(root) + in_root + self.loss(ACTIVATIONS)
        self.arrive([])
        self.free(cached)

    def look_up(self) -> None:
        """Gather the root and the embedding at the beginning of a forward pass."""
        self.gather(self.root)
        self.gather(self.embedding)
        if self.recipe.sharding != "fsdp-keep":
            self.scatter(self.embedding)

    def backward(self, *, last: bool) -> None:
        root, looked_up = self.root, self.model.looked_up
        of_loss = self.make(TEMPORARIES, self.model.end, each=self.logits * FP32)
        self.free(of_loss)
        # The head's gradient comes first and the embedding's last. FSDP reduces the root's gradients at the
        # end.
        early = [p for p in root.trained if p not in looked_up]
        of_early = self.gradient(root, early)
        of_head = self.gradient(self.head, self.head.trained) if self.head is not None else []
        self.free(self.kept.pop(""))
        if not self.sharded:
            self.completed(early, of_early)
        if self.head is not None:
            self.scatter(self.head)
            self.reduced(self.head, of_head, last=last)
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
        late = [p for p in looked_up if p in root.trained]
        of_late = self.gradient(root, late)
        of_embedding = self.gradient(self.embedding, self.embedding.trained) if self.embedding else []
        self.scatter(root)
        if self.sharded:
            self.reduced(root, of_early + of_late, last=last)
        else:
            self.completed(late, of_late)
        if self.embedding is not None:
            self.scatter(self.embedding)
            self.reduced(self.embedding, of_embedding, last=last)
        self.free(self.reducing)
        self.reducing = []

    def evaluation(self) -> None:
        cached = list[int]()
        self.look_up()
        for block in self.model.blocks:
            self.gather(block)
            cached += self.copies(block)
            self.free(self.passing(block))
            if self.recipe.sharding != "fsdp-keep":
                self.scatter(block)
        self.gather(self.head)
        cached += self.copies(self.model.root) + self.loss(TEMPORARIES)
        self.arrive([])
        self.free(cached)
        for part in (self.embedding, *self.model.blocks, self.head, self.root):
            self.scatter(part)

    def whole(self, block: Part) -> int:
        """Bytes per sample that a block keeps without recomputation and offload.

        With `activations: compress` each value takes one byte. Its scales add 1 to 3 % and are left out.
        """
        between = BETWEEN * block.width if self.autocast else 0
        if self.recipe.activations == "compress":
            return self.tokens * (block.kept + between // FP32)
        return self.tokens * (block.kept * self.compute + between)

    def kept_of(self, block: Part) -> int:
        """Bytes per sample that a block keeps under the recipe. A recomputed block keeps its input."""
        if block.name not in self.changed:
            return self.whole(block)
        if self.recipe.activations == "offload":
            return 0
        results = block.kept_results(self.recipe.activations) * self.compute
        return self.tokens * (block.width * self.between + results)

    def passing(self, block: Part) -> list[int]:
        """Allocate the input and output of the widest matrix, or the gradients of both."""
        return self.make(TEMPORARIES, block.name, each=block.widest * self.tokens * self.compute)

    def loss(self, category: str) -> list[int]:
        """Allocate the logits in compute type and in fp32, and log-softmax."""
        each = 2 * FP32 + (self.compute if self.compute < FP32 else 0)
        return self.make(category, self.model.end, each=self.logits * each)

    def copies(self, part: Part) -> list[int]:
        """Allocate autocast's copies of the matrices that tokens are multiplied with."""
        if not self.autocast:
            return []
        numel = sum(p.numel for p in part.parameters if len(p.shape) > 1 and p not in self.model.looked_up)
        return self.make(ACTIVATIONS, part.module, numel * self.compute)

    def gather(self, part: Part | None) -> None:
        """Gather a unit. The forward pass frees its all-gather buffer after the next unit is copied out."""
        if self.sharded and part is not None and part.name not in self.gathered:
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

    def scatter(self, part: Part | None) -> None:
        if part is not None:
            self.free(self.gathered.pop(part.name, []))

    def padded(self, parameters: Iterable[Parameter]) -> int:
        """Elements of a rank's shards, including the rows that FSDP pads."""
        return sum(shard_of(p, self.shards, 0).padded for p in parameters)

    def gradient(self, part: Part, trained: Sequence[Parameter]) -> list[int]:
        """Allocate a part's whole gradients.

        FSDP holds all of them until they are reduced. Otherwise one parameter's at a time is temporary, while
        it is cast or added to the earlier gradient.
        """
        module = part.module
        if self.sharded:
            return self.make(TEMPORARIES, module, sum(p.numel for p in trained) * self.compute)
        largest, again = max((p.numel for p in trained), default=0), not self.complete.isdisjoint(trained)
        added = max((p.nbytes for p in trained), default=0) if again else 0
        self.free(self.make(TEMPORARIES, module, added + largest * (self.compute if self.autocast else 0)))
        return [] if again else self.make(GRADIENTS, module, sum(p.nbytes for p in trained))

    def reduced(self, part: Part, whole: list[int], *, last: bool) -> None:
        """Reduce a unit's gradients, or keep them whole until the last micro-batch."""
        if not self.sharded:
            self.completed(part.trained, whole)
        elif self.waits and not last:
            numel = sum(p.numel for p in part.trained)
            self.waiting[part.name] = self.make(GRADIENTS, part.module, numel * self.reduce)
            self.free(whole)
        else:
            self.free(self.reducing)
            shard_bytes = self.padded(part.trained) * self.reduce
            self.reducing = self.make(COMMUNICATION, part.module, shard_bytes * self.shards)
            self.free(whole, self.waiting.pop(part.name, []))
            category = GRADIENTS if self.complete.isdisjoint(part.trained) else TEMPORARIES
            self.completed(part.trained, self.make(category, part.module, shard_bytes, stream=REDUCE_SCATTER))

    def completed(self, trained: Sequence[Parameter], gradients: list[int]) -> None:
        """Free the gradients of some parameters when they are complete, as in a trace."""
        self.complete.update(trained)
        for p in trained:
            self.storages.append(Storage(0, 0, COMPLETE, p.name))
            self.events += [len(self.storages) - 1, ~(len(self.storages) - 1)]
        self.free(gradients)

    def work(self) -> Work:
        """Return the FLOPs and the memory traffic of one micro-batch.

        FLOPs per parameter and token: 2 forward, 4 backward, 2 to recompute. Kept activations are written and
        read twice. Weights are read, and copied by autocast or by FSDP's gather. In traces this takes 8 bytes
        per 16-bit weight in the forward pass; in the backward pass 10 with autocast and 20 with FSDP.
        """
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
            forward_flops=Affine(0.0, 2.0 * numel * self.tokens),
            backward_flops=Affine(0.0, (4.0 * numel + 2.0 * again) * self.tokens),
            forward_bytes=Affine(forward * weights, traffic),
            backward_bytes=Affine((backward + share) * weights, (1.5 + share) * traffic),
        )
