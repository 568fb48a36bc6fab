"""Parameters drawn on the ranks that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import measure


@pytest.mark.slow
def test_shards_of_uneven_rows_hold_what_one_rank_would_draw(tmp_path: Path) -> None:
    found = measure("initial_values.py", tmp_path, ranks=2)
    assert len(found["equal"]) == 10 and set(found["equal"].values()) == {True}, found["equal"]
    assert 0.7 < found["std"] < 1.3
    assert found["norm"] == [1.0, 0.0, 1.0]
    assert not found["alike"]
