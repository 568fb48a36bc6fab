"""The Python API on this machine: what it gives is what the command line tells of the same runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import launcher
from launcher.api.prepare import prepared
from launcher.schedulers.base import SchedulerError
from launcher.spec.load import load_job
from tests.lab import Lab, wait_for

TASK = {
    "name": "tiny",
    "task": "launcher.tasks.gpt:PydocGPT",
    "args": {"layers": 1, "dim": 32, "heads": 2, "context": 32},
    "batch": {"global": 8},
    "steps": 3,
    "resources": {"gpus_per_node": 0, "ranks_per_node": 1},
}
WAITS = "import pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.05)\nprint('went')\n"


@pytest.fixture(autouse=True)
def here(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project folder is the current directory of the test itself."""
    monkeypatch.chdir(lab.folder)
    for name, value in lab.environ.items():
        monkeypatch.setenv(name, value)


def test_importing_launcher_imports_nothing_of_it() -> None:
    code = "import sys, launcher; print([n for n in sys.modules if n.startswith('launcher.')], dir(launcher))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("[] ") and "'submit'" in said


def test_importing_a_module_of_it_hides_no_name() -> None:
    code = "import launcher.api.submit, launcher.rundir.find\nprint(launcher.runs, launcher.run)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("<function runs at") and "<function run at" in said


def test_a_file_a_mapping_and_a_job_are_the_same_job(lab: Lab) -> None:
    file = lab.job(**TASK)
    plans = [
        launcher.plan(job)
        for job in (file, str(file), {**TASK, "recipe": {"sharding": "ddp"}}, load_job(file))
    ]
    assert len({one.recipe.model_dump_json() for one in plans}) == 1
    told = lab.json("plan", str(file))
    assert plans[0].as_dict()["chosen"]["recipe"] == told["chosen"]["recipe"]
    assert plans[0].needed == told["chosen"]["estimate"]["needed"] > 0 and plans[0].fits
    assert plans[0].seconds_per_step is None and plans[0].capacity is None
    assert "micro-batch" in str(plans[0]) and plans[0]._repr_html_().startswith("<iframe srcdoc=")


@pytest.mark.e2e
def test_a_run_is_waited_for_cancelled_resumed_and_told_of_as_the_command_line_does(lab: Lab) -> None:
    lab.script(WAITS)
    resources = {"gpus_per_node": 0, "ranks_per_node": 2}
    job = {"name": "waits", "command": "python train.py", "batch": {"global": 2}, "resources": resources}
    run = launcher.submit(job, set={"env.A": "1e3"})
    assert run.job.env == {"A": "1e3"}
    with pytest.raises(TimeoutError, match=f"{run.id} is still"):
        run.wait(0.1)
    wait_for(lambda: run.state == "running" and run.directory.attempts(), "start")
    assert launcher.runs(state="running")[0] == run == launcher.Run(run.id[:-2]) == launcher.Run(run.handle)
    run.cancel()
    assert run.wait(240).failure == "cancelled" and run.verdict is not None
    with pytest.raises(launcher.SchedulerError, match="is not running: cancelled"):
        run.cancel()
    (lab.folder / "go").touch()
    assert run.resume(set={"env.B": 2}).wait(240).state == "succeeded"
    assert [one.failure for one in run.verdicts] == ["cancelled", "succeeded"]
    assert run.job.env == {"A": "1e3", "B": "2"}
    assert run.logs(rank=1).count("went") == 1 and run.logs().count("went") == 2
    with pytest.raises(ValueError, match="rank 7"):
        run.logs(rank=7)
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        run.logs(rank="01")  # type: ignore[arg-type]
    assert run.logs(rank=numpy.int64(1)) == run.logs(rank=1)  # type: ignore[arg-type]
    assert lab.cli("why", run.id).stdout.startswith(run.why())
    assert run.status().as_json().items() <= lab.json("status", run.id).items()
    assert repr(run).startswith(f"<Run {run.id}: succeeded") and run.id in run._repr_html_()
    assert launcher.runs(name="waits", cluster="local").statuses()[0].state == "succeeded"
    assert len(launcher.runs(name="other")) == 0 and repr(launcher.runs(name="other")) == "no runs"


