"""What all schedulers prepare in the same way: run.json and the values of the scripts."""

from __future__ import annotations

import platform
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import __version__
from launcher.images.names import PREFIX
from launcher.rundir.time import now
from launcher.rundir.versions import version_of
from launcher.schedulers import git
from launcher.schedulers.base import Prepared, Request, Scheduler
from launcher.schedulers.store import Place

if TYPE_CHECKING:
    from launcher.render.values import Target

FRESH_SECONDS = 1.0
"A sweep prepares a thousand runs of the same code: those of a second share what git said."
_looks: dict[Path, Code] = {}
_looking = threading.Lock()


def new_run_id(name: str) -> str:
    """A run id such as `gpt-demo-20261121-085401-3fa2`: readable, sorted by time, unique without a server."""
    slug = re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-_")[:40] or "run"
    return f"{slug}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def ready(
    scheduler: Scheduler, request: Request, place: Place, python: str, command: Sequence[str]
) -> Prepared:
    """A run that starts without values of its scheduler's own. Raises RenderError, SpecError, ImageError."""
    look_at_code(request.workdir)
    where = target(request, place.run_dir, place.workdir, python, {})
    return Prepared(
        request=request,
        run_dir=place.run_dir,
        files=scheduler.scripts(where),
        target=where,
        command=tuple(command),
        about={**about(request), "workdir": place.workdir},
        warnings=(*request.plan.warnings, *scheduler.notes(where), *place.notes),
    )


def about(request: Request) -> dict[str, Any]:
    """The content of run.json: what was requested, and the versions in use. Raises SpecError, ImageError."""
    request = _with_digest(request)
    return {
        "id": request.run_id,
        "created": now(),
        "job": request.job.model_dump(mode="json", by_alias=True),
        "job_file": str(request.job_file.resolve()),
        "workdir": str(request.workdir),
        "project_dir": str(request.project_dir),
        "cluster": request.cluster.model_dump(mode="json", by_alias=True),
        "nodes": request.plan.layout.nodes,
        "gpus_per_node": request.plan.layout.gpus_per_node,
        "ranks_per_node": request.plan.layout.ranks_per_node,
        "versions": _versions(),
        "code": look_at_code(request.workdir).state(),
    }


def target(request: Request, run_dir: str, workdir: str, python: str, carried: dict[str, str]) -> Target:
    """The values that every template uses. Raises SpecError, ImageError."""
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
    """Replace `catalog:NAME` by the image that it means now, so that a resumed run keeps it."""
    job, cluster = request.job, request.cluster
    if not any(
        image is not None and image.startswith(PREFIX) for image in (job.image, cluster.container.image)
    ):
        return request
    from launcher.images.publish import by_digest

    runtime, folder = cluster.container.runtime, request.project_dir
    if job.image is not None:
        named = by_digest(job.image, runtime, folder)
        return replace(request, job=job.model_copy(update={"image": named}))
    named = by_digest(cluster.container.image, runtime, folder)
    container = cluster.container.model_copy(update={"image": named})
    return replace(request, cluster=cluster.model_copy(update={"container": container}))


def _versions() -> dict[str, str]:
    versions = {"launcher": __version__, "python": platform.python_version()}
    found = {package: version_of(package) for package in ("torch", "bitsandbytes", "numpy")}
    return versions | {package: version for package, version in found.items() if version is not None}


class Code:
    """What git says of a working directory. Git is asked at once, and `state` waits for its answers. Several
    threads may share one."""

    def __init__(self, workdir: Path) -> None:
        self.asked = time.monotonic()
        self._lock = threading.Lock()
        self._git = _ask_git(workdir)
        self._state: dict[str, Any] | None = None

    def state(self) -> dict[str, Any] | None:
        """Return the commit, and the files with uncommitted changes; None if there is no repository."""
        with self._lock:
            asked, self._git = self._git, ()
            if asked:
                self._state = _answers_of(asked)
            return self._state


def look_at_code(workdir: Path) -> Code:
    """Ask git about the working directory, unless it was asked within FRESH_SECONDS."""
    with _looking:
        code = _looks.get(workdir)
        if code is None or time.monotonic() - code.asked > FRESH_SECONDS:
            code = _looks[workdir] = Code(workdir)
        return code


def _ask_git(workdir: Path) -> tuple[subprocess.Popen[str], ...]:
    asked = (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "--", "."))
    try:
        return tuple(
            subprocess.Popen(
                ["git", "-C", str(workdir), *arguments], env=git.environment(),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for arguments in asked
        )  # fmt: skip
    except OSError:
        return ()


def _answers_of(both: tuple[subprocess.Popen[str], ...]) -> dict[str, Any] | None:
    said = []
    for one in both:
        try:
            said.append(one.communicate(timeout=10)[0])
        except subprocess.TimeoutExpired:
            one.kill()
            one.communicate()
    if len(said) < 2 or any(one.returncode for one in both):
        return None
    return {"commit": said[0].strip(), "changed_files": [line[3:] for line in said[1].splitlines()]}
