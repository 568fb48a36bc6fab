"""Render the create request and the script on the pod."""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher import __version__
from launcher.render import quote, render
from launcher.render.quote import RenderError
from launcher.render.render import Packed, RenderedFile, rendered, start_script
from launcher.render.values import Target, setup_lines
from launcher.rundir.secret_masking import POD_KEY
from launcher.schedulers.runpod.handle import pod_name
from launcher.schedulers.runpod.profile import RunPod
from launcher.spec import variables
from launcher.spec.cluster import MODES, Cluster
from launcher.spec.job import Job, Secret

MAX_VARIABLES = 50
"RunPod's limit per pod."
# Linux carries at most 128 KiB in one argument (MAX_ARG_STRLEN), and `args` becomes one argument of bash.
MAX_ARGS = 120_000


# A secret becomes an environment variable of the pod, which its start script and all its programs see.
_POD_NEEDS = re.compile(
    r"PATH|HOME|LD_.*|PYTHON.*|NODE_RANK|PRIMARY_ADDR|PUBLIC_KEY|CURL_.*|RUNPOD_(?!API_KEY$).*"
)


class TooLongError(RenderError):
    """The start script does not fit into the pod's arguments."""


CHANGE_ME = "CHANGE-ME"
"Placeholder for a network volume's id in shipped profiles."
NO_VOLUME_YET = (
    f"runpod.volume_id is still {CHANGE_ME}: put your network volume's id into the profile. RunPod's console "
    "lists the volumes under Storage, its API under GET /v2/network-volumes"
)


def scripts(target: Target) -> tuple[RenderedFile, ...]:
    """Render start.sh, on-pod.sh, and create-pod.json or (several nodes) create-cluster.json.

    Raises RenderError.
    """
    if (runtime := target.cluster.container.runtime) not in ("runpod", "none"):
        raise RenderError(f"container.runtime: {runtime}: a pod is itself a container; write runpod")
    start = start_script(target)
    values = on_pod_values(target, start.text)
    on_pod = rendered(target, "on-pod.sh", "runpod/on-pod.sh.j2", values)
    name = "create-cluster.json" if target.nodes > 1 else "create-pod.json"
    request = rendered(target, name, f"runpod/{name}.j2", request_values(target, on_pod.text), 0o644)
    try:
        body = json.loads(request.text)
    except json.JSONDecodeError as error:
        raise RenderError(f"templates/runpod/{name}.j2 does not make valid JSON: {error}") from error
    return (
        start,
        replace(on_pod, inside=packed_in_on_pod(values)),
        replace(
            request,
            text=json.dumps(body, indent=2) + "\n",
            inside=(Packed("on-pod.sh", _base64(on_pod.text)),),
        ),
    )


def notes(target: Target) -> tuple[str, ...]:
    """Return what the user should know before anything is rented."""
    lines, runpod = list[str](), RunPod.used_by(target.cluster)
    if runpod.volume_id == CHANGE_ME:
        lines.append(NO_VOLUME_YET)
    if runpod.volume_id is None:
        lines.append(
            "runpod.volume_id is not set: the run directory is on the pod's disk and is lost with it"
        )
    if target.code is None and target.workdir != target.run_dir:
        lines.append(f"workdir is absolute: the job's code must be on the pod, in {target.workdir}")
    lines += [
        f"secret {secret.name} is added when the request is sent; it is in no file"
        for secret in added_at_creation(target)
    ]
    if target.nodes > 1 and target.cluster.network.interface is None:
        lines.append("network.interface is not set: only ens1, ens2 and so on connect RunPod's pods")
    lines.append(f"the pod ends itself after {runpod.max_hours:g} h at the latest")
    return (*lines, *render.notes(target))


def brings_code(job: Job) -> bool:
    """Return whether the job's code must be sent.

    It is not sent for launcher's own tasks, nor for an absolute `workdir:`, which is a folder of the pod.
    """
    is_own_task = job.task is not None and job.task.startswith("launcher.")
    return not is_own_task and not posixpath.isabs(job.workdir)


def pod_workdir(cluster: Cluster, job: Job, run_dir: str, digest: str | None) -> str:
    """Return the working directory of the job's processes on the pod.

    The volume holds a folder and an archive for each snapshot of a job's code.
    """
    if digest is not None:
        return posixpath.join(RunPod.used_by(cluster).volume_path, ".launcher", "code", digest)
    return job.workdir if posixpath.isabs(job.workdir) else run_dir


def added_at_creation(target: Target) -> tuple[Secret, ...]:
    """Return the secrets that are added to the request's `env` only when it is sent. They are in no file."""
    return tuple(secret for secret in target.job.secrets if secret.runpod is None)


