"""The wheel carries templates, clusters and containers: it works outside the checkout."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_outside_the_checkout_renders_a_job(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("gpu_launcher-*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode != 0 and "No matching distribution" in done.stderr:
        pytest.skip(f"no package index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": ""}

    def launcher(*arguments: str) -> str:
        command = [tmp_path / "empty/bin/launcher", *arguments]
        return subprocess.run(
            command, cwd=elsewhere, env=env, check=True, capture_output=True, text=True
        ).stdout

    launcher("job", "init")
    assert "#SBATCH --job-name" in launcher("render", "job.yaml", "-c", "slurm-h100")
    assert "launcher.supervise.local_ranks" in launcher("render", "job.yaml", "-c", "local")
    assert "tensor01" in launcher("clusters", "list")
    frozen = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "torch" not in frozen.split(), "the base install is light"


def test_what_ci_runs_on_the_base_install_is_there_and_needs_no_torch():
    [line] = re.findall(r"- run: pytest (.*)", (ROOT / ".github/workflows/ci.yml").read_text())
    arguments = [*shlex.split(line), "--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    code = f"import sys; sys.modules['torch'] = None; import pytest; sys.exit(pytest.main({arguments!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
