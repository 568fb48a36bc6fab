"""What a job names and is not there is said before anything is sent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.spec.errors import SpecError
from tests.lab import Lab

PYTHON = sys.executable
MINE = """
import os
from launcher.train.task import Task
from somewhere import Imported
raise RuntimeError("nobody runs this module before the queue")

class Mine(Task):
    def __init__(self, width, *, depth=2, rate): ...

class Free(Task):
    def __init__(self, **anything): ...

class Bare(Imported):
    pass

class Twice(Task):
    def __init__(self, one): ...
    def __init__(self, other): ...

class Reads(Task):
    def __init__(self, corpus: Path | None = None, note: str = ""): ...

class Made(Task):
    def __init__(self, one): ...
Made = Imported(Made)
"""


@pytest.fixture(autouse=True)
def project(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lab.folder)
    for name, value in lab.environ.items():
        monkeypatch.setenv(name, value)
    (lab.folder / "pack").mkdir()
    (lab.folder / "mine.py").write_text(MINE)
    (lab.folder / "pack/inner.py").write_text("class A: ...\n")
    (lab.folder / "torn.py").write_text("class A(\n")
    (lab.folder / "train.py").write_text("")
    (lab.folder / "long.py").write_text(f"a = {' + '.join(['1'] * 9000)}\nclass T: ...\n")
    return lab.folder


def check(**fields: Any) -> None:
    from launcher.api.prepare import prepared
    from launcher.schedulers.missing_files import check_workdir

    base = {"name": "x", "batch": {"global": 2}, "resources": {"gpus_per_node": 0}}
    more = {"steps": 2} if "task" in fields else {}
    check_workdir(prepared({**base, **more, **fields}, "local", [])[1].request)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"command": "python trian.py"}, "command: there is no trian.py in {here}; did you mean 'train.py'?"),
        ({"command": "./run.sh now"}, "the job: command: there is no ./run.sh in {here}"),
        ({"command": "./train.py"}, "train.py in {here} is not executable: `chmod +x ./train.py`, or"),
        ({"command": "train.py"}, "train.py is in {here}, which is not on the PATH: write `python train.py`"),
        ({"command": ["", "x"]}, "command: '' is no program"),
        ({"command": "LR=1 python train.py"}, "command: 'LR=1' is no program; put variables into `env:`"),
        ({"command": ["cd deep && python train.py"]}, "is a whole command in one argument: write"),
        ({"command": "python3.11 deep/run.py"}, "there is no deep/run.py in {here}"),
        ({"command": "python -u trian.py"}, "there is no trian.py in {here}"),
        ({"command": "/usr/bin/python3 trian.py"}, "there is no trian.py in {here}"),
        ({"command": f"{PYTHON} -u -m nowhere.train"}, "there is no module nowhere: neither in {here} nor"),
        ({"command": "bash run.sh"}, "there is no run.sh in {here}"),
        ({"command": "python train.py", "workdir": "pack"}, "there is no train.py in {here}/pack"),
        ({"task": "nowhere.there:Mine"}, "there is no module nowhere.there: neither in {here} nor installed"),
        ({"task": "launcher.tasks.gbt:PydocGPT"}, "task: there is no module launcher.tasks.gbt"),
        ({"task": "mine:Yours"},
         "{here}/mine.py has no class Yours; it has Mine, Free, Bare, Twice, Reads, Made"),
        ({"task": "pack.inner:B"}, "task: {here}/pack/inner.py has no class B; it has A"),
        ({"task": "torn:A"}, "task: {here}/torn.py:1: "),
        (
            {"task": "mine:Mine", "args": {"width": 1, "dept": 3}},
            "args.dept: Mine in {here}/mine.py has no such argument; did you mean 'depth'?\n"
            "the job: args.rate: is missing: Mine in {here}/mine.py needs it",
        ),
        ({"task": "launcher.tasks.gpt:PydocGPT", "args": {"layer": 1}}, "args.layer: PydocGPT in "),
        ({"task": "mine:Reads", "args": {"corpus": "a.txt"}}, "args.corpus: there is no a.txt (looked from"),
        (
            {"task": "launcher.tasks.llama:LanguageModel", "args": {"shape": "tiny", "data": "/data/*.bin"}},
            "args.data: there is no /data/*.bin (looked from {here})",
        ),
    ],
)  # fmt: skip
def test_it_is_named(project: Path, fields: dict[str, Any], said: str) -> None:
    (project / "job.yaml").write_text("name: another job's file\n")
    with pytest.raises(SpecError) as raised:
        check(**fields)
    assert said.format(here=project) in str(raised.value)
    with pytest.raises(launcher.SpecError):
        launcher.submit(
            {"name": "x", "batch": {"global": 2}, "steps": 2, "resources": {"gpus_per_node": 0}, **fields}
        )
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"command": "python train.py --data nowhere.bin"},
        {"command": "/usr/bin/python3 -m nowhere"},
        {"command": f"{PYTHON} -m pack.inner"},
        {"command": f"{PYTHON} -m json.tool"},
        {"command": f"{PYTHON} -m nowhere", "env": {"PATH": "/elsewhere"}},
        {"command": f"{PYTHON} -m"},
        {"command": "python -X dev trian.py"},
        {"command": "python pack"},
        {"command": "python -u train.py"},
        {"command": "bash -c true"},
        {"task": "math:T"},
        {"task": "viapath:T", "env": {"PYTHONPATH": "lib"}},
        {"task": "mine:Twice", "args": {"other": 1}},
        {"task": "mine:Made", "args": {"other": 1}},
        {"task": "long:T"},
        {"command": "python -c 'print(1)'"},
        {"command": "/nowhere/on/this/machine.sh"},
        {"command": "python {run_dir}/scripts/mine.py"},
        {"command": "my-program x"},
        {"command": ["/my programs/a=1", "b=1"]},
        {"task": "mine:Imported"},
        {"task": "mine:Mine", "args": {"width": 1, "rate": 2}},
        {"task": "mine:Free", "args": {"whatever": 1}},
        {"task": "mine:Bare", "args": {"whatever": 1}},
        {"task": "pack.inner:A"},
        {"task": "launcher.tasks.gpt:PydocGPT", "args": {"layers": 1}},
        {"task": "mine:Reads", "args": {"corpus": "tra*.py", "note": "a.txt"}},
        {"task": "launcher.tasks.llama:LanguageModel", "args": {"shape": "tiny", "data": "pack/*.py"}},
    ],
    ids=str,
)
def test_what_only_the_run_can_tell_is_left_to_it(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["export A=1", "for x in 1 2; do", "true"], "line 4: syntax error: unexpected end of file"),
        (["echo 'open"], "unexpected EOF while looking for matching"),
        (["module load cuda", "[[ -d $HOME ]] && export B=$A"], ""),
    ],
)
def test_setup_that_bash_cannot_read(project: Path, lines: list[str], said: str) -> None:
    from ruamel.yaml import YAML

    YAML().dump({"name": "mine", "scheduler": "local", "setup": lines}, project / "mine.yaml")
    job = {
        "name": "x",
        "command": "python train.py",
        "batch": {"global": 2},
        "resources": {"gpus_per_node": 0},
    }
    if not said:
        launcher.submit(job, "mine.yaml").wait(240)
        return
    with pytest.raises(SpecError) as raised:
        launcher.submit(job, "mine.yaml")
    assert str(raised.value).startswith("profile mine: setup: ") and said in str(raised.value)


def test_a_file_that_setup_makes_is_left_to_the_run(project: Path) -> None:
    from ruamel.yaml import YAML

    setup = [f"echo 'print(1)' > {project}/made.py"]
    YAML().dump({"name": "mine", "scheduler": "local", "setup": setup}, project / "m.yaml")
    resources = {"gpus_per_node": 0}
    job = {"name": "x", "command": "python made.py", "batch": {"global": 2}, "resources": resources}
    assert launcher.run(job, "m.yaml", timeout=240).state == "succeeded"