def on_pod_values(target: Target, start_sh: str) -> dict[str, Any]:
    """Return the values of runpod/on-pod.sh.j2. `start_sh` is the rendered start.sh, which is embedded."""
    # Files that the run itself updates are not replaced.
    files: list[dict[str, Any]] = [
        {"path": path, "content": _base64(text), "mode": "644", "replace": False}
        for path, text in sorted(target.carried.items())
    ]
    files.append({"path": "scripts/start.sh", "content": _base64(start_sh), "mode": "755", "replace": True})
    code = target.workdir if target.workdir != target.run_dir else None
    packed = target.code.inline if target.code is not None else None
    return {
        "version": __version__,
        "job_name": target.job.name,
        "run_id": target.run_id,
        "run_dir": target.run_dir,
        "run_dir_mode": f"{MODES[target.cluster.paths.access]:o}",
        "python": target.python,
        "nodes": target.nodes,
        "max_seconds": RunPod.used_by(target.cluster).max_seconds(target.job),
        # Beginning of the run's handle; the id of the pod or cluster follows.
        "handle_prefix": f"runpod:{target.cluster.name}:" + ("cluster/" if target.nodes > 1 else ""),
        "setup": setup_lines(target.cluster),
        "files": files,
        # Folder that must exist before the run starts, or None if the job has no code of its own.
        "code": code,
        # Archive that is unpacked into `code`, or None if `code` already exists.
        "archive": f"{code}.tar.gz" if target.code is not None else None,
        # The archive in base64 if it is small; otherwise it is on the volume.
        "packed": quote.Written(base64.b64encode(packed).decode()) if packed is not None else None,
        # Whether RUNPOD_API_KEY is one of the job's own secrets.
        "key_for_job": any(secret.name == POD_KEY for secret in target.job.secrets),
    }


def packed_in_on_pod(values: Mapping[str, Any]) -> tuple[Packed, ...]:
    packed = [Packed(file["path"], file["content"]) for file in values["files"] if file["content"]]
    if values["packed"] is not None:
        packed.append(Packed("the job's code as tar.gz", values["packed"]))
    return tuple(packed)


def request_values(target: Target, on_pod_sh: str) -> dict[str, Any]:
    """Return the values of runpod/create-pod.json.j2 and runpod/create-cluster.json.j2.

    `on_pod_sh` is the rendered on-pod.sh, embedded in `args`.

    Raises RenderError.
    """
    runpod = RunPod.used_by(target.cluster)
    if target.image is None:
        raise RenderError("RunPod needs an image: `image:` in the job or `container.image` in the cluster")
    gpus = target.gpus_per_node
    for secret in target.job.secrets:
        if _POD_NEEDS.fullmatch(secret.name):
            raise RenderError(f"secret {secret.name}: the pod itself needs this variable; use another name")
    env = {
        variables.RUN_ID: target.run_id,
        variables.SUBMISSION: "1",
        variables.MAX_SECONDS: str(runpod.max_seconds(target.job)),
    }
    for secret in target.job.secrets:
        if secret.runpod is not None:
            quote.name(secret.runpod)
            env[secret.name] = f"{{{{ RUNPOD_SECRET_{secret.runpod} }}}}"
    count = len(env) + 1 + len(added_at_creation(target))  # LAUNCHER_DEADLINE is known at creation
    if count > MAX_VARIABLES:
        raise RenderError(f"{count} variables (secrets and four of launcher's); a pod takes {MAX_VARIABLES}")
    if target.nodes > 1 and runpod.registry_id is not None:
        raise RenderError("runpod.registry_id: several nodes cannot use a private registry (RunPod's API)")
    if target.nodes > 1 and runpod.volume_id is None:
        raise RenderError("several nodes need runpod.volume_id: they share the run directory on it")
    if not gpus and runpod.cpu_id is None:
        raise RenderError("resources.gpus_per_node is 0: name a runpod.cpu_id and runpod.vcpu in the profile")
    if not gpus and target.nodes > 1:
        raise RenderError("RunPod's clusters consist of GPU pods: a job with several nodes needs GPUs")
    return {
        "name": pod_name(target.run_id, 1),
        "image": quote.image(target.image),
        "cloud": runpod.clouds[0],
        "gpu_id": runpod.gpu_id if gpus else None,
        "gpu_count": gpus,
        "cpu_id": runpod.cpu_id,
        "vcpu": runpod.vcpu,
        "cuda_versions": runpod.cuda_versions,
        "nodes": target.nodes,
        "disk_gb": runpod.disk_gb,
        "volume_id": runpod.volume_id,
        "volume_path": runpod.volume_path,
        "data_centers": runpod.data_centers,
        "registry_id": runpod.registry_id,
        "ports": runpod.ports,
        "env": env,
        "args": _args(on_pod_sh, target.run_id),
    }


def _args(script: str, run_id: str) -> str:
    """Return the image's command line as one string. Raises TooLongError.

    RunPod does not document how it splits the string, so it holds only base64, spaces and one pair of quotes.
    The script is written to a file, because processes that it starts could read from bash's standard input.
    """
    path = f"/tmp/launcher-{re.sub('[^A-Za-z0-9_.-]', '-', run_id)}.sh"
    args = f"bash -c 'echo {_base64(script)} | base64 -d > {path} && exec bash {path}'"
    if len(args) > MAX_ARGS:
        raise TooLongError(f"the start script takes {len(args)} characters of base64; at most {MAX_ARGS} fit")
    return args


def _base64(text: str) -> quote.Written:
    return quote.Written(base64.b64encode(text.encode()).decode())
