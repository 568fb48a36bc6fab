"""The documentation's pages about clusters: their commands run, in order, on a real one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import ROOT
from tests.slurm.lab import GPT
from tests.slurm.laptop import Laptop

pytestmark = pytest.mark.e2e

JOB = {**GPT, "steps": 4, "resources": {"nodes": 1, "ranks_per_node": 1}}


def lines(page: str) -> list[str]:
    """What stands behind `$ ` in ```console blocks."""
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.S)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@dataclass
class Reader:
    """Types what the page says, in a folder that has a job file."""

    lab: Laptop
    runs: Path
    printed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.lab.folder / "lab.yaml").unlink()
        self.lab.job(**JOB)
        programs = self.lab.folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        (programs / "launcher").write_text(f'#!/bin/sh\nexec {sys.executable} -m launcher "$@"\n')
        (programs / "launcher").chmod(0o755)
        self.lab.environ["PATH"] = f"{programs}:{self.lab.environ['PATH']}"

    def types(self, page: str) -> Reader:
        for line in lines(page):
            done = subprocess.run(
                ["bash", "-c", line], cwd=self.lab.folder, env=self.lab.environ, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=240,
            )  # fmt: skip
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            self.printed[line] = done.stdout
            if "clusters detect" in line:
                self.looks_at_the_lines_with_check(self.lab.folder / line.rpartition("> ")[2])
        return self

    def looks_at_the_lines_with_check(self, profile: Path) -> None:
        text = profile.read_text()
        for name, value in (("runs", str(self.runs)), ("python", sys.executable)):
            text, found = re.subn(rf"^  {name}: .*", f"  {name}: {value}", text, flags=re.M)
            assert found == 1, text
        assert "CHECK" in profile.read_text()
        profile.write_text(text)

    def runs_listed(self) -> list[dict[str, Any]]:
        return json.loads(self.lab.cli("list", "--json").stdout)


@pytest.fixture(scope="module")
def lab_in(laptops: Callable[[Path], Laptop]) -> Callable[[Path], Laptop]:
    return laptops


def on_the_login_node(lab: Laptop) -> Reader:
    lab.environ |= lab.cluster.env()
    return Reader(lab, lab.folder / "runs").types("slurm")


def on_a_laptop(lab: Laptop) -> Reader:
    return Reader(lab, lab.there / "runs").types("remote-login")


@pytest.mark.slow
@pytest.mark.parametrize("it", [on_the_login_node], indirect=True)
def test_every_command_of_the_page_about_slurm_runs(it: Reader) -> None:
    *sweep, first = it.runs_listed()
    assert (first["state"], first["step"]) == ("succeeded", 4), it.printed
    assert len(sweep) == 4 and len({run["handle"].partition("_")[0] for run in sweep}) == 1
    assert len({run["path"] for run in sweep}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("it", [on_a_laptop], indirect=True)
def test_every_command_of_the_page_about_a_login_node_runs(it: Reader) -> None:
    (run,) = it.runs_listed()
    assert (run["state"], run["step"]) == ("succeeded", 4), it.printed
    assert it.lab.folder / "state" in Path(run["path"]).parents
