"""A task that cannot be used is refused in words its author understands."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import IterableDataset

from launcher.train.rank import SetupError
from launcher.train.task import Task, TaskError, blocks_of, load_task, outer_units_of, pipeline_of
from launcher.train.tensor_parallel import styles_of
from tests.train import traps

SOURCE = """
import torch
from launcher.train import Task
class Good(Task):
    def __init__(self, layers=4, dim=128): self.layers = layers
    def model(self): ...
    def data(self, split): ...
    def loss(self, model, batch): ...
class Table(Good):
    def __init__(self, csv_path, target, rows=1): ...
class Half(Task):
    def model(self): ...
class Hides(Good):
    def __init__(self, path=None): self.data = path
class HidesByModule(Good):
    def __init__(self): self.loss = torch.nn.MSELoss()
class Narrow(Good):
    def loss(self, model): ...
class Static(Good):
    @staticmethod
    def data(split, shuffle=True): ...
    def loss(self, *args, **kwargs): ...
    collate = torch.stack
class Unfilled(Good):
    built_on_meta = True
class Seedless(Good):
    built_on_meta = True
    def initialise(self, model): ...
class OneMetric(Good):
    metrics = "accuracy"
class NoMetrics(Good):
    metrics = None
class OwnMetric(Good):
    metrics = ("loss",)
class Units(Good):
    def outer_units(self): ...
class Saves(Good):
    def state(self): return {}
