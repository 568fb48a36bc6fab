"""launcher: a training job and a cluster become a run that fits into GPU memory.

```python
import launcher

run = launcher.submit("job.yaml", cluster="slurm-a100", set={"train.lr": 1e-4})
run.wait()
print(run.verdict, run.metrics()[-1])
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from launcher.api.model_sources import UserCodeError
    from launcher.api.plans import Plan, plan
    from launcher.api.run import Checkpoint, Metrics, Run, Runs
    from launcher.api.submit import run, runs, submit
    from launcher.planning.plan import PlanRefusedError
    from launcher.rundir.find import RunNotFoundError
    from launcher.rundir.metrics_log import log
    from launcher.schedulers.base import SchedulerError, Status, UnclearError
    from launcher.spec.cluster import Cluster
    from launcher.spec.errors import LauncherError, SpecError, UsageError
    from launcher.spec.job import Job
    from launcher.spec.recipe import Recipe
    from launcher.spec.verdict import Verdict
    from launcher.train.task import Task

_PLACES = {
    "Checkpoint": "api.run",
    "Cluster": "spec.cluster",
    "Job": "spec.job",
    "LauncherError": "spec.errors",
    "Metrics": "api.run",
    "Plan": "api.plans",
    "PlanRefusedError": "planning.plan",
    "Recipe": "spec.recipe",
    "Run": "api.run",
    "RunNotFoundError": "rundir.find",
    "Runs": "api.run",
    "SchedulerError": "schedulers.base",
    "SpecError": "spec.errors",
    "Status": "schedulers.base",
    "Task": "train.task",
    "UnclearError": "schedulers.base",
    "UsageError": "spec.errors",
    "UserCodeError": "api.model_sources",
    "Verdict": "spec.verdict",
    "log": "rundir.metrics_log",
    "plan": "api.plans",
    "run": "api.submit",
    "runs": "api.submit",
    "submit": "api.submit",
}
"Where each name is. It is imported when it is first used: `import launcher` costs nothing."

__all__ = [
    "Checkpoint",
    "Cluster",
    "Job",
    "LauncherError",
    "Metrics",
    "Plan",
    "PlanRefusedError",
    "Recipe",
    "Run",
    "RunNotFoundError",
    "Runs",
    "SchedulerError",
    "SpecError",
    "Status",
    "Task",
    "UnclearError",
    "UsageError",
    "UserCodeError",
    "Verdict",
    "log",
    "plan",
    "run",
    "runs",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"launcher.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
