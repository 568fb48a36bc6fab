"""A rank that runs alone under FSDP computes with parameters that a model may check."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.runs import measure


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = measure("other_shards.py", tmp_path_factory.mktemp("others"), ranks=4)
    return found


@pytest.mark.slow
def test_small_parameters_are_real_and_whole_whatever_their_rows(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["nothing was sent"]
        assert rank["equal"]["three"] and rank["equal"]["ten"], rank


@pytest.mark.slow
def test_large_parameters_consist_of_rows_and_never_of_padding(ranks: list[dict[str, Any]]) -> None:
    """Ranks 2 and 3 have no row of the first, and rank 3 has none of the second: two rows each, then one."""
    for number, rank in enumerate(ranks):
        assert rank["values"]["few_large"] == [6.0]
        own = [[2.0, 4.0], [6.0, 8.0], [10.0], []][number]
        others = {*rank["values"]["uneven_large"]} - {*own}
        assert 0.0 not in rank["values"]["uneven_large"] and (not own or not others), rank
        assert rank["own part"]
