"""Optimizers on a CUDA device: bitsandbytes' CUDA kernels, and states in managed memory."""

from __future__ import annotations

import pytest

from tests.lab import Lab, metrics

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
@pytest.mark.parametrize(
    "optimizer", ["adamw", "adamw-bf16", "adamw-8bit", "paged-adamw-8bit", "lion", "lion-8bit", "adam-mini"]
)
def test_every_optimizer_trains_and_writes_checkpoints(
    lab: Lab, optimizer: str, precision: str, sharding: str
) -> None:
    job = lab.job(
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 2, "dim": 256, "heads": 4, "context": 256},
        batch={"global": 64},
        resources={"gpus_per_node": 1},
        recipe={"sharding": sharding, "precision": precision, "optimizer": optimizer},
        train={"lr": 3e-4 if "lion" in optimizer else 1e-3, "checkpoint_every": 10},
        steps=20,
    )
    done = lab.cli("run", str(job), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [line["loss"] for line in metrics(lab.newest())]
    assert losses[-1] < losses[0] - 0.5


def test_paged_states_change_nothing_but_where_they_live() -> None:
    import torch
    from torch import nn

    from launcher.train.optimizers.eight_bit import EightBit

    def trained(paged: bool) -> tuple[nn.Parameter, EightBit]:
        generator = torch.Generator("cuda").manual_seed(0)
        p = nn.Parameter(torch.randn(512, 512, device="cuda:0", generator=generator))
        made = EightBit([{"params": [p]}], "adam", lr=1e-2, betas=(0.9, 0.999), paged=paged)
        for step in range(20):
            p.grad = torch.randn(p.shape, device="cuda:0", generator=generator)
            made.step()
            if step == 10:
                made.load_state_dict(made.state_dict())
        return p, made

    (plain, resident), (paged, managed) = trained(False), trained(True)
    assert torch.equal(plain, paged)
    for name, value in resident.state[plain].items():
        assert torch.equal(value, managed.state[paged][name]), name
    assert managed.state[paged]["state1"].device == paged.device
    assert len(managed._pages[id(paged)]) == 2 and not resident._pages
