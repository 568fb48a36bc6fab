"""The state of all ranks in shared memory: what is given is what is taken up, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.rundir import shared_memory_folders
from launcher.rundir.layout import RunDir
from launcher.rundir.shared_memory_folders import handover_folder, make_handover_folder, remove_handover
from launcher.train.handover.restart import Offer, refusal
from launcher.train.handover.tensor_file import read_packed, write_packed
from launcher.train.host_memory import free_for_handover
from tests.train.runs import ALL_CASES, measure


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, id="first cases"),
        pytest.param(ALL_CASES, id="all cases", marks=pytest.mark.slow),
    ],
)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measure("handovers.py", tmp_path_factory.mktemp("handed"), ranks=2, env=request.param)


def test_every_optimizer_and_sharding_goes_on_as_if_nothing_had_happened(measured: dict[str, Any]) -> None:
    for name, found in measured["cases"].items():
        assert found["resumed"] == [2, "shared-memory"], name
        assert found["different"] == [[], []], (name, "parameters, states and buffers of both ranks")
        assert found["losses"][0] == found["losses"][1], (name, "with the same dropout")
        assert found["after the step"] == [[], []], name
        assert found["left"] == [False, False], name
    replicated, sharded = (measured["cases"][name]["bytes"] for name in ("ddp", "fsdp"))
    assert replicated[1] < 30_000 < 200_000 < replicated[0], "one rank of the node writes what all have"
    assert sharded[0] == pytest.approx(sharded[1], rel=0.1)
    zero1 = measured["cases"]["zero1"]["bytes"]
    assert zero1[0] < replicated[0] and 0.8 * sharded[1] / 3 * 2 < zero1[1] < sharded[1], "states alone"


def test_under_another_sharding_each_rank_takes_its_part_of_the_same_state(measured: dict[str, Any]) -> None:
    assert len(measured["resharded"]) in (4, 8)
    for name, found in measured["resharded"].items():
        if "8 bit" in name:  # whose scales are of the blocks of each shard
            layout = "the state has another layout: other shapes, sharding"
            assert found["resumed"] == [0, None, layout]
            continue
        assert found["resumed"] == [2, "shared-memory", None], name
        assert found["different"] == [[], []], name
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5), (name, "the same dropout")


@pytest.mark.thorough
def test_on_two_nodes_each_has_all_unless_the_shards_are_spread_over_both(tmp_path: Path) -> None:
    found = measure("handovers.py", tmp_path, ranks=4)["resharded"]
    spread = found.pop("fsdp, hybrid")
    assert spread["resumed"] == [0, None, "the state has another layout: other shapes, sharding"]
    spread = found.pop("zero1, ddp")
    assert spread["resumed"] == [0, None, "the state has another layout: other sharding"]
    for name, one in found.items():
        assert one["resumed"] == [2, "shared-memory", None] and one["different"] == [[]] * 4, name
        assert one["losses"][0] == pytest.approx(one["losses"][1], rel=1e-5), name


def test_what_is_read_does_not_count_against_a_budget(measured: dict[str, Any]) -> None:
    """With the parameters on the host, too, nothing is counted at any time."""
    assert measured["counted"]["cpu"] == [0, 0]
    added, peak = measured["counted"]["cpu-optimizer"]
    assert (added, peak < 1000) == (0, True), peak


def test_what_does_not_fit_together_is_taken_by_no_rank(measured: dict[str, Any]) -> None:
    assert measured["refused"] == {
        "other states": [0, None, "the state has another layout: other optimizer, shapes, sharding"],
        "other steps": [0, None, "the ranks' states in shared memory are of different steps"],
        "rank 1 is missing": [0, None, "rank 1 has no state of the previous attempt in shared memory"],
        "as new": [1, "checkpoint", "the checkpoint of step 1 is as new"],
    }


def test_a_file_is_there_whole_or_not_at_all_and_outlives_its_name(tmp_path: Path) -> None:
    tensors = [torch.arange(5, dtype=torch.uint8), torch.tensor(2.5), torch.randn(3, 4).t().bfloat16()]
    tensors.append(torch.empty(0, 7))
    path = tmp_path / "rank"
    size = write_packed(path, tensors, {"step": 3})
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank", "rank.data"]
    found = read_packed(path)
    assert found is not None and found.about["step"] == 3
    for file in tmp_path.iterdir():
        file.unlink()
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, tensors, strict=True))
    assert read_packed(path) is None
    write_packed(path, tensors, {"step": 3})
    with pytest.raises(OSError, match=r"File too large|No space"):
        write_packed(path, [torch.empty(1, device="meta").expand(2**60)], {})
    assert read_packed(path) is None, "the earlier index is gone before its data are overwritten"


def offers(*steps: int, **fields: Any) -> dict[int, Offer]:
    values = {"node": 0, "recorded": True, "saved": 0, "bytes": 600, "free": 1000, **fields}
    return {n: Offer(rank=n, step=step, **values) for n, step in enumerate(steps)}


@pytest.mark.parametrize(
    ("those", "reason"),
    [
        (offers(4, 4, bytes=500), None),
        (offers(4, 4), "the state takes 1.172 KiB of shared memory on node 0, where 1000 B are free"),
        (offers(4), "rank 1 did not answer"),
        (offers(4, 5), "the ranks were between steps 4 and 5"),
        (offers(2, 2, torn=True), "rank 0 was in the middle of the update of step 3"),
        (offers(4, 4, saved=4, bytes=1), "the checkpoint of step 4 is as new"),
    ],
)
def test_the_ranks_agree_on_what_is_handed_over(those: dict[int, Offer], reason: str | None) -> None:
    assert refusal(those, world=2) == reason


def test_each_node_counts_its_own_memory() -> None:
    one = offers(4)[0]
    other = Offer(rank=1, node=1, step=4, recorded=True, saved=0, bytes=600, free=700)
    assert refusal({0: one, 1: other}, world=2) is None


def test_what_is_free_is_the_least_of_file_system_host_and_container() -> None:
    assert 0 < free_for_handover() <= torch.iinfo(torch.int64).max
    host = Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]
    assert free_for_handover() < int(host) * 1024 * 1.1


def test_the_folder_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory_folders, "MEMORY", tmp_path)
    run, other = RunDir(Path("/a/run")), RunDir(Path("/b/run"))
    folder = make_handover_folder(run, 1)
    assert folder != handover_folder(other, 1) and folder.parent.parent.stat().st_mode & 0o777 == 0o700
    make_handover_folder(run, 0)
    remove_handover(run, 1)
    assert handover_folder(run, 0).exists() and not folder.exists()
    remove_handover(run, 0)
    assert list(tmp_path.iterdir()) == []
    folder.parent.parent.mkdir(mode=0o755)
    folder.parent.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="this user alone"):
        make_handover_folder(run, 0)
