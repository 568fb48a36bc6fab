"""A secret of a job: nowhere below its run directory, whoever wrote the file, and no other user enters it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.rundir.layout import RunDir
from launcher.supervise.worker import MAX_EXCEPTION
from tests.lab import Lab, verdicts

pytestmark = pytest.mark.e2e

TOKEN = "t0k3n-/no/such/hunter2-hunter2.so"
PIECE = "0k3n-/no"
"Of the token, in each half that a cut could leave."

RAISES = f"""
import os
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    os.environ.pop("API_TOKEN")
    start = "refused: "
    raise RuntimeError(start + "x" * ({MAX_EXCEPTION} - len("RuntimeError: " + start) - 12) + token)

token = os.environ["API_TOKEN"]
main()
"""


def _files_with(run: RunDir, text: str) -> list[str]:
    return [
        str(path.relative_to(run.path))
        for path in run.path.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_under_torchelastics_record_is_masked_in_every_file(lab: Lab, ranks: int) -> None:
    """The message is cut in the middle of the token: it is masked before."""
    lab.script(RAISES)
    lab.environ["API_TOKEN"] = TOKEN
    resources = {"gpus_per_node": 0, "ranks_per_node": ranks}
    run = lab.submit(str(lab.job(command="python train.py", secrets=["API_TOKEN"], resources=resources)))
    assert lab.wait(run)["failure"] == "user-error"
    assert _files_with(run, PIECE) == []
    record = json.loads(run.attempt(0).exit(0).read_text())
    assert record["exception"].startswith("RuntimeError: refused: x") and "***" in record["exception"]
    assert verdicts(run)[0]["exception"].startswith("RuntimeError: refused: x")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_bash_and_the_dynamic_linker_print_is_masked(lab: Lab, ranks: int) -> None:
    """The linker quotes LD_PRELOAD before a rank's program begins, bash whatever a line of `setup:` does."""
    lab.script("print('done')")
    (lab.folder / "clusters").mkdir()
    (lab.folder / "clusters/loud.yaml").write_text(
        "name: loud\nscheduler: local\nnode: {gpu: auto}\nsetup: ['set -x; : $LAUNCHER_ENV_LD_PRELOAD']\n"
    )
    lab.environ["LD_PRELOAD_TOKEN"] = TOKEN
    secret = {"name": "LD_PRELOAD", "env": "LD_PRELOAD_TOKEN"}
    resources = {"gpus_per_node": 0, "ranks_per_node": ranks}
    job = lab.job(command="python train.py", secrets=[secret], resources=resources)
    run = lab.submit(str(job), "-c", "loud")
    assert lab.wait(run)["state"] == "succeeded"
    assert "+ : ***" in run.attempt(0).torchrun_log(0).read_text()
    assert "object '***' from LD_PRELOAD" in run.attempt(0).rank_log(0, 0, "err").read_text()
    assert _files_with(run, PIECE) == []


@pytest.mark.slow
@pytest.mark.parametrize(("access", "mode"), [(None, 0o700), ("group", 0o750), ("all", 0o755)])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_run_directory_is_for_whom_the_profile_says(
    lab: Lab, access: str | None, mode: int, umask: int
) -> None:
    paths = f"paths: {{access: {access}}}\n" if access is not None else ""
    (lab.folder / "clusters").mkdir()
    (lab.folder / "clusters/here.yaml").write_text(f"name: here\nscheduler: local\n{paths}")
    lab.script("print('done')")
    job = lab.job(command="python train.py", resources={"gpus_per_node": 0, "ranks_per_node": 1})
    command = [sys.executable, "-m", "launcher", "submit", str(job), "-c", "here"]
    subprocess.run(command, cwd=lab.folder, env=lab.environ, umask=umask, check=True)
    run = lab.newest()
    lab.wait(run)
    assert run.path.stat().st_mode & 0o777 == mode
    assert run.supervisor_log.stat().st_mode & 0o077 == 0, "what is printed before anything can be masked"
    assert not list(Path("/dev/shm").glob(f"launcher-*/{run.id}*"))


@pytest.mark.slow
def test_a_relative_file_is_the_one_in_the_working_directory(lab: Lab) -> None:
    """Whoever checks it and whoever reads it, from wherever."""
    (lab.folder / "code").mkdir()
    lab.script("import os; print('value', len(os.environ['TOKEN']))", "code/train.py")
    (lab.folder / "code/token").write_text("a value of 19 bytes\n")
    secret = {"name": "TOKEN", "file": "token"}
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    job = lab.job(command="python train.py", workdir="code", secrets=[secret], resources=resources)
    run = lab.submit(str(job))
    assert lab.wait(run)["state"] == "succeeded"
    assert "value 19" in run.attempt(0).rank_log(0, 0, "out").read_text()
    (lab.folder / "code/token").rename(lab.folder / "token")
    refused = lab.cli("submit", str(job))
    assert refused.returncode == 4 and f"there is no file {lab.folder}/code/token" in refused.stderr
    assert lab.newest() == run, "nothing was submitted"


@pytest.mark.parametrize("file", ["~nouser/token", "nul", "fifo", "."])
def test_a_file_that_cannot_be_used_is_one_message_before_anything_is_submitted(lab: Lab, file: str) -> None:
    (lab.folder / "nul").write_bytes(b"a\0b")
    os.mkfifo(lab.folder / "fifo")
    lab.script("print()")
    job = lab.job(command="python train.py", secrets=[{"name": "TOKEN", "file": file}])
    refused = lab.cli("submit", str(job))
    assert refused.returncode in (2, 3, 4) and "Traceback" not in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
    assert not list((lab.folder / "runs").glob("*"))
