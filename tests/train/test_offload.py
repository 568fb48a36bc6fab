"""States and parameters off the device: the same numbers, the same checkpoints, less memory."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.spec.recipe import Optimizer
from launcher.train.cpu_memory_budget import MIB, MemoryBudget
from launcher.train.local_shards import local, sharded_like
from launcher.train.optimizers.build import builder
from launcher.train.optimizers.offload import HostOptimizer, ScratchFiles, in_host_memory
from launcher.train.optimizers.quantization_blocks import scales_sharded_like
from launcher.train.optimizers.state import zeros_sharded_like
from launcher.train.rank import SetupError
from tests.train.runs import job, measure, prepare, recipe, start

# Blocks of 256 elements end elsewhere in another shard: measured 5e-6 for 8-bit states, 4e-7 for the others.
BETWEEN_SHARDINGS = 5e-5


@pytest.fixture(scope="module", params=[pytest.param(4, marks=pytest.mark.thorough)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found, two on a node."""
    folder = tmp_path_factory.mktemp("offload")
    measure("offloads.py", folder, ranks=request.param, per_node=2)
    return [json.loads((folder / f"rank {rank}.json").read_text()) for rank in range(request.param)]


def test_a_run_changes_its_offload_at_every_checkpoint_and_stays_equal_bit_for_bit(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        for name, found in rank["chains"].items():
            changing, straight = found["losses"]
            if name.startswith(("ddp", "zero1")):  # in another order in its first step
                assert changing == pytest.approx(straight, rel=1e-6)
                continue
            assert changing == straight, name
            assert found["digests"][0] == found["digests"][1], name


def test_scratch_files_have_no_name_that_could_be_left_behind(ranks: list[dict[str, Any]]) -> None:
    assert all(found["left in nvme_dir"] == [] for rank in ranks for found in rank["chains"].values())


def test_every_optimizer_trains_under_hybrid_as_under_ddp_and_its_replicas_stay_equal(
    ranks: list[dict[str, Any]],
) -> None:
    for name, losses in ranks[0]["ddp"].items():
        _, hybrid = ranks[0]["chains"][f"hybrid {name}"]["losses"]
        assert hybrid[:2] == pytest.approx(losses, rel=BETWEEN_SHARDINGS), name
        first, second, *others = (rank["chains"][f"hybrid {name}"]["digests"] for rank in ranks)
        assert first != second and [first, second] == others, name


def test_a_model_built_on_meta_is_filled_where_its_shards_live(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        kept, on_host = rank["from meta"]
        assert kept == on_host and kept[1:] == [[2.0, 2.0, 2.0], False]


@pytest.mark.parametrize("where", ["host", "nvme"])
@pytest.mark.parametrize("optimizer", sorted({*get_args(Optimizer)} - {"paged-adamw-8bit"}))
def test_no_optimizer_computes_anything_else_with_offload(tmp_path: Path, optimizer: Any, where: str) -> None:
    def trained(offloaded: bool, dtype: torch.dtype) -> tuple[list[nn.Parameter], dict[str, Any]]:
        generator = torch.Generator().manual_seed(0)
        shapes = ((64, 256), (70, 90), (300,), (64, 80), (0, 3))
        made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        groups = [{"params": made[:2], "weight_decay": 0.1}, {"params": made[2:], "weight_decay": 0.0}]
        make = builder(optimizer, lr=1e-2)
        keep = ScratchFiles(str(tmp_path), "run") if where == "nvme" else in_host_memory
        stepped: torch.optim.Optimizer = make(groups, [made[3]])
        if offloaded:
            stepped = HostOptimizer(groups, [made[3]], make, keep, nullcontext)
        for step in range(4):
            for p in made[step % 2 :]:  # one of them has no gradient in every second step
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            stepped.param_groups[0]["lr"] = 0.1 / (step + 1)
            stepped.step()
            stepped.zero_grad()
            stepped.load_state_dict(stepped.state_dict())
            for p in made[1:]:  # as code of a task may
                p.data.clamp_(-2 + step / 4, 2)
        return made, stepped.state_dict()

    for dtype in (torch.float32, torch.bfloat16):
        (plain, states), (moved, theirs) = trained(False, dtype), trained(True, dtype)
        assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
        assert states["param_groups"] == theirs["param_groups"]
        for number, state in states["state"].items():
            for name, value in state.items():
                assert torch.equal(value, theirs["state"][number][name]), (number, name)


@pytest.mark.parametrize("where", ["host", "nvme"])
def test_states_are_not_on_the_device(tmp_path: Path, where: str) -> None:
    """Beside the parameters themselves, two states of their size, and while stepping the gradients."""

    def live(offloaded: bool) -> int:
        with MemoryBudget(64 * MIB) as budget:
            model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
            groups = [{"params": list(model.parameters())}]
            keep = ScratchFiles(str(tmp_path), "run") if where == "nvme" else in_host_memory
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=True)
            if offloaded:
                optimizer = HostOptimizer(groups, (), _adamw, keep, budget.host_side)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
            return budget.live

    parameters = MIB  # 4 x 256 x 256 x 4 bytes
    assert live(False) == pytest.approx(3 * parameters, abs=100)
    assert live(True) == pytest.approx(parameters, abs=100)


def test_states_on_nvme_are_memory_mapped_files(tmp_path: Path) -> None:
    p = nn.Parameter(torch.ones(64, 1024))
    left = tmp_path / "run [1]-left"
    left.write_text("of an attempt that was killed")
    made = HostOptimizer([{"params": [p]}], (), _adamw, ScratchFiles(str(tmp_path), "run [1]"), nullcontext)
    maps = Path("/proc/self/maps").read_text().splitlines()
    for name in ("exp_avg", "exp_avg_sq"):
        [line] = [line for line in maps if line.startswith(f"{made.state[p][name].data_ptr():x}-")]
        assert str(tmp_path) in line and line.endswith("(deleted)")
    assert not left.exists()


def test_states_exist_before_the_first_step_and_count_as_none(tmp_path: Path) -> None:
    p = nn.Parameter(torch.ones(8, 8))
    made = HostOptimizer([{"params": [p]}], (), _adamw, in_host_memory, nullcontext)
    assert (
        made.state[p]["step"] == 0 and not made.state[p]["exp_avg"].any() and torch.equal(p, torch.ones(8, 8))
    )


def test_a_full_disk_is_named_before_training(tmp_path: Path, no_large_files: None) -> None:
    """A real failing write: no file may grow beyond 64 KiB."""
    p = nn.Parameter(torch.ones(64, 1024))
    with pytest.raises(SetupError, match=r"is too small .* written 0 B, and the next .*File too large"):
        HostOptimizer([{"params": [p]}], (), _adamw, ScratchFiles(str(tmp_path), "run"), nullcontext)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def no_large_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 2**10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_directory_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"needs train\.nvme_dir"):
        ScratchFiles(None, "run")
    # To root, all permissions say that files can be made in /proc.
    for folder in (str(tmp_path / "nowhere"), "/proc"):
        with pytest.raises(SetupError, match=f"{folder} is not a directory that this user can write to"):
            ScratchFiles(folder, "run")


