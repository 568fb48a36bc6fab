"""`launcher clusters detect` where there is no Slurm that answers. tests/slurm asks a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.schedulers.login import LocalLogin, LoginError
from launcher.schedulers.slurm.detect import detect


@pytest.mark.parametrize(
    ("scontrol", "host", "said"),
    [
        ("exit 127", None, "Slurm is not installed.* name a login node .--login HOST., or ask"),
        ("echo 'fatal: no source' >&2; exit 1", None, "does not answer.*--login HOST.*fatal: no source"),
        ("exit 1", "gpu7", r"does not answer, or .*; ask a host without a batch system \(--host gpu7\)$"),
    ],
)
def test_without_slurm_it_says_what_to_ask_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str, host: str | None, said: str
) -> None:
    for name in ("scontrol", "sinfo", "sacctmgr", "srun"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{scontrol}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(LoginError, match=said):
        detect(LocalLogin(), host)
