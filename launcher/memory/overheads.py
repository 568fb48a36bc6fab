"""What a rank holds on its GPU beside the tensors of the training step, as stated constants.

Two kinds. Outside of PyTorch's caching allocator, and in none of its counters: the CUDA context and NCCL's
buffers (`overheads`). Inside it, but made by no operator that a trace sees: cuBLAS's workspaces
(`cublas_workspaces`).

None of these figures has been measured by us on a GPU yet: each is what its source reports of its own
machine. A cluster's profile overrules the first kind (`node.gpu.overhead`). In neither: cuDNN's workspaces,
scratch inside of fused kernels, other processes on the same GPU.
"""

from __future__ import annotations

import re

from launcher.memory.states import Ranks
from launcher.spec.cluster import Gpu
from launcher.spec.recipe import Recipe

MIB = 2**20

CONTEXT = 600 * MIB
"""CUDA context with the code of the kernels loaded so far. 426 MiB with none on an RTX 6000 Ada
(unslothai/unsloth-zoo#1053: torch 2.10, CUDA 13.0), "around 400 MB" (pytorch/pytorch#109888); the rest is
room for the kernels of a training step, which CUDA loads at their first use (pytorch/pytorch#86509)."""

PAIR = 544 * MIB
"A NCCL communicator of two ranks on one node: 4 x A100 with NVLink, all-reduce (NVIDIA/nccl#964)."
NODE = 688 * MIB
"""Of three or more ranks on one node: the same source. NVIDIA/nccl#1685 has 1.06 GB for all but PyTorch's
memory on 8 x H100, before an all-to-all."""
ACROSS = 1024 * MIB
"""Of ranks on several nodes: 1.6 GB (NVIDIA/nccl#864), taken to be with the context. It grows with the
network cards in use (NVIDIA/nccl#818), and no longer with the nodes beyond two (NVIDIA/nccl#986)."""

WORKSPACE = (2 * 4096 + 8 * 16) * 1024
"One of cuBLAS, CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8; bytes. aten/src/ATen/cuda/CublasHandlePool.cpp."
WORKSPACE_HOPPER = 32 * MIB
"The same on compute capability 9.0."
HOPPER = re.compile(r"\bG?H(20|100|200|800)\b", re.IGNORECASE)


def overheads(gpu: Gpu | None, recipe: Recipe, ranks: Ranks) -> dict[str, int]:
    """Bytes on each GPU outside of PyTorch's allocator, by what holds them; none where the CPU computes."""
    if not ranks.on_gpu:
        return {}
    if gpu is not None and gpu.overhead is not None:
        return {"beside PyTorch, by the cluster profile": gpu.overhead}
    buffers = sum(_buffers(*one) for one in communicators(recipe, ranks))
    return {"CUDA context": CONTEXT, **({"NCCL buffers": buffers} if buffers else {})}


def communicators(recipe: Recipe, ranks: Ranks) -> list[tuple[int, bool]]:
    """NCCL's, of one rank: how many ranks it joins, and whether they are on several nodes.

    All ranks have one, for the sums of a step; DDP and FSDP use it. hybrid has two more, one for each of its
    directions (launcher.train.sharding.device_mesh).
    """
    nodes = ranks.world // ranks.per_node
    found = [(ranks.world, nodes > 1)]
    if recipe.sharding == "hybrid":
        found += [(ranks.per_node, False), (nodes, True)]
    return [(members, across) for members, across in found if members > 1]


def _buffers(members: int, across: bool) -> int:
    if across:
        return ACROSS
    return PAIR if members == 2 else NODE


def cublas_workspaces(gpu_type: str) -> tuple[int, ...]:
    """Bytes of each. PyTorch takes them from its caching allocator at a thread's first matrix product and
    keeps them: one for the thread of the forward pass, one for that of the backward pass. They belong to
    `before` of `launcher.memory.allocator.replay`.

    `gpu_type`: as nvidia-smi names it.
    """
    return (WORKSPACE_HOPPER if HOPPER.search(gpu_type) else WORKSPACE,) * 2
