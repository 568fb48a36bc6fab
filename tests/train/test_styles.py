"""Plans that cut layers in unusual ways: they train as one process does, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from launcher.train.tensor.unequal_parts import without_gaps
from launcher.train.tracing.tracer import fake_ranks
from tests.train.runs import measure
from tests.train.test_tensor import ALONE, BOTH, COMPILES, LOSS, MOVED, NORM, TENSOR, far, run

LORA, QLORA = {"kind": "lora", "rank": 4}, {"kind": "qlora", "rank": 4}
DROPS = {**LORA, "dropout": 1e-12}
"""Nothing is dropped, so that results can be compared."""
COMPILED = {"compile": True}


def job(how: str = "", adapter: dict[str, Any] | None = None, **args: Any) -> dict[str, Any]:
    return {
        "task": "styled:Styled",
        "args": {"how": how, **args},
        **({"adapter": adapter} if adapter else {}),
    }


JOBS = {
    "output layer in 4 bits": job(adapter=QLORA, hidden=256),
    "region": job("region"),
    "region in 4 bits": job("region", QLORA, hidden=256),
    "region without adapter in 4 bits": job("region", {**QLORA, "targets": ["up", "down"]}, hidden=256),
    "region with dropout": job("region", DROPS),
    "tied": job("tied"),
    "tied, adapter": job("tied", LORA),
    "25 between": job(hidden=25),
    "25 gathered": job("gathered", hidden=25),
    "25 whole between, dropout": job("whole between", DROPS, hidden=25),
    "25 distributed": job("distributed", hidden=25),
    "25 distributed region": job("distributed region", hidden=25),
    "odd sequence": job("odd sequence"),
    "odd sequence between": job("odd sequence between"),
    "by keyword": job("keywords"),
    "by keyword, adapter": job("keywords", LORA),
    "two names": job("two names"),
    "in place": job("in place", hidden=25),
    "in place, adapter": job("in place", LORA),
}
SHOWN = (
    "output layer in 4 bits",
    "region in 4 bits",
    "25 distributed region",
    "tied",
    "odd sequence",
    "25 whole between, dropout",
    "in place",
)
"Cases that `make test` runs."


def trained(folder: Path, ranks: int, mesh: dict[str, Any], names: Any = JOBS, **env: str) -> Any:
    cases = {name: (name, mesh) for name in names}
    return run("trained", folder, ranks, cases, env={"JOBS": json.dumps(JOBS), **env})


def compare(folder: Path, other: Path, found: Any, expected: Any) -> None:
    for name in found:
        assert found[name]["losses"] == pytest.approx(expected[name]["losses"], rel=LOSS), name
        assert found[name]["norms"] == pytest.approx(expected[name]["norms"], rel=NORM), name
        same, distance = far(folder, other, name)
        assert same and distance < MOVED, (name, distance)


@pytest.mark.parametrize("names", [SHOWN, pytest.param(tuple(JOBS), marks=pytest.mark.slow)], ids=["", "all"])
def test_layers_that_are_cut_in_unusual_ways_train_as_in_one_process(names: Any, tmp_path: Path) -> None:
    expected = trained(tmp_path / "alone", 1, ALONE, names)
    found = trained(tmp_path / "tensor", 2, TENSOR, names)
    compare(tmp_path / "tensor", tmp_path / "alone", found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [BOTH, {"sharding": "zero1", "tensor": 2}, {"sharding": "none", "tensor": 4}], ids=str
)
def test_so_do_they_on_four_ranks(mesh: Any, tmp_path: Path) -> None:
    expected = trained(tmp_path / "alone", 1, ALONE)
    found = trained(tmp_path / "four", 4, mesh)
    compare(tmp_path / "four", tmp_path / "alone", found, expected)


@pytest.mark.slow
@COMPILES
def test_so_do_they_compiled(tmp_path: Path) -> None:
    names = [name for name in JOBS if "dropout" not in name]
    expected = trained(tmp_path / "alone", 1, ALONE, names)
    found = trained(tmp_path / "compiled", 2, {**TENSOR, **COMPILED}, names)
    compare(tmp_path / "compiled", tmp_path / "alone", found, expected)


@pytest.mark.slow
@COMPILES
def test_compiled_blocks_take_parts_with_gaps_in_memory_and_without(tmp_path: Path) -> None:
    """torch's cache knows no gaps. Where it is empty, the second block would run the graph of the first."""
    names, env = ["odd sequence between"], {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    expected = trained(tmp_path / "alone", 1, ALONE, names)
    found = trained(tmp_path / "compiled", 2, {**TENSOR, **COMPILED}, names, **env)
    compare(tmp_path / "compiled", tmp_path / "alone", found, expected)


REFUSED = {
    "normed": "blocks.0.up the style ColwiseParallel, which cannot cut it: its parameters are computed from",
    "half tied": "cuts tokens.weight and head.weight, which are the same weight, in different ways",
    "whole region": "its input is (Replicate(),): leave the module out of the plan",
    "in a region": "names blocks.0.up and also blocks.0, whose style holds for everything in it",
    "not a layer": "gives blocks.0.norm, a LayerNorm, the style ColwiseParallel, which is for nn.Linear",
    "sequence": "blocks.0 cuts a dimension of size 9, which 2 ranks cannot share equally",
    "columns": "blocks.0.up cuts a dimension of size 25, which 2 ranks cannot share equally",
}


@pytest.mark.parametrize(
    "fields", [{}, pytest.param(COMPILED, marks=[pytest.mark.slow, COMPILES])], ids=["", "compiled"]
)
def test_what_cannot_be_cut_ends_each_rank_with_the_reason(fields: Any, tmp_path: Path) -> None:
    jobs = {how: job(how, hidden=25) for how in REFUSED}
    cases = {how: (how, {**TENSOR, **fields}) for how in REFUSED}
    for found in run("told", tmp_path / "told", 2, cases, env={"JOBS": json.dumps(jobs)}):
        for how, words in REFUSED.items():
            assert words in found[how]


def test_a_part_that_is_laid_out_anew_belongs_to_a_contiguous_whole() -> None:
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        part = torch.arange(6.0).view(2, 3).t()
        x = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 2)), stride=(1, 5)
        )
        found = without_gaps(x)
        assert found.to_local().is_contiguous() and found.to_local().equal(part)
        assert (found.shape, found.stride()) == ((5, 2), (2, 1))
        assert without_gaps(found) is found


def test_ranks_draw_different_numbers_for_their_parts_of_a_tensor_and_equal_ones_for_whole_tensors(
    tmp_path: Path,
) -> None:
    measure("masks.py", tmp_path, ranks=2)
    one, other = (json.loads((tmp_path / f"rank-{number}.json").read_text()) for number in (0, 1))
    assert [row[:3] for row in one["divided"]] != [row[:3] for row in other["divided"]]
    for found in (one, other):
        assert found["divided"] == found["recomputed"]
        assert 0.35 < sum(map(sum, found["divided"])) / sum(map(len, found["divided"])) < 0.65
    assert (one["whole"], one["plain"]) == (other["whole"], other["plain"])
