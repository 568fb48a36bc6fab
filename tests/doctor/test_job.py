"""`launcher doctor --job`: whether a job can start there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor.checks import CHECKS
from launcher.doctor.examine import examine
from launcher.doctor.job_needs import JobNeeds, checkpoint_bytes
from launcher.doctor.measure.gpus import visible
from launcher.doctor.measure.job import measure_job
from launcher.doctor.options import Options
from launcher.doctor.values import Expected, Finding, Measured
from launcher.planning.plan import Layout, Plan
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.quantities import GIB
from launcher.spec.recipe import Recipe
from tests.lab import Lab

RECIPE = Recipe(precision="bf16-mixed", optimizer="adamw", sharding="fsdp", micro_batch_size=1, grad_accum=1)
SCRIPT = """
import json, nosuchmodule
import torch.nn
from . import neighbour
try:
    import apex
except ImportError:
    apex = None
"""


def needs(**fields: Any) -> JobNeeds:
    return JobNeeds({"name": "j", "batch": {"global": 1}, **fields})


def measured(job: JobNeeds, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    monkeypatch.chdir(folder)
    found = examine(measure_job(0, job, folder), Expected(job=job))
    return {one.check: one for one in found}


def test_the_needs_travel_in_the_command() -> None:
    job = Job.model_validate(
        {
            "name": "j", "task": "a:B", "args": {"text": "it's ${HOME} {attempt} \"x\""}, "steps": 1,
            "batch": {"global": 8}, "secrets": ["TOKEN"],
        }
    )  # fmt: skip
    cluster = Cluster(name="c", scheduler="local", setup=("module load x",))
    layout = Layout(nodes=1, ranks_per_node=1, gpus_per_node=1)
    plan = Plan(layout=layout, recipe=RECIPE, ladder=(), reason="", parameters=10**9)
    options = Options("quick", job=JobNeeds.of(job, plan, cluster))
    assert Options.of_command(options.command) == options
    assert options.job is not None and options.job.secrets == ("TOKEN",)
    # Two checkpoints are kept, and the next is written before one is deleted.
    assert options.job.checkpoints == 3 * 12 * 10**9


def test_a_checkpoint_holds_parameters_and_optimizer_states() -> None:
    assert checkpoint_bytes(1000, RECIPE) == 12_000
    eight = RECIPE.model_copy(update={"precision": "bf16", "optimizer": "adamw-8bit"})
    assert checkpoint_bytes(1000, eight) == 4_000


def test_a_script_and_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = measured(needs(command="python -u train.py --x 1"), tmp_path, monkeypatch)
    assert found["job-files"].verdict == "good"
    assert (found["job-imports"].verdict, found["job-imports"].measured) == ("broken", "1 missing")
    assert found["job-imports"].cause.endswith("no module nosuchmodule.")
    (tmp_path / "nosuchmodule.py").touch()  # beside the script
    assert measured(needs(command="python train.py"), tmp_path, monkeypatch)["job-imports"].verdict == "good"


@pytest.mark.parametrize(
    ("fields", "check", "words"),
    [
        ({"command": "python trian.py"}, "job-files", "there is no trian.py"),
        ({"command": "no-such-program train.py"}, "job-imports", "no-such-program: no such program"),
        ({"task": "mine:Task", "steps": 1}, "job-imports", "No module named 'lacking'"),
        ({"task": "mine:Task", "steps": 1, "args": {"x": 1}}, "job-files", "has no such argument"),
        ({"task": "near:Task", "steps": 1, "args": {"date": 1}}, "job-files", "did you mean 'data'?"),
        ({"task": "data:Task", "steps": 1, "args": {"data": "a.npy"}}, "job-files", "there is no a.npy"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], check: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text("import lacking\nclass Task:\n    def __init__(self): pass\n")
    (tmp_path / "data.py").write_text(
        "from pathlib import Path\nclass Task:\n    def __init__(self, data: Path): pass\n"
    )
    (tmp_path / "near.py").write_text("class Task:\n    def __init__(self, data=1): pass\n")
    found = measured(needs(**fields), tmp_path, monkeypatch)[check]
    assert found.verdict == "broken" and words in found.cause and "?." not in found.cause


def test_secrets_and_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("FULL", "x")
    job = JobNeeds(
        {"name": "j", "batch": {"global": 1}, "command": ["true"]}, ("EMPTY", "FULL"), (),
        host=2**50, checkpoints=2**50,
    )  # fmt: skip
    found = measured(job, tmp_path, monkeypatch)
    assert found["job-secrets"].cause == "Secrets are empty on this node: EMPTY."
    assert found["job-disk"].verdict == found["job-host-memory"].verdict == "broken"


def test_the_plan_is_compared_with_the_free_memory_of_the_gpus() -> None:
    expected = Expected(job=JobNeeds({}, gpu=40 * GIB))
    for free, verdict in ((41 * GIB, "good"), (39 * GIB, "broken")):
        [found] = examine([Measured("job-gpu-memory", 0, free)], expected)
        assert found.verdict == verdict and found.title == CHECKS["job-gpu-memory"].title


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [("", [0, 1, 2]), ("2,0", [0, 2]), ("GPU-bb", [1]), ("GPU-aa11, GPU-cc33", [0, 2]), ("MIG-x", [0, 1, 2])],
)
def test_the_gpus_of_other_jobs_are_not_examined(chosen: str, indices: list[int]) -> None:
    assert visible(["GPU-aa11", "GPU-bb22", "GPU-cc33"], chosen) == indices


@pytest.mark.e2e
def test_the_doctor_answers_for_a_job(lab: Lab) -> None:
    lab.script("import nosuchmodule\n")
    job = lab.job(command="python train.py --mb {micro_batch_size}", secrets=["TOKEN"], image="my/image:1")
    lab.environ["TOKEN"] = "a-secret-value"
    done = lab.cli("doctor", "--quick", "--job", str(job), "--json")
    assert done.returncode == 1 and "warning: the command does not use {grad_accum}" in done.stderr
    told = json.loads(done.stdout)
    verdicts = {one["check"]: one["verdict"] for one in told["findings"] if one["part"] == "job"}
    good = {"job-files": "good", "job-secrets": "good"}
    assert verdicts == {**good, "job-imports": "broken", "job-image": "poor"}, "nothing starts a container"
    assert told["ranks"] == 2
    for file in lab.newest().path.rglob("*"):
        assert not file.is_file() or b"a-secret-value" not in file.read_bytes(), file
    assert os.access(lab.newest().path, os.W_OK)
    lab.environ.pop("TOKEN")
    done = lab.cli("doctor", "--job", str(job))
    assert done.returncode == 4 and "TOKEN" in done.stderr


@pytest.mark.e2e
def test_a_run_that_does_not_start_tells_why(lab: Lab) -> None:
    told = lab.json("doctor", "--quick", "-s", "cluster.setup=[module-that-is-not-there]", code=1)
    [silent] = [one for one in told["findings"] if one["check"] == "answers"]
    assert silent["verdict"] == "broken" and "line 1 of setup" in silent["cause"]
