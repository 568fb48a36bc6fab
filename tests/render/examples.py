"""The fixed jobs that the golden files are rendered from."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from launcher.planning.plan import make_plan
from launcher.render import shipped
from launcher.render.render import RenderedFile, render_image
from launcher.render.values import Target
from launcher.schedulers import prepare
from launcher.schedulers.base import Request
from launcher.schedulers.registry import of_cluster
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job
from launcher.spec.load import load_cluster
from tests.render.run import render_run

GOLDEN = Path(__file__).parent.parent / "golden"
CODE = Path(__file__).parent / "code"
"What a pod gets as the job's code."

TASK = Job.model_validate(
    {
        "name": "tiny-gpt",
        "task": "examples.gpt:TinyGPT",
        "args": {"layers": 2},
        "batch": {"global": 64},
        "steps": 200,
        "resources": {"time": "24h", "memory_per_node": "64GiB"},
        "secrets": ["HF_TOKEN", {"name": "WANDB_API_KEY", "file": "~/.wandb/my key"}],
    }
)
# Values that a careless script would cut, expand or run.
COMMAND = Job.model_validate(
    {
        "name": 'it\'s 50% off; $(touch /tmp/pwned) #1 "quoted" hetjob é',
        "command": [
            "python",
            "train it.py",
            "--batch={micro_batch_size}",
            "--note=`id`; rm -rf \"$HOME\" 'x' \\ *",
            '{"lr": 1e-4, "cost": "$$5, ${local_rank}"}',
            "two\nlines",
            "",
            "%j,#1,!x",
        ],
        "batch": {"global": 64},
        "env": {"GREETING": 'it\'s $HOME,\nthen `id` & "more" #1', "EMPTY": "", "OMP_NUM_THREADS": 4},
        "resources": {"time": "90m"},
        "secrets": [{"name": "HF_TOKEN", "env": "MY_HF_TOKEN"}, {"name": "WANDB_API_KEY", "runpod": "wandb"}],
        "requeue": False,
    }
)
JOBS = {"task": TASK, "command": COMMAND}


@cache
def clusters() -> dict[str, Cluster]:
    return {file.stem: load_cluster(file) for file in sorted(shipped.clusters_dir().glob("*.yaml"))}


def target(cluster: Cluster, kind: str) -> Target:
    """As `launcher render` makes it: the task job on one node, the command job on two where there are two."""
    nodes = 2 if kind == "command" and cluster.max_nodes > 1 else 1
    resources = JOBS[kind].resources.model_copy(update={"nodes": nodes})
    job = JOBS[kind].model_copy(update={"resources": resources})
    request = Request(
        job=job,
        job_file=CODE / "job.yaml"
        if cluster.scheduler == "runpod"
        else Path("/shared/code of user/job.yaml"),
        cluster=cluster,
        plan=make_plan(job, cluster),
        run_id=f"{kind}-20261121-085401",
        runs_root=Path(cluster.paths.runs or "/shared/my runs"),
        project_dir=GOLDEN,
    )
    if cluster.scheduler in ("local", "ssh"):  # they look for the folder, which is not here
        made = prepare.target(request, f"{request.runs_root}/{request.run_id}", str(request.workdir), "", {})
        made = replace(made, python="/opt/venv/bin/python")
    else:
        made = of_cluster(cluster).prepare(request).target
    # The run's own record carries the time and the versions of this machine.
    return replace(
        made, project_dir=None, carried={path: json.dumps({"id": "fixed"}) for path in made.carried}
    )


def rendered(name: str) -> dict[str, RenderedFile]:
    """Every file of a shipped profile, by its path below `tests/golden/`."""
    cluster = clusters()[name]
    files = {
        f"{name}/{kind}/{file.path}": file for kind in JOBS for file in render_run(target(cluster, kind))
    }
    if cluster.container.base is not None:
        files |= {f"{name}/{file.path}": file for file in render_image(cluster)}
    return files
