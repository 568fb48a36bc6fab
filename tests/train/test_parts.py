"""Which checkpoint is whole where each node has its own folder."""

from __future__ import annotations

from pathlib import Path

from launcher.train.checkpoints.folder import (
    METADATA,
    complete_checkpoints,
    directory,
    partial_path,
    publish,
)
from launcher.train.checkpoints.parts_per_node import newest_on_all_nodes, set_aside
from launcher.train.checkpoints.retention import remove_all_but


def test_the_newest_is_of_one_save_on_every_node() -> None:
    assert newest_on_all_nodes([{100: "a", 200: "b"}, {100: "a", 200: "b"}]) == 200
    # A crash left step 200 of an earlier history on one node; or it came before the other had published.
    assert newest_on_all_nodes([{100: "a", 200: "b"}, {100: "a", 200: "c"}]) == 100
    assert newest_on_all_nodes([{100: "a", 200: "b"}, {100: "a"}, {100: "a", 200: "b"}]) == 100
    assert newest_on_all_nodes([{100: "a"}, {}]) == newest_on_all_nodes([{}]) == 0


def test_a_part_that_others_lack_pushes_out_no_whole_one_and_is_not_deleted(tmp_path: Path) -> None:
    for step in (2, 4):
        partial_path(directory(tmp_path, step)).mkdir(parents=True)
        (partial_path(directory(tmp_path, step)) / METADATA).touch()
        publish(directory(tmp_path, step), {"step": step})
    set_aside(tmp_path, newest=2)
    assert list(complete_checkpoints(tmp_path)) == [2]
    remove_all_but(tmp_path, 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["set-aside-step-00000004", "step-00000002"]
