"""Which checkpoint is whole where each node has its own folder."""

from __future__ import annotations

from launcher.train.checkpoints.parts import whole_on_all


def test_the_newest_is_of_one_save_on_every_node() -> None:
    assert whole_on_all([{100: "a", 200: "b"}, {100: "a", 200: "b"}]) == 200
    # A crash left step 200 of an earlier history on one node; or it came before the other had published.
    assert whole_on_all([{100: "a", 200: "b"}, {100: "a", 200: "c"}]) == 100
    assert whole_on_all([{100: "a", 200: "b"}, {100: "a"}, {100: "a", 200: "b"}]) == 100
    assert whole_on_all([{100: "a"}, {}]) == whole_on_all([{}]) == 0
