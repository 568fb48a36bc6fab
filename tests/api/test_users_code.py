"""Errors of a task's code, as `launcher plan` tells them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import launcher
from launcher.api.model_sources import UserCode, UserCodeError, running_user_code
from launcher.spec.job import Job


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("bad heads", "ValueError: bad heads ("),
        ("invalid config:\n    4097 is odd\n    more", "ValueError: invalid config: 4097 is odd ("),
        ("sizes differ\nmore", "ValueError: sizes differ ("),
    ],
)
def test_an_error_is_told_with_its_reason_and_place(tmp_path: Path, message: str, told: str) -> None:
    with pytest.raises(UserCodeError) as caught, running_user_code("task m:T", tmp_path):
        raise ValueError(message)
    assert str(caught.value).startswith(f"task m:T: {told}")


class OwnExit(BaseException):
    pass


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(0), "SystemExit: 0 ("),
        (SystemExit(), "SystemExit ("),
        (OwnExit("early"), "OwnExit: early ("),
        (AssertionError(), "AssertionError ("),
    ],
)
def test_code_that_leaves_is_no_success(error: BaseException, told: str, tmp_path: Path) -> None:
    """`launcher plan` ended with exit code 0, without a plan."""
    with pytest.raises(UserCodeError) as caught, running_user_code("task m:T", tmp_path):
        raise error
    assert str(caught.value).startswith(f"task m:T: {told}")


def test_code_that_ends_the_process_is_no_success_either(tmp_path: Path) -> None:
    """`launcher submit` ended with exit code 0, and no run had begun."""
    with (
        pytest.raises(UserCodeError, match="task m:T: SystemExit: 0"),
        running_user_code("task m:T", tmp_path),
    ):
        os._exit(0)
    leave = os._exit
    with running_user_code("task m:T", tmp_path):
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
        child.start()
        child.join()
    assert child.exitcode == 7 and os._exit is leave


def test_ctrl_c_still_ends_a_plan(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), running_user_code("task m:T", tmp_path):
        raise KeyboardInterrupt


def test_code_of_two_threads_never_runs_at_the_same_time(tmp_path: Path) -> None:
    """The folder, os._exit() and stdout of the program were another thread's afterwards."""
    before = Path.cwd(), os._exit, sys.stdout
    both = threading.Barrier(2)
    met = []

    def run(folder: Path) -> None:
        folder.mkdir()
        with running_user_code("task m:T", folder):
            try:
                both.wait(0.5)
            except threading.BrokenBarrierError:
                met.append(Path.cwd() != folder)
            else:
                met.append(True)

    threads = [threading.Thread(target=run, args=(tmp_path / name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [False, False]
    assert (Path.cwd(), os._exit, sys.stdout) == before


def test_a_process_group_of_the_program_is_no_fault_of_the_task() -> None:
    dist = pytest.importorskip("torch.distributed")
    job = {
        "name": "x",
        "task": "launcher.tasks.gpt:PydocGPT",
        "args": {"layers": 1, "dim": 48, "heads": 2, "context": 16},
        "batch": {"global": 2},
        "steps": 1,
        "resources": {"gpus_per_node": 1},
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(launcher.UsageError, match="this process has a process group"):
            launcher.plan(job, cluster="slurm-a100")
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


TASK = """\
import torch
from torch import nn
import helper
from launcher.train import Task

class T(Task):
    couples_samples = helper.COUPLES{more}
    def model(self): return nn.Linear(1, 1)
    def data(self, split): return [torch.zeros(1)]
    def loss(self, model, batch): return model(batch).sum(), 1
"""


def test_each_plan_of_a_program_sees_the_code_of_its_folder_as_it_is_now(tmp_path: Path) -> None:
    """The first module of a name answered for all, and its answers were stored as those of the new files."""
    job = Job.model_validate({"name": "x", "task": "mine:T", "batch": {"global": 1}, "steps": 1})

    def write(folder: str, couples: bool, more: str = "") -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(TASK.format(more=more))
        (tmp_path / folder / "helper.py").write_text(f"COUPLES = {couples}\n")

    def couples(folder: str) -> bool:
        code = UserCode(job, tmp_path / folder, "cpu")
        found = code.about().couples_samples
        names = {file.relative_to(tmp_path).as_posix() for file in code.files() if tmp_path in file.parents}
        assert names == {f"{folder}/mine.py", f"{folder}/helper.py"}
        return found

    write("a", True)
    write("b", False)
    assert couples("a")
    assert not couples("b")
    assert couples("a")
    modules = sys.modules["mine"], sys.modules["helper"]
    assert couples("a") and (sys.modules["mine"], sys.modules["helper"]) == modules, "nothing has changed"
    write("a", False)
    assert not couples("a")
    write("a", False, " or True")
    assert couples("a")


def test_a_job_is_found_from_another_thread_while_a_plan_is_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text(
        "{name: x, command: [python, -c, ''], batch: {global: 4}, plan: {params: 1e6}}"
    )
    planned = []
    thread = threading.Thread(target=lambda: planned.append(launcher.plan("jobs/job.yaml", "slurm-a100")))
    with running_user_code("task m:T", tmp_path / "jobs"):
        thread.start()
        thread.join(0.5)
    thread.join()
    assert len(planned) == 1


EDITED_BEFORE_PLAN = """\
import sys
from pathlib import Path
import launcher

sys.path.insert(0, ".")
import mine
Path("helper.py").write_text("WIDTH = 4001\\n")
job = {"name": "x", "task": "mine:T", "batch": {"global": 1}, "steps": 1}
print(launcher.plan(job, set={"recipe.optimizer": "adamw"}).needed)
"""
WIDE = """\
import torch
from torch import nn
import helper
from launcher.train import Task

class T(Task):
    def model(self): return nn.Linear(1, helper.WIDTH)
    def data(self, split): return [torch.zeros(1)]
    def loss(self, model, batch): return model(batch).sum(), 1
"""


def test_a_plan_of_a_module_that_the_program_had_imported_before_an_edit_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WIDE)
    (tmp_path / "helper.py").write_text("WIDTH = 101\n")

    def needed(program: str) -> int:
        environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    before = needed(EDITED_BEFORE_PLAN)
    assert needed(EDITED_BEFORE_PLAN.replace("import mine\n", "")) > before
