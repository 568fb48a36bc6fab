"""Removal of repeated equal blocks before a trace; launcher.memory.unroll adds them to the trace again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from launcher.memory.unroll import NotUniformError, Run
from launcher.spec.recipe import Recipe
from launcher.train.task import outermost

KEPT, REPEATED = 5, 2
"""Maximum number of blocks kept per run, and the index of the one that represents the removed blocks. The
first two and the last two are kept because their neighbours differ."""


def blocks_to_keep(recipe: Recipe, *, complete: bool) -> tuple[int, ...]:
    """Return how many blocks of a run to trace: one number, or another one if unroll() refuses that trace.

    Without the last but one, the last stands next to the repeated block. That can be enough in a single pass
    unless activations leave the device, which they do while the next block runs.
    """
    if complete or recipe.pipeline > 1 or recipe.activations in ("offload", "compress"):
        return (KEPT,)
    return (KEPT - 1, KEPT)


def fold(
    model: nn.Module, blocks: Iterable[nn.Module], most: int = KEPT
) -> tuple[tuple[Run, ...], dict[nn.Module, Any]]:
    """Remove blocks from the ModuleLists of `model` in place, so that each run has at most `most`. Return the
    runs, and (index of the run, index among its kept blocks) for each kept block."""
    units = set(outermost(blocks))
    runs: list[Run] = []
    kept: dict[nn.Module, tuple[int, int]] = {}
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList):
            continue
        removed: list[int] = []
        for _, group in itertools.groupby(enumerate(module), key=lambda item: _shape(item[1], units)):
            row = list(group)
            if row[0][1] not in units or len(row) <= most:
                continue
            run = Run(prefix, row[0][0], len(row), most, REPEATED)
            remaining = row[: REPEATED + 1] + row[len(row) - (most - REPEATED - 1) :]
            kept.update({block: (len(runs), number) for number, (_, block) in enumerate(remaining)})
            removed += [position for position, block in row if block not in kept]
            runs.append(run)
        for position in reversed(removed):
            del module[position]
    return tuple(runs), kept


def fewer_stages(blocks: Sequence[int], stage: int) -> tuple[tuple[int, ...], int]:
    """Return the smallest pipeline in which a stage does what `stage` does here, and the index of that
    stage: the first or the last of two, or the second of three.

    `blocks`: the number of blocks of each stage. The stage keeps at most KEPT of its blocks, the others one.
    """
    kept = min(blocks[stage], KEPT)
    if stage == 0:
        return (kept, 1), 0
    return ((1, kept), 1) if stage == len(blocks) - 1 else ((1, kept, 1), 1)


def fold_stage(
    model: nn.Module, blocks: Sequence[nn.Module], stages: Sequence[int], stage: int
) -> tuple[tuple[Run, ...], dict[nn.Module, Any]]:
    """Like `fold` for one stage of a pipeline: only the blocks of `stages` are left. The last stage keeps the
    model's last blocks.

    Raises NotUniformError if the blocks are not the equal blocks of one ModuleList.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    prefix, module = next(((name, m) for name, m in lists if list(m) == list(blocks)), ("", None))
    if module is None or len({_shape(block, set(blocks)) for block in blocks}) > 1:
        raise NotUniformError("the blocks of the pipeline are not the equal blocks of one list")
    del module[sum(stages[:-1]) : len(blocks) - stages[-1]]
    first, kept = sum(stages[:stage]), stages[stage]
    stage_blocks = list(module)[first : first + kept]
    run = Run(prefix, first, kept, kept, REPEATED)
    return (run,), {block: (0, number) for number, block in enumerate(stage_blocks)}


def _shape(block: nn.Module, units: set[nn.Module]) -> Any:
    """Return a key that is equal for blocks that can represent each other, judged from outside."""
    if block not in units:
        return id(block)
    tensors = itertools.chain(block.named_parameters(), block.named_buffers())
    return (
        type(block),
        tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors),
        tuple((name, type(module)) for name, module in block.named_modules()),
    )
