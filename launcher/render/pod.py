"""RunPod: what the create request and the script on the pod are made of."""

from __future__ import annotations

import base64
import posixpath
from dataclasses import dataclass

from launcher import __version__
from launcher.render import quote
from launcher.render.environment import RenderError
from launcher.render.values import Target, setup_lines
from launcher.spec.cluster import Cluster, RunPod
from launcher.spec.job import Job, Secret

MAX_VARIABLES = 50
"RunPod's limit per pod."
# Linux carries at most 128 KiB in one argument (MAX_ARG_STRLEN), and `args` becomes one argument of bash.
MAX_ARGS = 120_000


@dataclass(frozen=True)
class Carried:
    """A file that travels inside the script."""

    path: str
    content: quote.Written
    "base64"
    mode: str
    replace: bool
    "Scripts are written anew; what the run itself goes on writing is kept."


@dataclass(frozen=True)
class OnPodValues:
    """runpod/on-pod.sh.j2."""

    version: str
    job_name: str
    run_id: str
    run_dir: str
    python: str
    nodes: int
    max_seconds: int
    cluster_name: str
    setup: tuple[quote.Written, ...]
    files: tuple[Carried, ...]
    code: str | None
    "The folder that must be there before the run starts; None when the job brings no code of its own."


@dataclass(frozen=True)
class RequestValues:
    """runpod/create-pod.json.j2 and runpod/create-cluster.json.j2."""

    name: str
    image: str
    cloud: str
    gpu_id: str
    gpu_count: int
    cuda_versions: tuple[str, ...]
    nodes: int
    disk_gb: int
    volume_id: str | None
    volume_path: str
    data_centers: tuple[str, ...]
    registry_id: str | None
    ports: tuple[str, ...]
    env: dict[str, str]
    args: str


def pod_run_dir(cluster: Cluster, run_id: str) -> str:
    """Where a run lies on the pod's volume."""
    return posixpath.join(cluster.paths.runs or posixpath.join(_section(cluster).volume_path, "runs"), run_id)


def pod_workdir(cluster: Cluster, job: Job, run_dir: str, local: str) -> str:
    """Where the job's code lies on the pod; nothing copies it there, the user does.

    An absolute `workdir:` as it is, else the folder below `volume_path` with the name of `local`, the local
    working directory. A task of launcher's own package needs no code: its run directory.
    """
    if job.task is not None and job.task.startswith("launcher."):
        return run_dir
    if posixpath.isabs(job.workdir):
        return job.workdir
    return posixpath.join(_section(cluster).volume_path, posixpath.basename(local))


def code_note(target: Target) -> str | None:
    """What the user must do so that the job's code is on the pod."""
    runpod = _section(target.cluster)
    if target.workdir == target.run_dir:
        return None
    if runpod.volume_id is not None and target.workdir.startswith(runpod.volume_path.rstrip("/") + "/"):
        return f"put the job's code on the network volume: the pod looks for it in {target.workdir}"
    return f"the job's code must be in the image: the pod looks for it in {target.workdir}"


def added_at_creation(target: Target) -> tuple[Secret, ...]:
    """Secrets whose values the sender puts into the request's `env`: they are in no file."""
    if target.cluster.scheduler != "runpod":
        return ()
    return tuple(secret for secret in target.job.secrets if secret.runpod is None)


def on_pod_values(target: Target, start_sh: str) -> OnPodValues:
    """`start_sh` is the text of the rendered start.sh, which the pod script carries."""
    files = [
        Carried(path, _base64(text), "644", replace=False) for path, text in sorted(target.carried.items())
    ]
    for file in files:
        normal = posixpath.normpath(file.path)
        if posixpath.isabs(normal) or normal.startswith("..") or normal != file.path:
            raise RenderError(f"carried file {file.path!r} is not a plain path below the run directory")
    files.append(Carried("scripts/start.sh", _base64(start_sh), "755", replace=True))
    return OnPodValues(
        version=__version__,
        job_name=target.job.name,
        run_id=target.run_id,
        run_dir=target.run_dir,
        python=target.python,
        nodes=target.nodes,
        max_seconds=_section(target.cluster).max_hours * 3600,
        cluster_name=target.cluster.name,
        setup=setup_lines(target.cluster),
        files=tuple(files),
        code=target.workdir if target.workdir != target.run_dir else None,
    )


def request_values(target: Target, on_pod_sh: str) -> RequestValues:
    """`on_pod_sh` is the text of the rendered on-pod.sh, which `args` carries."""
    runpod = _section(target.cluster)
    if target.image is None:
        raise RenderError("RunPod needs an image: `image:` in the job or `container.image` in the cluster")
    env = {"LAUNCHER_RUN_ID": target.run_id}
    for secret in target.job.secrets:
        if secret.runpod is not None:
            quote.name(secret.runpod)
            env[secret.name] = f"{{{{ RUNPOD_SECRET_{secret.runpod} }}}}"
    count = len(env) + len(added_at_creation(target))
    if count > MAX_VARIABLES:
        raise RenderError(f"{count} variables (secrets and one of launcher's); a pod takes {MAX_VARIABLES}")
    if target.nodes > 1 and runpod.registry_id is not None:
        raise RenderError("runpod.registry_id: several nodes cannot use a private registry (RunPod's API)")
    if target.nodes > 1 and runpod.volume_id is None:
        raise RenderError("several nodes need runpod.volume_id: they meet in the run directory on it")
    if target.gpus_per_node < 1:
        raise RenderError("RunPod: resources.gpus_per_node must be 1 or more")
    return RequestValues(
        name=target.job.name,
        image=quote.image(target.image),
        cloud=runpod.cloud,
        gpu_id=runpod.gpu_id,
        gpu_count=target.gpus_per_node,
        cuda_versions=runpod.cuda_versions,
        nodes=target.nodes,
        disk_gb=runpod.disk_gb,
        volume_id=runpod.volume_id,
        volume_path=runpod.volume_path,
        data_centers=runpod.data_centers,
        registry_id=runpod.registry_id,
        ports=runpod.ports,
        env=env,
        args=_args(on_pod_sh),
    )


def _args(script: str) -> str:
    """One string for the image's command line.

    How RunPod splits it is not documented, so it holds base64, blanks and one fixed pair of quotes. The
    script goes through a file: were it bash's standard input, the processes it starts could read from it.
    """
    path = "/tmp/launcher-on-pod.sh"
    args = f"bash -c 'echo {_base64(script)} | base64 -d > {path} && exec bash {path}'"
    if len(args) > MAX_ARGS:
        raise RenderError(f"the start script takes {len(args)} characters of base64; at most {MAX_ARGS} fit")
    return args


def _base64(text: str) -> quote.Written:
    return quote.Written(base64.b64encode(text.encode()).decode())


def _section(cluster: Cluster) -> RunPod:
    if cluster.runpod is None:
        raise RenderError(f"cluster {cluster.name} has no `runpod:` section")
    return cluster.runpod
