"""Each fact stands in one place: what CONTRIBUTING.md says to touch is enough to add one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.spec import variables
from launcher.spec.command import PLACEHOLDERS, environment_name
from tests.lab import Lab

ROOT = Path(__file__).parent.parent
ADDED = {
    "launcher/spec/optimizer_table.py": (
        "\nOPTIMIZERS = {",
        '\n_ROWS += (Optimizer("sgd", "torch.optim:SGD", (), 500e6, {"momentum": 0.0}, steps=None),)'
        "\nOPTIMIZERS = {",
    ),
    "launcher/spec/recipe.py": (
        "    compile: bool = False\n",
        '    compile: bool = False\n    "torch.compile."\n    nesterov: bool = False\n',
    ),
    "launcher/spec/events.py": (
        "\nclass Retry(Event",
        '\nclass Praised(Event, kind="praised"):\n    words: str\n\n\nclass Retry(Event',
    ),
    "launcher/spec/failures.py": (
        "\nFAILURES = {",
        '\n_ROWS += (Failure("too-hot", 24, "stop", None, "cool the room", "was too hot"),)\nFAILURES = {',
    ),
    "launcher/spec/command.py": (
        "PLACEHOLDERS = {\n",
        'PLACEHOLDERS = {\n    "job_name": "name",\n',
    ),
    "launcher/schedulers/slurm/profile.py": (
        "    qos: str | None = None\n",
        '    mood: str | None = None\n    "Mood of the queue."\n    qos: str | None = None\n',
    ),
    "launcher/spec/variables.py": (
        '\nNODES = "LAUNCHER_NODES"',
        '\nPRAISE = "LAUNCHER_PRAISE"\nNODES = "LAUNCHER_NODES"',
    ),
}
"One of each: the file, and what is replaced by what."
SETS_THE_VARIABLE = (
    "launcher/supervise/attempt.py",
    "        variables.RUN_ID:",
    '        variables.PRAISE: "well done",\n        variables.RUN_ID:',
)
"The process that sets the added variable."
ONE_RANK = {"gpus_per_node": 0, "ranks_per_node": 1}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A user of a copy of launcher to which one of each was added."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("launcher", "templates", "clusters", "containers"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in [*((file, *change) for file, change in ADDED.items()), SETS_THE_VARIABLE]:
        text = (copy / file).read_text()
        assert text.count(old) == 1, f"{file} has no single {old!r}"
        (copy / file).write_text(text.replace(old, new))
    lab = Lab(tmp_path_factory.mktemp("lab"))
    lab.environ["PYTHONPATH"], lab.fresh = str(copy), True
    return lab


def python(lab: Lab, code: str) -> Any:
    """The JSON that Python code prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=lab.folder, env=lab.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_contributing_guide_names_the_places() -> None:
    rows = re.findall(
        r"^\| an? [^|]* \| `(launcher/.*?)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == sorted(ADDED)


def test_an_optimizer_is_offered_planned_and_trained_with(lab: Lab) -> None:
    schema = json.loads(lab.cli("schema", "job").stdout)
    assert "sgd" in schema["$defs"]["RecipeChoice"]["properties"]["optimizer"]["anyOf"][0]["enum"]
    job = lab.job(
        task="launcher.tasks.gpt:PydocGPT",
        args={"layers": 1, "dim": 32, "heads": 2, "context": 32},
        steps=2,
        train={"probe": "never", "checkpoint_every": None},
        resources=ONE_RANK,
        recipe={"sharding": "none", "optimizer": "sgd"},
    )
    done = lab.cli("run", str(job), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = lab.newest()
    assert [line["step"] for line in run.read_metrics()] == [1, 2]
    assert json.loads(run.attempt(0).recipe.read_text())["optimizer"] == "sgd"
    states = python(
        lab,
        "import json; from launcher.memory.shapes import ModelShapes, Parameter\n"
        "from launcher.memory.states import Ranks, states_of; from launcher.spec.recipe import Recipe\n"
        "shapes = ModelShapes((Parameter('weight', (8, 8), 4),), 0)\n"
        "sizes = {'micro_batch_size': 1, 'grad_accum': 1}\n"
        "recipe = Recipe(precision='fp32', optimizer='sgd', sharding='none', **sizes)\n"
        "print(json.dumps(states_of(shapes, recipe, Ranks(1, 1, False)).host.optimizer))",
    )
    assert states == 0


def test_a_recipe_field_is_offered_and_reaches_the_ranks(lab: Lab) -> None:
    lab.script("pass\n")
    job = lab.job(
        command="python train.py", resources=ONE_RANK, recipe={"sharding": "none", "nesterov": True}
    )
    assert lab.cli("run", str(job)).returncode == 0
    assert json.loads(lab.newest().attempt(0).recipe.read_text())["nesterov"] is True
    assert "nesterov" in lab.cli("schema", "job").stdout


def test_an_event_is_written_read_and_known_to_templates(lab: Lab) -> None:
    told = python(
        lab,
        "import json; from pathlib import Path; from launcher.rundir.layout import RunDir\n"
        "from launcher.spec.events import Praised; from launcher.render.environment import render_template\n"
        "Path('templates').mkdir(); Path('templates/own.sh.j2').write_text('event {{ events.praised }}')\n"
        "run = RunDir(Path.cwd()); run.append(Praised(words='well done')); [event] = run.read_events()\n"
        "print(json.dumps([event.words, type(event) is Praised, event.kind,"
        " render_template('own.sh.j2', {}, Path.cwd())]))",
    )
    assert told == ["well done", True, "praised", "event praised"]


def test_a_failure_class_is_told_by_a_pattern_judged_and_explained(lab: Lab) -> None:
    lab.script("import sys\nsys.exit('core temperature above threshold')\n")
    patterns = [{"pattern": "core temperature above", "class": "too-hot"}]
    job = lab.job(
        command="python train.py", resources=ONE_RANK, recipe={"sharding": "none"}, failures=patterns
    )
    done = lab.cli("run", str(job))
    assert done.returncode == 24, done.stdout + done.stderr
    run = lab.newest()
    judged = run.attempt(0).verdict.read_text()
    assert json.loads(judged)["failure"] == "too-hot"
    assert "cool the room" in lab.cli("why", run.id).stdout
    assert lab.json("status", run.id, code=24)["failure"] == "too-hot"


def test_a_variable_reaches_the_command_and_its_ranks(lab: Lab) -> None:
    lab.script(
        "import os, sys\nprint(sys.argv[1], *map(os.environ.get, ['LAUNCHER_JOB_NAME', 'LAUNCHER_PRAISE']))\n"
    )
    job = lab.job(command="python train.py {job_name}", resources=ONE_RANK, recipe={"sharding": "none"})
    assert lab.cli("run", str(job)).returncode == 0
    assert "e2e e2e well done" in lab.cli("logs", lab.newest().id).stdout


def test_a_field_of_a_schedulers_section_is_offered_and_checked_and_can_be_set(lab: Lab) -> None:
    schema = json.loads(lab.cli("schema", "cluster").stdout)
    assert schema["$defs"]["Slurm"]["properties"]["mood"]["description"] == "Mood of the queue."
    (lab.folder / "site.yaml").write_text("name: site\nscheduler: slurm\nslurm: {mood: [1]}\n")
    assert "site.yaml:3: slurm.mood" in lab.cli("clusters", "validate", "site.yaml").stdout
    (lab.folder / "site.yaml").write_text("name: site\nscheduler: slurm\nslurm: {mood: calm}\n")
    assert "ok (slurm)" in lab.cli("clusters", "validate", "site.yaml").stdout
    moods = python(
        lab,
        "import json; from pathlib import Path; from launcher.spec.load import load_cluster\n"
        "sets = [[], ['cluster.slurm.mood=busy']]\n"
        "print(json.dumps([load_cluster(Path('site.yaml'), each).slurm.mood for each in sets]))",
    )
    assert moods == ["calm", "busy"]


def test_every_variable_of_launchers_own_is_declared_once() -> None:
    declared = {value for name, value in vars(variables).items() if name.isupper() and isinstance(value, str)}
    placeholders = {environment_name(name) for name in PLACEHOLDERS}
    written = re.compile(r"LAUNCHER_[A-Z][A-Z_]*[A-Z]")
    for file in (ROOT / "templates").rglob("*.j2"):
        names = {name for name in written.findall(file.read_text()) if not name.startswith("LAUNCHER_ENV")}
        of_pods = {name for name in names if name.startswith("LAUNCHER_RUNPOD_")}
        assert names - of_pods <= declared | placeholders, file
    for file in (ROOT / "launcher").rglob("*.py"):
        if "schedulers" not in file.parts and file.name != "variables.py":
            quoted = set(re.findall(r'"(LAUNCHER_[A-Z_]+)"', file.read_text()))
            assert not quoted & declared, file


STANDALONE = ("schedulers/over_ssh/rsh.py", "schedulers/ssh/on_host.py", "spec/variables.py")
"Programs that run without launcher on their path, and the place itself."


def test_names_of_variables_and_events_stand_in_one_place() -> None:
    for path in sorted((ROOT / "launcher").rglob("*.py")):
        if path.relative_to(ROOT / "launcher").as_posix() in STANDALONE:
            continue
        text = path.read_text()
        assert not re.findall(r'"LAUNCHER_[A-Z_]+"', text), path
        assert not re.findall(r'\.event\(\s*"', text), path
