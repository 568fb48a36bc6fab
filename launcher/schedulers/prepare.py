"""What all schedulers prepare in the same way: run.json and the values of the scripts."""

from __future__ import annotations

import math
import os
import platform
import re
import secrets
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import __version__
from launcher.images.names import PREFIX
from launcher.rundir.time import now
from launcher.rundir.versions import version_of
from launcher.schedulers.base import Prepared, Request, Scheduler
from launcher.schedulers.git import git
from launcher.schedulers.store import Place
from launcher.spec.records import ClusterRecord, CodeRecord, JobRecord, RunRecord

if TYPE_CHECKING:
    from launcher.render.values import Target

FRESH_SECONDS = 1.0
"How long git's answer is reused. A sweep prepares a thousand runs of the same code."
_answers: dict[Path, tuple[float, dict[str, Any] | None]] = {}
"Working directory -> (monotonic time of the query, state of the code)."


def new_run_id(name: str) -> str:
    """Return a run id such as `gpt-demo-20261121-085401-3fa2`, which sorts by time."""
    slug = re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-_")[:40] or "run"
    return f"{slug}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def ready(
    scheduler: Scheduler, request: Request, place: Place, python: str, command: Sequence[str]
) -> Prepared:
    """Prepare a run whose scripts need no values from its scheduler.

    Raises RenderError, SpecError, ImageError.
    """
    where = target(request, place.run_dir, place.workdir, python, {})
    return Prepared(
        request=request,
        run_dir=place.run_dir,
        files=scheduler.scripts(where),
        target=where,
        command=tuple(command),
        about=about(request).replace(workdir=place.workdir),
        warnings=(*request.plan.warnings, *scheduler.notes(where), *place.notes),
    )


def about(request: Request) -> RunRecord:
    """Return the content of run.json: the request and the versions in use. Raises SpecError, ImageError."""
    request = _with_digest(request)
    return RunRecord(
        id=request.run_id,
        created=now(),
        job=JobRecord.of(request.job.model_dump(mode="json", by_alias=True)),
        job_file=str(request.job_file.resolve()),
        workdir=str(request.workdir),
        project_dir=str(request.project_dir),
        cluster=ClusterRecord.of_profile(request.cluster),
        nodes=request.plan.layout.nodes,
        gpus_per_node=request.plan.layout.gpus_per_node,
        ranks_per_node=request.plan.layout.ranks_per_node,
        versions=_versions(),
        code=CodeRecord.read(code_state(request.workdir)),
    )


def target(request: Request, run_dir: str, workdir: str, python: str, carried: dict[str, str]) -> Target:
    """Return the values that every template uses. Raises SpecError, ImageError."""
    from launcher.render.values import Target  # imports Jinja, which a plan does not need

    request = _with_digest(request)
    return Target(
        job=request.job,
        cluster=request.cluster,
        run_id=request.run_id,
        run_dir=run_dir,
        workdir=workdir,
        python=python,
        nodes=request.plan.layout.nodes,
        ranks_per_node=request.plan.layout.ranks_per_node,
        recipe=request.plan.recipe,
        project_dir=request.project_dir,
        carried=carried,
    )


def _with_digest(request: Request) -> Request:
    """Replace `catalog:NAME` by the image that it names now, so that a resumed run keeps this image."""
    job, cluster = request.job, request.cluster
    image = job.image if job.image is not None else cluster.container.image
    if image is None or not image.startswith(PREFIX):
        return request
    from launcher.images.publish import by_digest

    named = by_digest(image, cluster.container.runtime, request.project_dir)
    if job.image is not None:
        return replace(request, job=job.model_copy(update={"image": named}))
    container = cluster.container.model_copy(update={"image": named})
    return replace(request, cluster=cluster.model_copy(update={"container": container}))


def _versions() -> dict[str, str]:
    versions = {"launcher": __version__, "python": platform.python_version()}
    optional = {package: version_of(package) for package in ("torch", "bitsandbytes", "numpy")}
    return versions | {package: version for package, version in optional.items() if version is not None}


def code_state(workdir: Path) -> dict[str, Any] | None:
    """Return the commit and the files with uncommitted changes, or None if git finds no repository.

    An answer is reused within FRESH_SECONDS.
    """
    asked_at, state = _answers.get(workdir, (-math.inf, None))
    if time.monotonic() - asked_at > FRESH_SECONDS:
        state = _ask_git(workdir)
        _answers[workdir] = time.monotonic(), state
    return state


def _ask_git(workdir: Path) -> dict[str, Any] | None:
    outputs = []
    for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", ".")):
        try:
            done = git(workdir, *arguments, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
        outputs.append(os.fsdecode(done.stdout))
    return {"commit": outputs[0].strip(), "changed_files": [line[3:] for line in outputs[1].splitlines()]}
