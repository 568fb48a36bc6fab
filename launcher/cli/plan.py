"""`launcher plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.cli.options import AsJson, ClusterName, JobFile, Sets

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.memory.shapes import ModelShapes
    from launcher.spec.job import Job
    from launcher.spec.recipe import Recipe


def plan(job: JobFile, cluster: ClusterName = "local", set_: Sets = None, json: AsJson = False) -> None:
    """Show what the states of your model need on the GPU and on the host. Nothing is started."""
    from launcher.cli.output import console, print_json
    from launcher.cli.prepare import named_cluster
    from launcher.planning.fitting import changes_line, weigh
    from launcher.planning.plan import PlanRefusedError, make_plan
    from launcher.report.memory import NOT_YET, show_fit
    from launcher.report.terminal import show_plan
    from launcher.schedulers.local import with_detected_gpus
    from launcher.spec.errors import Problem
    from launcher.spec.load import load_job

    asked, on = load_job(job, set_ or []), with_detected_gpus(named_cluster(cluster))
    made = make_plan(asked, on)
    if asked.task is None:
        message = (
            "the model of a foreign command is not known, so its memory is not planned; `task:` jobs are"
        )
        raise PlanRefusedError([Problem("job", "command", message)])
    fit = weigh(_shapes(asked, (job.parent / asked.workdir).resolve(), made.recipe), asked, on, made)
    lines = [changes_line(one, made.recipe) for one in fit.alternatives]
    if json:
        print_json(
            {"plan": made.model_dump(mode="json"), "states": fit.model_dump(mode="json"), "note": NOT_YET}
        )
    else:
        show_plan(console(), asked, on, made, made.warnings)
        print()
        show_fit(console(), fit, made.layout.ranks_per_node)
    if fit.problems:
        nothing = "no other optimizer, offload or sharding here has states that fit: take more or larger GPUs"
        hints = [f"states that fit: {line}" for line in lines] or [nothing]
        raise PlanRefusedError([Problem("job", "recipe", text) for text in (*fit.problems, *hints)])


def _shapes(job: Job, workdir: Path, recipe: Recipe) -> ModelShapes:
    """Of the model that the task builds. Its code runs as in a rank: in `workdir`. Ends the program with one
    message for what is wrong in it; what it prints goes to stderr."""
    import contextlib
    import os
    import sys
    import traceback

    from launcher.cli.output import EXIT_REFUSED, fail

    assert job.task is not None
    if not workdir.is_dir():
        fail(f"workdir: {workdir} is no directory here; plan imports the task from it")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        fail(f'{error}; building the model needs the extra: pip install "launcher[train]"')
    from launcher.train.rank import SetupError
    from launcher.train.shapes import read_shapes
    from launcher.train.task import TaskError, load_task

    os.chdir(workdir)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return read_shapes(load_task(job.task, job.args, str(workdir)), recipe)
    except TaskError as error:
        fail(str(error))
    except SetupError as error:
        fail(str(error), EXIT_REFUSED)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next((one for one in reversed(frames) if one.filename.startswith(str(workdir))), frames[-1])
        values = "; the plan builds the model on the meta device, where tensors have no values"
        fail(
            f"task {job.task}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            f"{values if 'meta' in str(error) else ''}"
        )
