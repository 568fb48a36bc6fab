"""What a rank holds on a GPU beside its tensors: which constants apply where."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from launcher.memory.overheads import ACROSS, CONTEXT, NODE, PAIR, cublas_workspaces, overheads, workspaces_at
from launcher.memory.states import Ranks
from launcher.spec.cluster import Cluster, Gpu
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Recipe, Sharding
from launcher.spec.schema import json_schema

A100 = Gpu(type="NVIDIA A100-SXM4-80GB", count=8, memory="79.1GiB")  # type: ignore[arg-type]


def recipe(sharding: Sharding) -> Recipe:
    return Recipe(
        precision="bf16-mixed", optimizer="adamw", sharding=sharding, micro_batch_size=1, grad_accum=1
    )


@pytest.mark.parametrize(
    ("sharding", "world", "per_node", "buffers"),
    [
        ("none", 1, 1, 0),
        ("ddp", 2, 2, PAIR),
        ("fsdp", 8, 8, NODE),
        ("fsdp", 16, 8, ACROSS),
        ("fsdp", 2, 1, ACROSS),
        ("hybrid", 16, 8, ACROSS + NODE + ACROSS),  # all ranks, shards within a node, replicas over nodes
        ("hybrid", 4, 2, ACROSS + PAIR + ACROSS),
    ],
)
def test_a_context_for_each_rank_and_buffers_for_each_communicator(sharding, world, per_node, buffers):
    held = overheads(A100, recipe(sharding), Ranks(world, per_node, on_gpu=True))
    assert held == {"CUDA context": CONTEXT, **({"NCCL buffers": buffers} if buffers else {})}


def test_ranks_on_the_cpu_hold_none_of_it():
    assert overheads(A100, recipe("fsdp"), Ranks(8, 8, on_gpu=False)) == {}


def test_the_profile_knows_better():
    profile: dict[str, Any] = {
        "name": "mine",
        "scheduler": "local",
        "node": {"gpu": {"type": "NVIDIA L4", "count": 4, "memory": "22.5GiB", "overhead": "1.5GiB"}},
    }
    jsonschema.validate(profile, json_schema("cluster"))
    gpu = Cluster.model_validate(profile).node.gpu
    held = overheads(gpu, recipe("fsdp"), Ranks(4, 4, on_gpu=True))
    assert list(held.values()) == [int(1.5 * GIB)]


@pytest.mark.parametrize(
    ("gpu", "size"),
    [
        ("NVIDIA A100-SXM4-80GB", 8_519_680),
        ("NVIDIA RTX A6000", 8_519_680),
        ("NVIDIA RTX 5000 Ada Generation", 8_519_680),
        ("Quadro RTX 5000", 8_519_680),
        ("NVIDIA H100 80GB HBM3", 32 * 2**20),
        ("NVIDIA H200", 32 * 2**20),
        ("NVIDIA GH200 480GB", 32 * 2**20),
        ("NVIDIA B200", 32 * 2**20),
        ("NVIDIA GeForce RTX 5090", 32 * 2**20),
        ("NVIDIA GB10", 32 * 2**20),
        ("nvidia_h100_80gb_hbm3", 32 * 2**20),
    ],
)
def test_cublas_takes_one_workspace_for_forward_and_one_for_backward(gpu, size):
    assert cublas_workspaces(gpu) == {"forward": size, "backward": size}


@pytest.mark.parametrize(
    ("when", "phase", "sharding", "accumulation", "there"),
    [
        ("resume", "load", "fsdp", 1, 0),
        ("first step", "forward", "none", 1, 32),
        ("first step", "forward", "ddp", 1, 32),
        ("first step", "forward", "none", 3, 40),
        ("first step", "forward", "fsdp", 1, 40),
        ("steady state", "forward", "none", 1, 40),
    ],
)
def test_a_workspace_is_there_once_its_pass_has_run(
    when: str, phase: str, sharding: Sharding, accumulation: int, there: int
) -> None:
    one = recipe(sharding).model_copy(update={"grad_accum": accumulation})
    assert workspaces_at(when, phase, one, {"forward": 32, "backward": 8}) == there
