"""docs/api.md: its examples run, and its reference names everything that is public."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import launcher
from tests.lab import PATIENCE

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
FILES = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE, flags=re.S | re.M))


def examples() -> str:
    """All of them, in order; a comment before a block says why it cannot run here."""
    blocks = re.findall(r"(<!--[^\n]*-->\n)?^```python\n(.*?)```", PAGE, flags=re.S | re.M)
    return "\n".join(code for skipped, code in blocks if not skipped and code not in FILES.values())


def test_the_examples_run_in_order(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    folders = {f"XDG_{name.upper()}_HOME": str(tmp_path / name) for name in ("state", "cache", "config")}
    env = {**os.environ, **folders, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", examples()]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=3 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout and "[2, 4]" in done.stdout and "succeeded True" in done.stdout
    assert "the job: step: unknown field; did you mean 'steps'?" in done.stdout


@pytest.mark.parametrize("name", sorted(launcher.__all__))
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"`(launcher\.)?{name}[`(]", PAGE), f"{name} is not on the page"
    assert getattr(launcher, name).__name__ == name
    if name in ("Run", "Runs", "Plan", "Metrics", "Checkpoint"):
        of_ours = {**vars(getattr(launcher, name)), **inspect.get_annotations(getattr(launcher, name))}
        for one in of_ours:
            assert one.startswith("_") or re.search(rf"`{one}[`(]", PAGE), f"{name}.{one} is not on the page"
