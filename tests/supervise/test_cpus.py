"""Ranks on the CPUs that the profile gives them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launcher.spec.variables import CPU_BIND
from launcher.supervise.cpus import listed


def test_a_list_of_cpus_is_read_as_taskset_reads_it() -> None:
    assert listed("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}


def bound(lists: str, rank: int) -> tuple[str, str]:
    """The CPUs of a process after it, and what it said."""
    code = "import os; from launcher.supervise.cpus import bind; bind(os.environ)"
    code += "; print(os.sched_getaffinity(0))"
    env = {**os.environ, CPU_BIND: lists, "LOCAL_RANK": str(rank)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_each_rank_takes_its_own_list() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("this machine has one CPU")
    first, last = allowed[0], allowed[-1]
    assert bound(f"{first} {last},100000", 0) == (f"{{{first}}}", "")
    assert bound(f"{first} {last},100000", 1) == (f"{{{last}}}", "")


def test_a_rank_whose_cpus_the_job_does_not_have_stays_as_it_is_and_says_so() -> None:
    cpus, said = bound("100000-100003", 0)
    assert cpus == str(os.sched_getaffinity(0))
    assert "rank 0 of this node should have CPUs 100000-100003" in said
