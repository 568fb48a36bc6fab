"""What the kernel counts of its OOM killer, as its files look in cgroups of both versions and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.supervise.host import oom_kills

VMSTAT = "nr_free_pages 7\noom_kill 40\n"
EVENTS = "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "kills"),
    [
        ("0::/job_7/step_0\n", {"sys/fs/cgroup/job_7/step_0/memory.events": EVENTS}, 2),
        ("0::/\n", {"sys/fs/cgroup/memory.events": EVENTS}, 2),
        (
            "5:cpu:/x\n4:hugetlb,memory:/slurm/job_7\n0::/user.slice\n",
            {"sys/fs/cgroup/memory/slurm/job_7/memory.oom_control": CONTROL},
            5,
        ),
        ("4:memory:/docker/ab\n", {"sys/fs/cgroup/memory/memory.oom_control": CONTROL}, 5),
        ("0::/user.slice\n", {}, 40),
        (None, {}, 40),
    ],
)
def test_kills_of_our_own_cgroup_count_once_and_those_of_the_host_where_nothing_else_does(
    tmp_path: Path, cgroup: str | None, files: dict[str, str], kills: int
) -> None:
    told = {"proc/vmstat": VMSTAT, **files} | ({"proc/self/cgroup": cgroup} if cgroup is not None else {})
    for name, text in told.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == kills


def test_here_it_is_a_number() -> None:
    assert oom_kills() >= 0
