"""Offload, float8 and gradient synchronisation on a CUDA device: pinned memory, copies, float8 products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, metrics

pytestmark = pytest.mark.gpu


def losses(lab: Lab, **recipe: Any) -> list[float]:
    job = lab.job(
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 2, "dim": 256, "heads": 4, "context": 256},
        batch={"global": 64},
        resources={"gpus_per_node": 1},
        recipe={"sharding": "fsdp", "precision": "bf16-mixed", **recipe},
        train={"lr": 1e-3, "checkpoint_every": 5, "nvme_dir": str(lab.folder)},
        steps=10,
    )
    done = lab.cli("run", str(job), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line["loss"] for line in metrics(lab.newest())]


@pytest.mark.parametrize("offload", ["cpu", "cpu-optimizer", "nvme-optimizer"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-bf16", "adamw-8bit", "lion", "lion-8bit", "adam-mini"])
def test_every_optimizer_trains_with_its_states_on_the_host(lab: Lab, optimizer: str, offload: str) -> None:
    """The CPU rounds an update otherwise than the GPU: the same curve, not the same bits."""
    moved, kept = (losses(lab, optimizer=optimizer, offload=where) for where in (offload, "none"))
    assert moved == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("sharding", ["none", "ddp", "zero1"])
def test_whole_parameters_go_up_and_down(lab: Lab, sharding: str) -> None:
    moved, kept = (losses(lab, sharding=sharding, offload=where) for where in ("cpu-optimizer", "none"))
    assert moved == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "fsdp"])
def test_gradients_that_meet_last_train_alike(lab: Lab, sharding: str) -> None:
    last, each = (
        losses(lab, sharding=sharding, micro_batch_size=16, grad_sync=when) for when in ("last", "each")
    )
    assert last == pytest.approx(each, rel=0.02)


@pytest.mark.parametrize(
    "activations", ["keep", "selective", "every-second", "checkpoint", "offload", "compress"]
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_float8_trains_as_bf16_does(lab: Lab, sharding: str, compiled: bool, activations: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 needs compute capability 8.9")
    if compiled and activations in ("offload", "compress"):
        pytest.skip("refused by the plan")
    fields = {"sharding": sharding, "compile": compiled, "activations": activations}
    eight, mixed = (losses(lab, precision=precision, **fields) for precision in ("float8", "bf16-mixed"))
    assert eight[-1] < eight[0] and eight == pytest.approx(mixed, rel=0.05)


def test_offloaded_states_leave_the_device(tmp_path: Path) -> None:
    from contextlib import nullcontext

    import torch
    from torch import nn

    from launcher.train.optimizers.offload import HostOptimizer, ScratchFiles

    p = nn.Parameter(torch.ones(1024, 1024, device="cuda"))
    before = torch.cuda.memory_allocated()
    made = HostOptimizer(
        [{"params": [p]}],
        (),
        lambda groups, wide: torch.optim.AdamW(groups, lr=0.1, fused=True),
        ScratchFiles(str(tmp_path), "run"),
        nullcontext,
    )
    p.grad = torch.ones_like(p)
    made.step()
    made.zero_grad()
    assert torch.cuda.memory_allocated() == before
    assert float(p.mean()) == pytest.approx(0.9 - 0.1 * 0.01, rel=1e-4)


def test_gradients_leave_the_device_in_the_backward_pass() -> None:
    """Two micro-batches are added up on the host as on the device, to the bit."""
    from contextlib import nullcontext

    import torch
    from torch import nn

    from launcher.train.optimizers.host_gradients import HostGradients

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    batches = torch.randn(2, 16, 1024, device="cuda").unbind()
    for batch in batches:
        model(batch).square().sum().backward()
    plain = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    size = 2**22  # bytes of a gradient
    host = HostGradients(model.parameters(), nullcontext)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        model(batch).square().sum().backward()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() < before + 5 * size  # of 8 gradients, with activations
    moved = [host.of(p) for p in model.parameters()]
    assert len(plain) == 8
    assert all(one is not None and torch.equal(one, other) for one, other in zip(moved, plain, strict=True))