@pytest.mark.e2e
def test_a_run_that_was_deleted_cannot_be_resumed_and_is_not_said_to_be(lab: Lab) -> None:
    lab.script("print('done')")
    resources = {"gpus_per_node": 0, "ranks_per_node": 1}
    run = launcher.run(
        {"name": "x", "command": "python train.py", "batch": {"global": 1}, "resources": resources}
    )
    shutil.rmtree(run.path)
    assert (run.state, run.status().resumable) == ("lost", False)
    assert f"{run.path} was deleted" in run.why() and "launcher resume" not in run.why()
    assert [status.state for status in launcher.Runs([run]).statuses()] == ["lost"]
    with pytest.raises(launcher.SchedulerError, match=rf"^{run.path} was deleted$"):
        run.resume()


def test_metrics_have_each_step_as_the_last_attempt_did_it(lab: Lab) -> None:
    folder = lab.folder / "runs" / "some-run"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"id": "some-run", "job": {}, "cluster": {"scheduler": "local"}}')
    did = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (2, 3), (2, 4)]  # (attempt, step)
    common = {"time": "2026-11-21T08:54:01.000000Z", "seconds": 1.0}
    lines = [json.dumps({**common, "attempt": attempt, "step": step}) for attempt, step in did]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = [(line["attempt"], line["step"]) for line in launcher.Run(folder).metrics()]
    assert found == [(0, 1), (1, 2), (2, 3), (2, 3), (2, 4)], "a script may log a step twice"


