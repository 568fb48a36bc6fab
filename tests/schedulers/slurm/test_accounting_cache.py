"""What is kept of what a site's accounting answers before a submission."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.rundir.files import read_json, replace_json
from launcher.schedulers.login import Answer, LocalLogin
from launcher.schedulers.slurm.accounting_cache import KEPT_SECONDS, read_cache, stamp, write_cache
from launcher.schedulers.slurm.site import NOT_ENFORCED, OF_ACCOUNTING


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answers(code: int = 0, cluster: str = "c") -> dict[str, Answer]:
    said = {name: Answer(code, f"{name} says", "") for name in OF_ACCOUNTING}
    return {**said, "config": Answer(0, f"ClusterName             = {cluster}\n", "")}


@pytest.mark.parametrize(("code", "is_kept"), [(0, True), (NOT_ENFORCED, True), (124, False), (1, False)])
def test_whole_answers_are_kept_for_an_hour(tmp_path: Path, code: int, is_kept: bool) -> None:
    write_cache(LocalLogin(), answers(code))
    known = read_cache(LocalLogin())
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
        assert read_cache(LocalLogin()) is None
    file.write_text("{")
    assert read_cache(LocalLogin()) is None
