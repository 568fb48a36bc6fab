"""A program in the place of a job file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from launcher.spec.errors import SpecError
from launcher.spec.load import load_job


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("train.py", "import torch\nx = {1: 2}\n", "python train.py"),
        ("my train.py", "name: a\n", "python 'my train.py'"),
        ("go", "#!/usr/bin/env python3\nprint(1)\n", "python go"),
        ("go.sh", "echo 1\n", "bash go.sh"),
        ("job.sbatch", "#!/bin/bash -l\n#SBATCH -n 1\n", "bash job.sbatch"),
    ],
)
def test_a_program_is_answered_with_a_job_that_starts_it(
    tmp_path: Path, name: str, text: str, command: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path / name)
    lines = str(caught.value).splitlines()
    assert "this is a " in lines[0] and "launcher job init" in lines[-1]
    (tmp_path / "job.yaml").write_text("\n".join(lines[1:4]))
    job = load_job(tmp_path / "job.yaml")
    assert job.command == tuple(shlex.split(command))


def test_a_job_file_of_any_name_is_read(tmp_path: Path) -> None:
    for name, first in (("job", ""), ("job.txt", ""), ("job.yaml", "#!/usr/bin/env -S launcher run\n")):
        (tmp_path / name).write_text(first + "{name: a, command: [b], batch: {global: 1}}")
        assert load_job(tmp_path / name).name == "a"
