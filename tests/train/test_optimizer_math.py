"""The optimizers on one device, against what they claim to equal."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks, states_of
from launcher.rundir.layout import RunDir
from launcher.spec.optimizer_table import OPTIMIZERS, Optimizer
from launcher.train.adapters.nf4 import NF4Linear
from launcher.train.cpu_memory_budget import Unlimited
from launcher.train.optimizers.adam_mini import AdamMini
from launcher.train.optimizers.adamw_bf16 import AdamWBf16, round_stochastically
from launcher.train.optimizers.build import build_optimizer, builder
from launcher.train.optimizers.eight_bit import EightBit
from launcher.train.rank import SetupError
from tests.train.runs import one_rank, recipe


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int = 10) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["adam", "lion"])
def test_8_bit_equals_bitsandbytes_bit_for_bit(kernel: Any, dtype: torch.dtype) -> None:
    from bitsandbytes import optim

    shapes = [(64, 256), (70, 90), (10, 20), (300,)]
    ours, theirs = parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)
    betas = (0.9, 0.999) if kernel == "adam" else (0.9, 0.99)
    group = {"params": ours, "weight_decay": 0.1}
    train(ours, EightBit([group], kernel, lr=1e-2, betas=betas))
    reference = optim.AdamW8bit if kernel == "adam" else optim.Lion8bit
    train(theirs, reference(theirs, lr=1e-2, betas=betas, weight_decay=0.1))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("states", ["32-bit", "8-bit"])
def test_the_recipe_decides_the_states_of_embeddings(states: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 64))
    chosen = recipe("none", optimizer="adamw-8bit", embedding_states=states)
    optimizer = build_optimizer(model, one_rank(RunDir(tmp_path), recipe=chosen), Unlimited())
    model(torch.arange(64)).sum().backward()
    optimizer.step()
    embedding, linear = optimizer.state[model[0].weight], optimizer.state[model[1].weight]
    assert ("absmax1" in embedding) == (states == "8-bit") and "absmax1" in linear


@pytest.mark.parametrize("made", [AdamWBf16, AdamMini, partial(EightBit, kernel="adam", betas=(0.9, 0.999))])
def test_states_do_not_depend_on_the_default_type(made: Any) -> None:
    """A task may call torch.set_default_dtype(torch.bfloat16), in which 256 + 1 is 256."""
    trained = {}
    for default in (torch.float32, torch.bfloat16):
        [p] = parameters((64, 256))
        gradient = torch.linspace(-1, 1, p.numel()).view_as(p)
        optimizer = made([{"params": [p]}], lr=1e-2)
        torch.set_default_dtype(default)
        try:
            for _ in range(260):
                p.grad = gradient.clone()
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        trained[default] = p.detach()
        assert int(optimizer.state[p]["step"]) == 260
    assert torch.equal(trained[torch.float32], trained[torch.bfloat16])


def test_8_bit_does_not_depend_on_the_memory_format() -> None:
    plain, last = parameters((32, 16, 3, 3)), parameters((32, 16, 3, 3))
    last[0].data = last[0].data.to(memory_format=torch.channels_last)
    for made in (plain, last):
        train(made, EightBit([{"params": made}], "adam", lr=1e-2, betas=(0.9, 0.999)))
    assert torch.equal(plain[0], last[0])
    assert last[0].is_contiguous(memory_format=torch.channels_last)


def test_vectors_small_tensors_and_named_ones_keep_32_bit_states() -> None:
    large, small, vector, named = parameters((64, 64), (63, 65), (5000,), (64, 64))
    made = EightBit([{"params": [large]}], "adam", lr=1.0, betas=(0.9, 0.999), wide=[named])
    assert [made.in_eight_bits(p) for p in (large, small, vector, named)] == [True, False, False, False]


def test_pages_are_refused_without_cuda() -> None:
    made = parameters((400, 400))
    optimizer = EightBit([{"params": made}], "adam", lr=1e-2, betas=(0.9, 0.999), paged=True)
    with pytest.raises(SetupError, match="choose optimizer: adamw-8bit"):
        train(made, optimizer)


def test_what_needs_bitsandbytes_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SetupError, match=r'pip install "bitsandbytes>=0\.50"'):
        builder("lion-8bit", lr=1.0)([{"params": parameters((2, 2))}], ())
    with pytest.raises(SetupError, match=r"adapter\.kind: qlora needs bitsandbytes .* or choose kind: lora"):
        NF4Linear(nn.Linear(64, 64), torch.bfloat16)


@pytest.mark.slow
def test_bitsandbytes_is_imported_only_when_a_recipe_needs_it() -> None:
    code = "import sys, launcher.train.loop; sys.exit('bitsandbytes' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_row_tells_the_states_that_its_builder_makes(row: Optimizer) -> None:
    made = parameters((64, 256), dtype=torch.bfloat16)
    optimizer = builder(row.name, lr=1.0)([{"params": made}], ())
    if row.paged:  # CUDA only: tests/gpu
        return
    train(made, optimizer, steps=1)
    states = {name: state for name, state in optimizer.state[made[0]].items() if state.numel() > 1}
    shapes = ModelShapes((Parameter("weight", (64, 256), itemsize=2),), buffers=0)
    held = states_of(shapes, recipe(optimizer=row.name), Ranks(1, 1, on_gpu=False)).host.optimizer
    steps = optimizer.state[made[0]].get("step", torch.tensor(())).nbytes
    assert sum(state.nbytes for state in states.values()) + steps == held
    assert (steps > 0) == (row.steps is not None)
    assert sum(not name.startswith("absmax") for name in states) == len(row.states)


def test_adam_mini_is_adamw_where_a_row_has_one_magnitude() -> None:
    ours, theirs = parameters((8, 16), (5,)), parameters((8, 16), (5,))
    mini = AdamMini([{"params": ours, "weight_decay": 0.1}], lr=1e-2)
    adamw = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    for step in range(10):
        sign = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).sign()
        gradients = [sign * torch.arange(1.0, 9.0)[:, None] * (step + 1), torch.arange(5.0) - step]
        for made in (ours, theirs):
            for p, gradient in zip(made, gradients, strict=True):
                p.grad = gradient.clone()
        mini.step()
        adamw.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    assert [mini.state[p]["exp_avg_sq"].shape for p in ours] == [(8, 1), (5,)]


def test_adam_mini_takes_the_mean_square_of_a_row() -> None:
    [p] = parameters((2, 4))
    optimizer = AdamMini([{"params": [p]}], lr=1e-2)
    p.grad = torch.tensor([[1.0, -1, 3, -1], [0, 0, 0, 2]])
    optimizer.step()
    assert torch.allclose(optimizer.state[p]["exp_avg_sq"], torch.tensor([[3e-3], [1e-3]]))


def test_stochastic_rounding_gives_the_neighbours_and_the_right_mean() -> None:
    low, high = 1.0, 1.0 + 2**-7  # neighbours in bf16
    x = torch.full((40_000,), low + 0.25 * (high - low))
    rounded = round_stochastically(x, seed=3).float()
    assert set(rounded.unique().tolist()) == {low, high}
    # A share of 0.25 among 40,000 has a standard deviation of 0.0022.
    assert float((rounded == high).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert torch.equal(round_stochastically(x, seed=3).float(), rounded)
    assert not torch.equal(round_stochastically(x, seed=4).float(), rounded)
    exact = torch.tensor([0.0, 1.0, 2.0**-126, 3.0e38]).bfloat16()
    assert torch.equal(round_stochastically(exact.float(), seed=5), exact)


def test_a_bf16_second_moment_shrinks_when_the_gradients_do() -> None:
    [p] = parameters((4096,))
    optimizer = AdamWBf16([{"params": [p]}], lr=0.0)
    p.grad = torch.full_like(p, 100.0)
    optimizer.step()
    state = optimizer.state[p]
    before = float(state["exp_avg_sq"].float().mean())
    p.grad = torch.zeros_like(p)
    for _ in range(200):
        optimizer.step()
    assert before == pytest.approx(10, rel=0.01)
    assert float(state["exp_avg_sq"].float().mean()) / before == pytest.approx(0.999**200, rel=0.01)
    to_nearest = torch.tensor(before).bfloat16()
    assert (to_nearest.float() * 0.999).bfloat16() == to_nearest  # why it is rounded stochastically