@pytest.mark.slow
@pytest.mark.e2e
def test_metrics_and_checkpoints_of_a_task(lab: Lab) -> None:
    run = launcher.run(TASK, set={"train.checkpoint_every": 2})
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert [one.step for one in run.checkpoints()] == [2, 3]
    assert all(Path(one.path).is_dir() for one in run.checkpoints())
    assert run.events()[0]["event"] == "submitted"
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError):
            run.metrics().to_pandas()
    else:
        assert list(run.metrics().to_pandas()["step"]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: launcher.submit("nowhere.yaml"), launcher.UsageError, "nowhere.yaml: No such file"),
        (lambda: launcher.submit("."), launcher.UsageError, "irectory"),
        (lambda: launcher.submit(None), launcher.UsageError, "None is not a job"),
        (lambda: launcher.submit(TASK, set="steps=2"), launcher.UsageError, "set: give a mapping"),
        (lambda: launcher.submit(TASK, set={"name": None}), launcher.SpecError, "name: None is not a value"),
        (lambda: launcher.submit(TASK, set={"args.x": float("inf")}), launcher.SpecError, "set: args.x: inf"),
        (lambda: launcher.submit(TASK, set={"env.A=B": "1"}), launcher.SpecError, "no field has `=`"),
        (lambda: launcher.submit(TASK, at_once=2), launcher.UsageError, "give sweep, too"),
        (lambda: launcher.submit(TASK, sweep={"steps": [1]}, at_once=0), launcher.UsageError, "1 on, not 0"),
        (lambda: launcher.submit(TASK, sweep={"steps": [1]}, at_once="2"), launcher.UsageError, "at_once: "),
        (lambda: launcher.submit(TASK, set=5), launcher.UsageError, "set: give a mapping"),
        (lambda: launcher.submit(TASK, sweep={"steps": 5}), launcher.UsageError, "steps: give a list"),
        (lambda: launcher.submit(TASK, sweep={"steps": {"a": 1}}), launcher.UsageError, "steps: give a list"),
        (lambda: launcher.submit(TASK, sweep={1: [5]}), launcher.SpecError, "name of a field is text"),
        (lambda: launcher.submit(TASK, sweep="steps=1,2"), launcher.UsageError, "sweep: give a mapping"),
        (lambda: launcher.runs(state="bogus"), launcher.UsageError, "'bogus' is not a state of a run"),
        (lambda: launcher.Run(""), launcher.RunNotFoundError, "the name is empty"),
        (lambda: launcher.submit({**TASK, "steps": "many"}), launcher.SpecError, "the job: steps: must be"),
        (lambda: launcher.submit(TASK, "atlantis"), launcher.SpecError, "atlantis"),
        (lambda: launcher.submit(TASK, set={"args.x": object()}), launcher.SpecError, "set: args.x: <object"),
        (lambda: launcher.submit(TASK, set={"resources.nodes": 2}), launcher.LauncherError, "node"),
        (lambda: launcher.submit(TASK, sweep={"steps": "1"}, samples=2), launcher.LauncherError, "--samples"),
        (lambda: launcher.submit(TASK, budget=3), launcher.SchedulerError, "--budget: nothing is rented"),
        (lambda: launcher.submit(TASK, sweep={"steps": [1]}, budget=3), launcher.SchedulerError, "--budget"),
        (lambda: launcher.plan({**TASK, "task": "nowhere:Mine"}), launcher.LauncherError, "nowhere"),
        (lambda: launcher.Run("nope"), launcher.RunNotFoundError, "no run 'nope'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_raised_with_one_message(call, error: type[Exception], said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error) as raised:
        call()
    assert said in str(raised.value)
    assert not list(Path("runs").glob("*"))


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'launcher' has no attribute 'sumbit'"):
        launcher.sumbit  # noqa: B018
    assert {*launcher.__all__} <= {*dir(launcher)}


@pytest.mark.e2e
def test_the_job_of_a_run_runs_the_same_code_from_any_folder(lab: Lab) -> None:
    (lab.folder / "sub").mkdir()
    (lab.folder / "sub/train.py").write_text("print('the right one')")
    lab.script("print('the wrong one')")
    lab.job("sub/job.yaml", command="python train.py", resources={"gpus_per_node": 0, "ranks_per_node": 1})
    first = launcher.run("sub/job.yaml")
    again = launcher.run(first.job, timeout=240)
    assert "the right one" in first.logs() and "the right one" in again.logs()


@pytest.mark.e2e
def test_what_the_plan_warns_of_is_a_warning(lab: Lab) -> None:
    lab.script("import os; print(os.environ['WORD'])")
    job = {
        "name": "x",
        "command": "python train.py",
        "batch": {"global": 1},
        "resources": {"gpus_per_node": 0},
    }
    with pytest.warns(UserWarning, match=r"nothing reads train\.lr") as told:
        run = launcher.run(job, set={"train.lr": 1, "env.WORD": "\N{PILE OF POO}"}, timeout=240)
    assert "\N{PILE OF POO}" in run.logs()
    assert {one.filename for one in told if one.category is UserWarning} == {__file__}


def test_values_reach_the_job_as_they_are() -> None:
    from launcher.api.given_job import as_given_job, overrides_of

    args = {"args.a": "\N{PILE OF POO}", "args.b": ["1", 1, None], "args.c": {"x": "1e3"}, "args.d": "1e3"}
    job = as_given_job(TASK).job(overrides_of(args))
    found = {name.removeprefix("args."): value for name, value in args.items()}
    assert {name: job.args[name] for name in found} == found


def test_numbers_of_numpy_are_numbers() -> None:
    from launcher.api.given_job import overrides_of

    given = {"batch.global": numpy.int64(8), "train.lr": numpy.float32(0.5), "args.sizes": [numpy.int8(1)]}
    assert overrides_of(given) == ["batch.global=8", "train.lr=0.5", "args.sizes=[1]"]
    with pytest.raises(launcher.SpecError, match="is not a number"):
        overrides_of({"train.lr": numpy.float32("nan")})


def test_a_machine_is_one_node(tmp_path: Path) -> None:
    profile = tmp_path / "pair.yaml"
    profile.write_text("{name: pair, scheduler: local, max_nodes: 2}")
    job = {"name": "j", "command": ["true"], "batch": {"global": 2}, "resources": {"nodes": 2}}
    with pytest.raises(SchedulerError, match="pair is one machine; several nodes need another cluster"):
        prepared(job, str(profile), [])
