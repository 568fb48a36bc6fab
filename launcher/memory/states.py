"""Model states in closed form: the exact bytes that a rank holds between two micro-batches.

Covers parameters, buffers, gradients, optimizer states and their copies on the host, for every recipe.
Excludes activations, temporaries, gathered parameters and the rounding of allocators: CUDA's rounds to 512
bytes, the pinned one to powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.spec.mesh import grad_sync_applies, in_buckets, shards, state_shards
from launcher.spec.optimizer_table import BLOCK, LEAST_EIGHT_BIT, LEAST_PAGED, OPTIMIZERS, State
from launcher.spec.recipe import SHARDED, Recipe
from launcher.spec.value import Value

FP32, BF16, CODE = 4, 2, 1
"Bytes per element."
STEP = FP32
"Bytes of a parameter's step counter."


def computes_in(recipe: Recipe) -> int:
    """Return the bytes per element of gathered parameters: launcher.train.precision."""
    return FP32 if recipe.precision == "fp32" else BF16


class Held(Value):
    """Bytes by category, on the GPU or on the host."""

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    copies: int = 0
    "Second copies of parameters, which an optimizer on the host updates."

    @property
    def total(self) -> int:
        return sum(self.model_dump().values())

    def __add__(self, other: Held) -> Held:
        return Held(**{name: value + getattr(other, name) for name, value in self.model_dump().items()})


class States(Value):
    """Model states of one rank, or the sum over several ranks."""

    gpu: Held = Held()
    host: Held = Held()
    managed: int = 0
    "Bytes of paged optimizer states: on the GPU while they fit, else on the host."
    nvme: int = 0
    "Bytes of scratch files."


@dataclass(frozen=True)
class Ranks:
    """The number of ranks and the device that they compute on."""

    world: int
    per_node: int
    on_gpu: bool
    stage: int = 0
    "The pipeline stage that figures are for."

    def shards(self, recipe: Recipe) -> int:
        """Number of shards per parameter."""
        return shards(recipe, self.world, self.per_node)

    def state_shards(self, recipe: Recipe) -> int:
        """Number of shards of the optimizer states of a parameter. `zero1` shards nothing else."""
        return state_shards(recipe, self.world, self.per_node)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter. Rows are split as torch.chunk does: the first ranks get the most."""

    rows: int
    row: int
    "Elements per row."
    largest: int
    "Rows of the first rank. FSDP2 pads parameters and reduced gradients to this number, but not states."

    @property
    def numel(self) -> int:
        return self.rows * self.row

    @property
    def padded(self) -> int:
        return self.largest * self.row


