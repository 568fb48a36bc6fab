"""A target becomes files: pure, nothing is written and nothing but templates is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from launcher import __version__
from launcher.render import quote, shipped
from launcher.render.environment import RenderError, render_template
from launcher.render.pod import (
    Packed,
    added_at_creation,
    in_on_pod,
    in_request,
    on_pod_values,
    pod_run_dir,
    pod_workdir,
    request_values,
)
from launcher.render.values import Target, array_values, batch_values, cpus_note, start_values
from launcher.spec.cluster import Cluster

__all__ = [
    "RenderError",
    "RenderedFile",
    "Target",
    "added_at_creation",
    "notes",
    "pod_run_dir",
    "pod_workdir",
    "render_array",
    "render_image",
    "render_run",
]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RenderedFile:
    """`path` is relative to the run's `scripts/`."""

    path: str
    text: str
    mode: int
    inside: tuple[Packed, ...] = ()
    "What travels in it, in base64."

    @property
    def shown(self) -> str:
        """For a person: of what travels in it, what it is and its size."""
        text = self.text
        for packed in self.inside:
            text = text.replace(packed.base64, f"<left out here: {packed}>")
        return text


def _for_users(function: Callable[P, T]) -> Callable[P, T]:
    """A value that a file cannot carry is the user's matter: one kind of error."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except quote.QuoteError as error:
            raise RenderError(str(error)) from error

    return wrapped


@_for_users
def render_run(target: Target) -> tuple[RenderedFile, ...]:
    """Every file that starts this run.

    start.sh always; job.sbatch, slurm-lib.sh, check-node.sh and on-node.sh for slurm; on-pod.sh and
    create-pod.json (one node) or create-cluster.json for runpod. Raises RenderError.
    """
    _check_runtime(target)
    _check_own_templates(target)
    start = RenderedFile("start.sh", _render(target, _start_template(target), start_values(target)), 0o755)
    if target.cluster.scheduler == "slurm":
        return (start, *_slurm(target))
    if target.cluster.scheduler == "runpod":
        return (start, *_runpod(target, start.text))
    return (start,)


def _start_template(target: Target) -> str:
    if target.nodes > 1:
        return "torchrun/per-node.sh.j2"
    return "torchrun/start.sh.j2" if target.ranks_per_node > 1 else "torchrun/one-rank.sh.j2"


def _slurm(target: Target) -> tuple[RenderedFile, ...]:
    values = batch_values(target)
    return (
        RenderedFile("job.sbatch", _render(target, "slurm/job.sbatch.j2", values), 0o755),
        RenderedFile("slurm-lib.sh", _render(target, "slurm/slurm-lib.sh.j2", values), 0o644),
        RenderedFile("check-node.sh", _render(target, "slurm/check-node.sh.j2", values), 0o755),
        RenderedFile("on-node.sh", _render(target, "slurm/on-node.sh.j2", values), 0o755),
    )


@_for_users
def render_array(
    target: Target, sweep_id: str, folder: str, tasks: int, at_once: int | None = None
) -> RenderedFile:
    """The batch script of `tasks` runs that ask for what `target` asks for. Raises RenderError."""
    values = array_values(target, sweep_id, folder, tasks, at_once)
    return RenderedFile("array.sbatch", _render(target, "slurm/array.sbatch.j2", values), 0o755)


def _runpod(target: Target, start_sh: str) -> tuple[RenderedFile, ...]:
    values = on_pod_values(target, start_sh)
    on_pod = _render(target, "runpod/on-pod.sh.j2", values)
    name = "create-cluster.json" if target.nodes > 1 else "create-pod.json"
    request = _render(target, f"runpod/{name}.j2", request_values(target, on_pod))
    try:
        body = json.loads(request)
    except json.JSONDecodeError as error:
        raise RenderError(f"templates/runpod/{name}.j2 does not make valid JSON: {error}") from error
    return (
        RenderedFile("on-pod.sh", on_pod, 0o755, in_on_pod(values)),
        RenderedFile(name, json.dumps(body, indent=2) + "\n", 0o644, in_request(on_pod)),
    )


def _render(target: Target, template: str, values: Any) -> str:
    # Field by field: dataclasses.asdict would turn nested values into dicts and copy them.
    context = {item.name: getattr(values, item.name) for item in fields(values)}
    return render_template(template, context, target.project_dir)


def _check_runtime(target: Target) -> None:
    runtime, scheduler = target.cluster.container.runtime, target.cluster.scheduler
    if scheduler in ("local", "ssh") and runtime != "none":
        raise RenderError(
            f"container.runtime {runtime}: scheduler {scheduler} starts no container, but the interpreter "
            "paths.python of the profile; write `none`, or leave `container:` out"
        )
    if scheduler == "runpod" and runtime not in ("runpod", "none"):
        raise RenderError(f"container.runtime {runtime}: a pod is a container itself; write runpod")
    if scheduler == "local" and target.nodes > 1:
        raise RenderError("scheduler local starts one node; the job asks for more")


def _check_own_templates(target: Target) -> None:
    """Refuse copies of templates that nothing reads any more: their changes would be lost without a word."""
    own = shipped.project_templates(target.project_dir) if target.project_dir is not None else None
    if own is None or target.cluster.scheduler != "slurm":
        return
    for name in sorted(shipped.IN_LIBRARY):
        if (own / name).is_file():
            raise RenderError(
                f"{own / name} is read no more: its functions are in {shipped.LIBRARY} now. Eject that, take "
                "your changes over into the copy, and delete the file"
            )


@_for_users
def render_image(cluster: Cluster, project_dir: Path | None = None) -> tuple[RenderedFile, ...]:
    """Dockerfile and image.def on top of `container.base`. Raises RenderError when it is missing."""
    base = cluster.container.base
    if base is None:
        raise RenderError(f"cluster {cluster.name}: `container.base`, the image to build on, is missing")
    shm = cluster.container.shm
    values = {
        "version": __version__,
        "cluster_name": cluster.name,
        "base": quote.image(base),
        "shm_gib": None if shm is None else -(-shm // 2**30),
    }
    return tuple(
        RenderedFile(name, render_template(f"{kind}/{name}.j2", values, project_dir), 0o644)
        for kind, name in (("docker", "Dockerfile"), ("apptainer", "image.def"))
    )


CHANGE_ME = "CHANGE-ME"
"What shipped profiles have in the place of a network volume's id."
NO_VOLUME_YET = (
    f"runpod.volume_id is still {CHANGE_ME}: put your network volume's id into the profile. RunPod's console "
    "lists the volumes under Storage, its API under GET /v2/network-volumes"
)


def notes(target: Target) -> tuple[str, ...]:
    """What a person should know before anything is sent."""
    found = []
    runpod = target.cluster.runpod
    if runpod is not None:
        if runpod.volume_id == CHANGE_ME:
            found.append(NO_VOLUME_YET)
        if runpod.volume_id is None:
            found.append(
                "runpod.volume_id is not set: the run directory lies on the pod's disk and is lost with it"
            )
        if target.code is None and target.workdir != target.run_dir:
            found.append(f"workdir is absolute: the job's code must be on the pod, in {target.workdir}")
        found += [
            f"secret {secret.name} is added to the request when it is sent; it is in no file"
            for secret in added_at_creation(target)
        ]
        if target.nodes > 1 and target.cluster.network.interface is None:
            found.append("network.interface is not set: only ens1 and its siblings connect RunPod's pods")
        found.append(f"the pod ends itself after {runpod.max_hours:g} h at the latest")
    if (cpus := cpus_note(target)) is not None:
        found.append(cpus)
    own = shipped.project_templates(target.project_dir) if target.project_dir is not None else None
    if own is not None:
        names = [name for name in shipped.template_names() if (own / name).is_file()]
        found += [f"{own / name} wins over the shipped template" for name in names]
    return tuple(found)