@pytest.mark.slow
def test_a_rank_says_what_is_on_the_host_and_what_whole_gradients_cost(tmp_path: Path) -> None:
    run = prepare(tmp_path / "run", job(steps=1, train={"nvme_dir": str(tmp_path)}))
    ended = start(run, recipe("fsdp", 2, 2, offload="nvme-optimizer", grad_sync="last"))
    assert ended.codes == {0: 0, 1: 0}, ended.output
    assert f"of states in {tmp_path}" in ended.output
    assert "grad_sync: last keeps the unsharded gradients of all 2,928 parameters" in ended.output


def test_the_state_of_a_shard_on_the_host_stays_there_though_the_ranks_meet_on_gpus() -> None:
    """DTensor.from_local would move it. A mesh of GPUs that nobody asks for anything needs none."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False, _rank=0)
        whole = TensorMeta(torch.Size((8, 512)), (512, 1), torch.float32)
        p = DTensor(torch.ones(4, 512), DTensorSpec(mesh, (Shard(0),), whole), requires_grad=False)
        for state in (
            zeros_sharded_like(p, torch.uint8),
            scales_sharded_like(p),
            sharded_like(p, torch.ones(4, 3), (8, 3)),
        ):
            assert isinstance(state, DTensor) and local(state).device.type == "cpu"
            assert state.device_mesh is mesh and state.shape[0] == 8
    finally:
        dist.destroy_process_group()


def _adamw(groups: list[dict[str, Any]], wide: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True)
