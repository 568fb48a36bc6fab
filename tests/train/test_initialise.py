"""Parameters drawn on the ranks that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import job, measure, prepare, recipe, start
from tests.train.test_traps import any_error


@pytest.mark.slow
def test_shards_of_uneven_rows_hold_what_one_rank_would_draw(tmp_path: Path) -> None:
    found = measure("initial_values.py", tmp_path, ranks=2)
    assert len(found["equal"]) == 10 and set(found["equal"].values()) == {True}, found["equal"]
    assert 0.7 < found["std"] < 1.3
    assert found["norm"] == [1.0, 0.0, 1.0]
    assert not found["alike"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgets", "sharding", "words"),
    [
        ("2.bias", "none", "did not fill 2.bias of the model"),
        ("2.bias", "fsdp", "did not fill 2.bias of the model"),
        ("1.1.running_var", "fsdp", "did not fill 1.1.running_var of the model"),
        ("", "fsdp", "replaced 0.weight, 0.bias of the model, of which each rank has a part"),
    ],
)
def test_a_model_on_the_meta_device_that_is_not_filled_in_place_is_refused(
    forgets: str, sharding: str, words: str, tmp_path: Path
) -> None:
    """What was not filled had the values of the memory's earlier use."""
    run = prepare(tmp_path, job(task="traps:Unfilled", args={"forgets": forgets}, steps=2))
    assert start(run, recipe(sharding, 8), ranks=1).codes == {0: 1}
    failure = any_error(run.attempt(0))
    assert failure["failure"] == "user-error" and words in failure["exception"]
