"""When the ranks agree after a step, so that no rank is a step ahead and no rank waits forever."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.rundir.shared_memory_folders import remove_handover
from launcher.spec.events import HandedOver, HandoverSkipped
from tests.train.runs import job, measure, prepare, recipe, start


@pytest.mark.slow
def test_the_ranks_agree_after_the_micro_batch_that_failed_before_they_ask_a_loader(tmp_path: Path) -> None:
    found = measure("slow_loader.py", tmp_path, ranks=2)
    assert found["waited"] == [True]
    assert ["downgrade", 3, True] in found["events"]
    assert found["steps"] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("allocation", [3, 4, 5, 6])
def test_memory_that_runs_out_in_clipping_under_ddp_leaves_no_rank_a_step_ahead(
    tmp_path: Path, allocation: int
) -> None:
    """Allocations of the optimizer's phase on the last rank: the sums over the ranks, then the norm of the
    gradient."""
    run = prepare(tmp_path / "run", job(train={"probe": "never", "clip_norm": 0.1}))
    drill = f"rank=last,step=3,phase=optimizer,allocation={allocation}"
    env = {"TRAIN_MEMORY_FAIL": drill, "LAUNCHER_SUPERVISED": "1"}
    ended = start(run, recipe("ddp"), env=env)
    remove_handover(run, 0)  # the supervisor's part
    assert ended.codes[1] == 86, ended.output
    [event] = [one for one in run.read_events() if isinstance(one, HandedOver | HandoverSkipped)]
    assert isinstance(event, HandedOver) and event.step == 2, event