class Other: ...
"""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_tasks.py").write_text(SOURCE)
    (tmp_path / "broken_tasks.py").write_text("import not_installed_anywhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_tasks", "broken_tasks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"cvs_path": "a", "target": "b"}, "unknown argument 'cvs_path' (did you mean 'csv_path'?)"),
        (
            {"cvs_path": "a", "rosw": 2},
            "unknown argument 'cvs_path' (did you mean 'csv_path'?); unknown argument 'rosw' (did you mean "
            "'rows'?); missing argument 'target'",
        ),
        ({"csv_path": "a"}, "missing argument 'target'"),
        ({"csv_path": "a", "target": "b", "csv_paht": "c"}, "unknown argument 'csv_paht'"),
    ],
)
def test_each_argument_that_is_wrong_or_missing_is_named_as_it_is_written(
    workdir: str, args: dict[str, Any], words: str
) -> None:
    with pytest.raises(TaskError) as caught:
        load_task("my_tasks:Table", args, workdir)
    assert str(caught.value) == f"args of Table: {words}; it accepts: csv_path, target, rows=1"


def test_a_task_is_found_in_the_workdir_and_gets_its_arguments(workdir: str) -> None:
    task = load_task("my_tasks:Good", {"layers": 2}, workdir)
    assert isinstance(task, Task) and vars(task) == {"layers": 2}
    load_task("my_tasks:Static", {}, workdir)


@pytest.mark.parametrize(
    ("reference", "args", "message"),
    [
        ("no_tasks:Good", {}, "no module named 'no_tasks' in .* or among the installed packages"),
        ("my_tasks:Goood", {}, "my_tasks has no 'Goood'; its tasks are Good, Half, "),
        ("my_tasks:Other", {}, "Other is not a subclass of launcher.train.Task"),
        ("my_tasks:Half", {}, "Half does not define data, loss"),
        ("my_tasks:Hides", {}, r"Hides sets self.data, which hides its method data\(\); give the attribute"),
        ("my_tasks:Narrow", {}, r"Narrow must define loss\(self, model, batch\)"),
        ("my_tasks:HidesByModule", {}, "HidesByModule sets self.loss, which hides"),
        ("my_tasks:Unfilled", {}, r"Unfilled sets built_on_meta, but has no initialise\(\)"),
        ("my_tasks:Seedless", {}, r"Seedless must define initialise\(self, model, seed\)"),
        ("my_tasks:Saves", {}, r"Saves has state\(\), but no load_state\(\)"),
        ("my_tasks:Units", {}, r"Units must define outer_units\(self, model\)"),
        ("my_tasks:OneMetric", {}, "metrics of OneMetric: must be a tuple of names.*, not 'accuracy'"),
        ("my_tasks:NoMetrics", {}, "metrics of NoMetrics: must be a tuple of names"),
        ("my_tasks:OwnMetric", {}, "metrics of OwnMetric: launcher records loss itself"),
        (
            "my_tasks:Good",
            {"layrs": 2},
            r"unknown argument 'layrs' \(did you mean 'layers'\?\); it accepts: layers=4, dim=128",
        ),
    ],
)
def test_what_is_wrong_is_named(workdir: str, reference: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_task(reference, args, workdir)


def test_a_file_that_another_module_hides_is_named(workdir: str) -> None:
    hidden = Path(workdir, "queue.py")
    hidden.write_text(SOURCE)
    with pytest.raises(TaskError) as caught:
        load_task("queue:Good", {}, workdir)
    assert str(caught.value) == (
        f"task queue:Good: {hidden} is not imported, because another module has the name 'queue' "
        f"({queue.__file__}): rename the file"
    )


def test_what_the_users_module_misses_is_not_mistaken_for_the_module(workdir: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_task("broken_tasks:Good", {}, workdir)


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, launcher.train, launcher.spec.unsupported_recipes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class Unindexed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("data", "message"), [([], "the training data has no samples"), (Unindexed(), "Unindexed has no length")]
)
def test_the_example_of_unusable_data_is_refused_as_in_a_run(data: Any, message: str) -> None:
    class Unusable(traps.Normed):
        def data(self, split: str) -> Any:
            return data

    with pytest.raises(TaskError, match=message):
        Unusable().example()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("encoder", r"blocks\(\) of Stray returned 'encoder', which is not a module"),
        (nn.Linear(2, 2), r"blocks\(\) of Stray returned Linear, which is not in the model"),
    ],
)
def test_blocks_are_modules_of_the_model(block: Any, message: str) -> None:
    class Stray(traps.Normed):
        def blocks(self, model: nn.Module) -> list[Any]:
            return [*model.children(), block]

    task = Stray()
    with pytest.raises(TaskError, match=message):
        blocks_of(task, task.model())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"outer_units\(\) of Outer must return a list of modules, not NoneType"),
        (nn.Linear(2, 2), r"outer_units\(\) of Outer must return a list of modules, not Linear"),
        ("tokens", r"outer_units\(\) of Outer returned 't', which is not a module"),
        ([nn.Linear(2, 2)], r"outer_units\(\) of Outer returned Linear, which is not in the model"),
    ],
)
def test_outer_units_are_modules_of_the_model(returned: Any, message: str) -> None:
    class Outer(traps.Normed):
        def outer_units(self, model: nn.Module) -> Any:
            return returned

    task = Outer()
    with pytest.raises(TaskError, match=message):
        outer_units_of(task, task.model())


def test_what_is_no_pipeline_is_refused() -> None:
    class Triple(traps.Normed):
        def pipeline(self, model: nn.Module) -> Any:
            return (model, model, model)

    task = Triple()
    with pytest.raises(TaskError, match=r"pipeline\(\) of Triple must return .*Pipeline or None, not tuple"):
        pipeline_of(task, task.model())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([ColwiseParallel()], r"parallel_plan\(\) of Planned must return a dictionary .*, not list"),
        ({"first": ColwiseParallel}, r"first: must be a style such as ColwiseParallel\(\), not <class"),
        ({"first": "colwise"}, r"first: must be a style such as ColwiseParallel\(\), not 'colwise'"),
    ],
)
def test_a_plan_for_tensor_parallelism_has_styles_by_name(plan: Any, message: str) -> None:
    class Planned(traps.Normed):
        def parallel_plan(self, model: nn.Module) -> Any:
            return plan

    task = Planned()
    with pytest.raises(SetupError, match=message):
        styles_of(task.model(), task, 2)
