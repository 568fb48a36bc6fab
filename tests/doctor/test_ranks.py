"""What one rank of a test does, in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.doctor.measure import ranks


def test_time_spent_to_connect_counts_so_that_a_busy_machine_does_not_look_like_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, told = [0.0], list[dict[str, Any]]()

    def join(seconds: float, gpus: bool) -> torch.device:
        clock[0] += seconds  # all of the time that the parent gives
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return torch.device("cpu")

    monkeypatch.setattr(ranks.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ranks, "_join", join)
    try:
        ranks.collective(lambda **one: told.append(one), 10.0, False, "all-reduce", [2**16, 2**18, 2**20])
    finally:
        dist.destroy_process_group()
    assert [one["result"]["bytes"] for one in told if "result" in one] == [2**16]
