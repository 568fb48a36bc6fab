"""Constants for GPU memory that a rank uses in addition to the tensors of the training step.

`overheads`: the CUDA context and NCCL's buffers. They are outside of PyTorch's caching allocator and not in
its counters. `node.gpu.overhead` in a cluster's profile replaces them.

`cublas_workspaces`: cuBLAS takes them from the allocator, but no traced operator shows them.

Each figure is what its source reports for its own machine. Not included: cuDNN's workspaces, scratch memory
inside fused kernels, other processes on the same GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.memory.states import Ranks
from launcher.spec.cluster import Gpu
from launcher.spec.mesh import mesh_of
from launcher.spec.recipe import SHARDED, Recipe

MIB = 2**20

CONTEXT = 828 * MIB
"""The CUDA context with the code of the kernels of a training step, which CUDA loads at their first use
(pytorch/pytorch#86509). Measured on an H200 with torch 2.11 and CUDA 13.0: 756 MiB after a forward pass.
Without kernels 426 MiB on an RTX 6000 Ada (unslothai/unsloth-zoo#1053: torch 2.10, CUDA 13.0)."""

PAIR = 544 * MIB
"An NCCL communicator of two ranks on one node: 4 x A100 with NVLink, all-reduce (NVIDIA/nccl#964)."
NODE = 688 * MIB
"""An NCCL communicator of three or more ranks on one node, from the same source. NVIDIA/nccl#1685 has 1.06 GB
for all memory outside of PyTorch on 8 x H100, before an all-to-all."""
ACROSS = 1024 * MIB
"""An NCCL communicator of ranks on several nodes: 1.6 GB (NVIDIA/nccl#864), assumed to include the context.
Grows with the network cards in use (NVIDIA/nccl#818), but not with more than two nodes (NVIDIA/nccl#986)."""

WORKSPACE = (2 * 4096 + 8 * 16) * 1024
"""Bytes of one cuBLAS workspace: CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 in
aten/src/ATen/cuda/CublasHandlePool.cpp."""
LARGE_WORKSPACE = 32 * MIB
"""Bytes of one cuBLAS workspace on Hopper and, in newer versions of torch, on Blackwell: from that source.
Measured on an H200."""
HAS_LARGE_WORKSPACE = re.compile(
    r"\bG?[HB](20|100|200|300|800)\b|\bGB10\b|\bThor\b|\bRTX 50[5-9]0\b|Blackwell", re.IGNORECASE
)


def overheads(gpu: Gpu | None, recipe: Recipe, ranks: Ranks) -> dict[str, int]:
    """Return the bytes on each GPU outside of PyTorch's allocator, by category; empty on a CPU."""
    if not ranks.on_gpu:
        return {}
    if gpu is not None and gpu.overhead is not None:
        return {"beside PyTorch, by the cluster profile": gpu.overhead}
    buffers = sum(_buffers(*each) for each in communicators(recipe, ranks))
    return {"CUDA context": CONTEXT, **({"NCCL buffers": buffers} if buffers else {})}


def communicators(recipe: Recipe, ranks: Ranks) -> list[tuple[int, bool]]:
    """Return a rank's NCCL communicators: the number of ranks, and whether they are on several nodes.

    One communicator joins all ranks, for the sums of a step; DDP and FSDP also use it. A mesh of several
    dimensions (launcher.train.mesh) has one more for each.
    """
    nodes, (stages, data, tensor) = ranks.world // ranks.per_node, mesh_of(recipe, ranks.world)
    groups = [(ranks.world, nodes > 1), (tensor, False)]
    if recipe.sharding == "hybrid":
        groups += [(ranks.shards(recipe), False), (nodes, True)]
    elif data < ranks.world:
        groups.append((data, data * tensor > ranks.per_node))
    if stages > 1:  # launcher.train.pipeline.channel has a group for each way
        groups += [(stages, nodes > 1)] * (2 if recipe.virtual_stages == 1 else 4)
    return [(members, across) for members, across in groups if members > 1]


def _buffers(members: int, across: bool) -> int:
    if across:
        return ACROSS
    return PAIR if members == 2 else NODE


def cublas_workspaces(gpu_type: str) -> dict[str, int]:
    """Return the pass that takes a cuBLAS workspace -> bytes.

    PyTorch takes a workspace from its caching allocator at a thread's first matrix product and keeps it. The
    forward pass and the backward pass have one thread each. `gpu_type`: the name that nvidia-smi shows.
    """
    size = LARGE_WORKSPACE if HAS_LARGE_WORKSPACE.search(gpu_type.replace("_", " ")) else WORKSPACE
    return {"forward": size, "backward": size}


def workspaces_at(when: str, phase: str, recipe: Recipe, workspaces: Mapping[str, int]) -> int:
    """Return the bytes of the workspaces that exist at a peak. `workspaces`: from `cublas_workspaces`.

    There are none before a step, and one in a forward pass before any backward pass. Under FSDP the
    recovery's self-test has allocated both by then. Measured on an H200.
    """
    if (when, phase) == ("resume", "load"):
        return 0
    alone = (when, phase) == ("first step", "forward") and recipe.grad_accum == 1
    return workspaces["forward"] if alone and recipe.sharding not in SHARDED else sum(workspaces.values())
