"""What a recipe changes in a trace, on traces made by hand."""

from __future__ import annotations

import pytest

from launcher.memory.profile import profile_of
from launcher.memory.shapes import ModelShapes, Parameter
from launcher.memory.states import Ranks
from launcher.memory.trace import ALL_GATHER, GATHERED, Affine, Storage, Trace, Work
from launcher.spec.recipe import Recipe

SHARDS, LARGE, SMALL = 4, 300, 100
"The number of ranks, and of elements of a block's two parameters."
GATHERED_BYTES = 2 * (LARGE + SMALL)


@pytest.mark.parametrize(
    ("fields", "itemsize", "copies"),
    [
        ({"precision": "bf16", "offload": "none"}, 2, 0),
        ({"precision": "bf16", "offload": "cpu"}, 2, GATHERED_BYTES / SHARDS),
        # in bf16 all, and beside them the largest in fp32 while it is cast
        ({"precision": "bf16-mixed", "offload": "cpu"}, 4, (GATHERED_BYTES + 4 * LARGE) / SHARDS),
    ],
)
def test_an_all_gather_of_offloaded_parameters_begins_with_copies_of_its_shards(
    fields: dict[str, str], itemsize: int, copies: float
) -> None:
    trace = Trace(
        (Storage(GATHERED_BYTES, 0, GATHERED, "block", ALL_GATHER),),
        (0, ~0),
        (("forward", 0), ("backward", 2), ("evaluation", 2)),
        Work(*[Affine(0, 0)] * 8),
    )
    of_block = [
        Parameter(f"block.{name}", (size, 1), itemsize) for name, size in (("a", LARGE), ("b", SMALL))
    ]
    model = ModelShapes((*of_block, Parameter("head", (9000, 1), itemsize)), 0)
    sizes = {"micro_batch_size": 1, "grad_accum": 1, "optimizer": "adamw", "sharding": "fsdp"}
    found = profile_of(
        [trace], model, Recipe.model_validate({**sizes, **fields}), Ranks(SHARDS, SHARDS, True)
    )
    assert [moment.fixed for moment in found.other_streams[ALL_GATHER]] == [GATHERED_BYTES + copies]
    assert found.trace.highest()["backward"] == ()
