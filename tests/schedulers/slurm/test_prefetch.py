"""What a site answers before a submission: when it is asked early, and what is kept of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.rundir.files import read_json, replace_json
from launcher.schedulers.login import Answer, Here
from launcher.schedulers.slurm.prefetch import KEPT_SECONDS, begin, begun, keep, kept, stamp
from launcher.schedulers.slurm.site import NOT_ENFORCED, OF_ACCOUNTING

COMMANDS = ("sbatch", "scontrol", "sinfo", "sacctmgr")


@pytest.fixture(autouse=True)
def _slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that say where they were called."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in COMMANDS:
        (tmp_path / name).write_text("#!/bin/sh\necho 'ClusterName = c'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("profile", "asked"),
    [
        ("name: c\nscheduler: slurm\n", True),
        ('{"name": "c", "scheduler": "slurm"}', True),
        ("scheduler: 'slurm' # here\nslurm:\n  partition: main\n", True),
        ("scheduler: slurm\nlogin: me@host\n", False),
        ("scheduler: local\n# scheduler: slurm\n", False),
        ("name: c\n", False),
    ],
)
def test_the_slurm_of_this_host_is_asked_early_for_a_profile_of_it_alone(
    tmp_path: Path, profile: str, asked: bool
) -> None:
    (tmp_path / "c.yaml").write_text(profile)
    begin(tmp_path / "c.yaml")
    assert ("ClusterName = c" in begun(Here()).get("config", Answer(1, "", "")).out) is asked
    assert begun(Here()) == {}, "an answer is used once"


def answers(code: int = 0, cluster: str = "c") -> dict[str, Answer]:
    said = {name: Answer(code, f"{name} says", "") for name in OF_ACCOUNTING}
    return {**said, "config": Answer(0, f"ClusterName             = {cluster}\n", "")}


@pytest.mark.parametrize(("code", "is_kept"), [(0, True), (NOT_ENFORCED, True), (124, False), (1, False)])
def test_whole_answers_are_kept_for_an_hour(tmp_path: Path, code: int, is_kept: bool) -> None:
    keep(Here(), answers(code))
    known = kept(Here())
    assert (known is not None) is is_kept
    if known is None:
        return
    assert known.answers == {name: answers(code)[name] for name in OF_ACCOUNTING}
    assert known.stamp == stamp(answers()) != stamp(answers(cluster="another"))
    (file,) = (tmp_path / "cache" / "launcher" / "slurm").iterdir()
    told = read_json(file)
    assert isinstance(told, dict)
    for age in (KEPT_SECONDS + 1, -3600):
        replace_json(file, {**told, "time": told["time"] - age})
        assert kept(Here()) is None
    file.write_text("{")
    assert kept(Here()) is None