def shard_of(p: Parameter, shards: int, number: int) -> Shard:
    largest = -(-p.rows // shards)
    return Shard(max(0, min(largest, p.rows - number * largest)), p.row, largest)


def updated_by(p: Parameter, recipe: Recipe, ranks: Ranks, rank: int = 0) -> Shard:
    """Return the part of a parameter that a rank updates and has optimizer states of.

    `zero1` does not split every parameter: launcher.train.optimizers.sharded_states.can_split.
    """
    whole = not p.shape or (recipe.sharding == "zero1" and not p.splits)
    shards = 1 if whole else ranks.state_shards(recipe)
    return shard_of(p, shards, rank % shards)


def states_of(model: ModelShapes, recipe: Recipe, ranks: Ranks, rank: int = 0) -> States:
    """Return the states of rank number `rank`; rank 0 holds the most.

    `model`: shapes as `recipe.precision` stores them. With tensor parallelism, every rank counts as one of
    the first in its group.
    """
    shards, part = ranks.shards(recipe), rank // recipe.tensor
    parameters = reduced = 0
    for p, count in model.distinct:
        size = count * shard_of(p, shards, part % shards).padded * p.itemsize
        parameters += size
        if p.updated:
            reduced += size
    trained = [
        (p, updated_by(p, recipe, ranks, part), count) for p, count in model.distinct if p.requires_grad
    ]
    with_states = [row for row in trained if has_states(row[0], recipe)]
    paged = sum(count * paged_bytes(recipe, p, shard) for p, shard, count in with_states)
    states = sum(count * state_bytes(recipe, p, shard) for p, shard, count in with_states) - paged
    counted = OPTIMIZERS[recipe.optimizer].steps
    steps = STEP * sum(count for _, _, count in with_states) if counted else 0

    gpu = Held(parameters=parameters, buffers=model.buffers, gradients=_gradients(model, recipe, reduced))
    if recipe.offload == "none" or (recipe.offload == "cpu" and not ranks.on_gpu):
        on_device = steps if counted == "device" else 0
        gpu = gpu.model_copy(update={"optimizer": states + on_device})
        result = States(gpu=gpu, host=Held(optimizer=steps - on_device), managed=paged)
    elif recipe.offload == "cpu":
        # Whole gradients stay on the GPU until the last micro-batch.
        result = States(
            gpu=Held(buffers=model.buffers, gradients=model.gradients if recipe.gradients_wait else 0),
            host=Held(parameters=parameters, gradients=reduced, optimizer=states + steps),
        )
    else:
        # launcher.train.optimizers.offload.HostOptimizer keeps copies of trained parameters. All gradients
        # come to the host in the backward pass, or one at a time in the update.
        copies = sum(count * shard.numel * p.itemsize for p, shard, count in trained)
        sizes = [(shard.numel * p.itemsize, count) for p, shard, count in trained if p.updated]
        every = sum(size * count for size, count in sizes)
        largest = max((size for size, _ in sizes), default=0)
        on_disk = states if recipe.offload == "nvme-optimizer" else 0
        host = Held(
            gradients=every if recipe.gradients_leave else largest,
            optimizer=states - on_disk + steps,
            copies=copies,
        )
        result = States(gpu=gpu, host=host, nvme=on_disk)
    return (
        result
        if ranks.on_gpu
        else result.model_copy(update={"gpu": Held(), "host": result.gpu + result.host})
    )


def has_states(p: Parameter, recipe: Recipe) -> bool:
    """Return whether a trained parameter has optimizer states.

    The first update creates states for the parameters that have gradients. Optimizers on the host and
    launcher.train.step_in_backward create all states at the start.
    """
    at_start = recipe.offload in ("cpu-optimizer", "nvme-optimizer") or recipe.optimizer_step == "backward"
    return p.requires_grad and (p.has_gradient or at_start)


def state_bytes(recipe: Recipe, p: Parameter, shard: Shard) -> int:
    """Return the bytes of one shard's optimizer states, as launcher.train.optimizers makes them.

    Excludes the step counter, and two tables of 1 KiB that map codes to values: all 8-bit parameters of a
    rank share them.
    """
    return sum(_bytes(state, p, shard, recipe) for state in OPTIMIZERS[recipe.optimizer].states)


def _bytes(state: State, p: Parameter, shard: Shard, recipe: Recipe) -> int:
    match state:
        case "as-parameter":
            return shard.numel * p.itemsize
        case "bf16":
            return shard.numel * BF16
        case "fp32-per-row":
            return shard.rows * FP32
        case "8-bit":
            eight = in_eight_bits(p, recipe)
            return shard.numel * CODE + _scales(shard) * FP32 if eight else shard.numel * FP32


def in_eight_bits(p: Parameter, recipe: Recipe) -> bool:
    """Return whether 8-bit optimizers store this parameter's states in 8 bit.

    The global size decides, so the answer is the same for any number of ranks:
    launcher.train.optimizers.eight_bit.
    """
    wide = p.vector or (p.embedding and recipe.embedding_states == "32-bit")
    return not wide and p.whole_numel >= LEAST_EIGHT_BIT


def _scales(shard: Shard) -> int:
    """Return the number of scales of a shard.

    If a row is a whole number of blocks, each row has its own scales. Otherwise every rank has as many scales
    as the largest shard: launcher.train.optimizers.quantization_blocks.scales_sharded_like.
    """
    if shard.row % BLOCK == 0:
        return shard.rows * (shard.row // BLOCK)
    return math.ceil(shard.padded / BLOCK)


def paged_bytes(recipe: Recipe, p: Parameter, shard: Shard) -> int:
    """Return the paged bytes of a shard's states: the codes. Scales stay in ordinary GPU memory."""
    optimizer = OPTIMIZERS[recipe.optimizer]
    if not optimizer.paged or not in_eight_bits(p, recipe) or shard.numel < LEAST_PAGED:
        return 0
    return len(optimizer.states) * shard.numel * CODE


def buckets_of(model: ModelShapes, recipe: Recipe) -> int:
    """Return the bytes of DDP's buckets, which exist from the beginning; the gradients are views of them."""
    return model.buckets if in_buckets(recipe) else 0


def _gradients(model: ModelShapes, recipe: Recipe, reduced: int) -> int:
    """Return the peak bytes of gradients, as launcher.train.sharding.sharding.price_of_last counts them.

    DDP (`ddp`, `zero1`): the buckets; `grad_sync: last` adds a second copy. On a mesh there are no buckets.
    FSDP: this rank's shards; with `grad_sync: last` all gradients whole, in the type of the shards.
    `optimizer_step: backward` keeps none. With an optimizer on the host, only whole gradients stay.
    """
    if recipe.optimizer_step == "backward":
        return 0
    if recipe.gradients_leave:
        return model.gradients if recipe.gradients_wait and recipe.sharding in SHARDED else 0
    waits = recipe.gradients_wait and grad_sync_applies(recipe)
    if in_buckets(recipe):
        return buckets_of(model, recipe) + (model.gradients if waits else 0)
    return model.gradients if waits else reduced


def ranks_on_node(model: ModelShapes, recipe: Recipe, ranks: Ranks) -> list[tuple[int, int]]:
    """Return (rank, number of ranks) for the first node; ranks with equal states are one pair."""
    shard_counts = {ranks.shards(recipe), ranks.state_shards(recipe)}
    # The first ranks of a parameter's shards all have the most rows.
    whole = {
        shards: min(p.rows // -(-p.rows // shards) if p.rows else shards for p, _ in model.distinct)
        for shards in shard_counts
    }
    groups: list[tuple[int, int]] = []
    for rank in range(ranks.per_node):
        if rank and all(rank // recipe.tensor % shards < whole[shards] for shards in shard_counts):
            groups[0] = (0, groups[0][1] + 1)
        else:
            groups.append((rank, 1))
    return groups
