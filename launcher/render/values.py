"""The typed, frozen values that each template sees. A template knows nothing else."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher import __version__
from launcher.render import quote
from launcher.render.container import container
from launcher.render.environment import RenderError
from launcher.spec.cluster import Cluster, Slurm
from launcher.spec.job import Job
from launcher.spec.recipe import Recipe
from launcher.spec.text import no_nul
from launcher.spec.variables import TRAVELS_AS

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PodCode:
    """A snapshot of the job's code, for a pod."""

    digest: str
    inline: bytes | None
    "The archive (tar.gz) where it travels in the start script; None: it is on the volume."


@dataclass(frozen=True)
class Target:
    """One run, complete enough to write its scripts. Paths are text, valid where the processes run."""

    job: Job
    cluster: Cluster
    run_id: str
    run_dir: str
    "Absolute; on a pod a folder of the volume."
    workdir: str
    "Absolute."
    python: str
    "Interpreter there that has launcher and torch."
    nodes: int
    ranks_per_node: int
    recipe: Recipe | None = None
    "Of attempt 0."
    project_dir: Path | None = None
    "`templates/` in it win over the shipped ones."
    carried: Mapping[str, str] = field(default_factory=dict)
    "RunPod: what the run directory holds at start, path below it -> text (run.json ...)."
    code: PodCode | None = None
    "RunPod: what is unpacked into `workdir`."

    def __post_init__(self) -> None:
        for what in ("run_dir", "workdir"):
            path = getattr(self, what)
            if not posixpath.isabs(path):
                raise RenderError(f"{what} {path!r} is not an absolute path")
        for what in ("run_id", "run_dir", "workdir", "python"):
            try:
                no_nul(getattr(self, what))
            except ValueError as error:
                raise RenderError(f"{what} {getattr(self, what)!r} {error}") from None

    @property
    def gpus_per_node(self) -> int:
        wanted = self.job.resources.gpus_per_node
        return self.cluster.gpus_per_node if wanted is None else wanted

    @property
    def image(self) -> str | None:
        return self.job.image or self.cluster.container.image


@dataclass(frozen=True)
class SecretValues:
    name: str
    source: str
    "Variable it is copied from."
    file: str | None
    home_file: str | None
    "The part after `~/` of a file in the home directory."
    runpod: bool


@dataclass(frozen=True)
class StartValues:
    """torchrun/one-rank.sh.j2, torchrun/start.sh.j2 and torchrun/per-node.sh.j2."""

    version: str
    job_name: str
    run_id: str
    run_dir: str
    workdir: str
    python: str
    nodes: int
    ranks: int
    gpus: int
    shm_mib: int
    cluster_name: str
    cluster_env: Pairs
    interface: str | None
    network_env: Pairs
    setup: tuple[quote.Written, ...]
    uses_modules: bool
    "A line of `setup` calls `module` or `ml`."
    numa_binding: str | None
    cpu_bind: tuple[str, ...]
    job_env: Pairs
    alloc_conf: str | None
    secrets: tuple[SecretValues, ...]
    argv: tuple[str, ...]


def start_values(target: Target) -> StartValues:
    job, cluster = target.job, target.cluster
    argv = job.command if job.command is not None else (target.python, "-m", "launcher.train")
    _check_lengths(argv, job.env, doubled=target.ranks_per_node * target.nodes > 1)
    expandable = target.recipe is None or target.recipe.expandable_segments
    chosen = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & job.env.keys()
    return StartValues(
        version=__version__,
        job_name=job.name,
        run_id=target.run_id,
        run_dir=target.run_dir,
        workdir=target.workdir,
        python=target.python,
        nodes=target.nodes,
        ranks=target.ranks_per_node,
        gpus=target.gpus_per_node,
        shm_mib=(cluster.container.shm or 0) // 2**20,
        cluster_name=cluster.name,
        cluster_env=tuple(cluster.env.items()),
        # On one host nothing leaves it, and an interface that is not there (ens1 on a single pod) stops NCCL.
        interface=cluster.network.interface if target.nodes > 1 else None,
        network_env=tuple(cluster.network.env.items()),
        setup=setup_lines(cluster),
        uses_modules=uses_modules(cluster),
        numa_binding=cluster.node.numa_binding if target.gpus_per_node else None,
        cpu_bind=_cpu_bind(target),
        job_env=tuple(job.env.items()),
        alloc_conf="expandable_segments:True" if expandable and not chosen and target.gpus_per_node else None,
        secrets=tuple(_secret(target, index) for index in range(len(job.secrets))),
        argv=argv,
    )


def setup_lines(cluster: Cluster) -> tuple[quote.Written, ...]:
    """The profile author's own shell text: the one thing that is written as it is."""
    return tuple(quote.Written(line) for line in cluster.setup)


LONGEST_BYTES = 128 * 1024 - 1
"One argument or variable of a process under Linux (MAX_ARG_STRLEN)."


def _check_lengths(argv: tuple[str, ...], env: Mapping[str, str], *, doubled: bool) -> None:
    """Raise RenderError for what no process can be given. torchrun gets every `$` of an argument doubled."""
    sizes = {f"command: argument {number}": one for number, one in enumerate(argv)}
    if doubled:
        sizes = {what: one.replace("$", "$$") for what, one in sizes.items()}
    sizes |= {f"env.{name}": f"{TRAVELS_AS}{name}={value}" for name, value in env.items()}
    for what, one in sizes.items():
        if (size := len(one.encode(errors="surrogateescape"))) > LONGEST_BYTES:
            raise RenderError(
                f"{what} has {size / 1024:.0f} KiB, and Linux gives a process at most 128 KiB in one argument"
                " or variable: write it into a file and name that"
            )


def _cpu_bind(target: Target) -> tuple[str, ...]:
    """Raises RenderError."""
    lists = target.cluster.node.cpu_bind
    if lists and len(lists) < target.ranks_per_node:
        raise RenderError(
            f"node.cpu_bind: the profile has CPUs for {len(lists)} ranks of a node, the job starts"
            f" {target.ranks_per_node}"
        )
    return lists[: target.ranks_per_node]


def uses_modules(cluster: Cluster) -> bool:
    return any(re.search(r"(^|[\s;&|(])(module|ml)\s", line) for line in cluster.setup)


def _secret(target: Target, index: int) -> SecretValues:
    secret = target.job.secrets[index]
    file = secret.file
    home = file[2:] if file is not None and file.startswith("~/") else None
    # On a pod every secret is a variable of the pod already.
    on_pod = target.cluster.scheduler == "runpod"
    return SecretValues(
        name=secret.name,
        source=secret.name if on_pod else secret.env or secret.name,
        file=None if on_pod or home is not None else file,
        home_file=None if on_pod else home,
        runpod=on_pod,
    )


@dataclass(frozen=True)
class BatchValues:
    """slurm/job.sbatch.j2 and slurm/on-node.sh.j2."""

    version: str
    job_name: str
    run_id: str
    run_dir: str
    python: str
    nodes: int
    output: str
    step_output: str
    "The restart count and the node follow."
    options: Pairs
    "Further #SBATCH options with a value."
    flags: tuple[str, ...]
    "Further #SBATCH options without one."
    requeue: bool
    handle_prefix: str
    "The id of the job follows."
    signal_seconds: int
    retries_same: int
    retries_preemptions: int
    retries_time_limits: int
    check_seconds: int
    exclude: str
    "Nodes that the profile itself excludes; sbatch takes one such option."
    gpus: int
    shm_mib: int
    needed_paths: tuple[str, ...]
    "Of the host: what the container is made of and binds."
    check_python: bool
    setup: tuple[quote.Written, ...]
    uses_modules: bool
    secrets: tuple[SecretValues, ...]
    "What is hidden in the output of `setup`."
    step_options: tuple[str, ...]
    "Further srun options (pyxis)."
    with_comment: bool
    prefix: tuple[str, ...]
    "What the payload is started through (apptainer exec ...)."
    contained: bool
    exported: tuple[str, ...]
    "Names that Apptainer must be told apart."


# What job.sbatch sets itself, or what would break the step.
_MANAGED = frozenset(
    {
        "job-name",
        "comment",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "output",
        "error",
        "open-mode",
        "signal",
        "requeue",
    }
    | {"no-requeue", "export", "array", "time", "cpus-per-task", "gpus", "gres", "gpus-per-node"}
    | {"gpus-per-task", "partition", "account", "qos", "constraint", "reservation", "exclusive", "wrap"}
)
# With these sbatch submits nothing, waits, answers in other words, asks another cluster or as another user,
# or the step has other tasks or nodes than the supervisors expect.
_UNFIT = frozenset(
    {"test-only", "wait", "parsable", "quiet", "verbose", "help", "usage", "version", "uid", "gid", "input"}
    | {"cluster-constraint", "export-file", "get-user-env", "no-kill", "ntasks-per-gpu"}
)

CHECK_SECONDS = 300
"For all nodes to answer the check before the start; a first import from a cold file system is slow."

_MEMORY = frozenset({"mem", "mem-per-cpu", "mem-per-gpu"})


def batch_values(target: Target) -> BatchValues:
    options, flags = _sbatch_options(target)
    slurm = target.cluster.slurm or Slurm()
    inside = container(target)
    return BatchValues(
        version=__version__,
        job_name=target.job.name,
        run_id=target.run_id,
        run_dir=target.run_dir,
        python=target.python,
        nodes=target.nodes,
        output=quote.slurm_file(target.run_dir) + "/slurm-%j.out",
        step_output=quote.slurm_file(target.run_dir) + "/slurm-%j-",
        options=options,
        flags=flags,
        requeue=target.job.requeue,
        handle_prefix=f"slurm:{target.cluster.name}:",
        signal_seconds=target.job.stop_seconds(slurm.signal_seconds),
        retries_same=target.job.retries.same,
        retries_preemptions=target.job.retries.preemptions,
        retries_time_limits=target.job.retries.time_limits,
        check_seconds=CHECK_SECONDS,
        exclude=str(slurm.extra.get("exclude", "")),
        gpus=target.gpus_per_node if slurm.gpu_request != "none" else 0,
        shm_mib=(target.cluster.container.shm or 0) // 2**20,
        needed_paths=(*filter(None, [inside.image_file]), *(path for path, _ in inside.mounts)),
        check_python=target.cluster.container.runtime == "none",
        setup=setup_lines(target.cluster),
        uses_modules=uses_modules(target.cluster),
        secrets=tuple(_secret(target, index) for index in range(len(target.job.secrets))),
        step_options=(*_srun_options(slurm), *inside.step_options),
        with_comment=slurm.comment,
        prefix=inside.prefix,
        contained=target.cluster.container.runtime != "none",
        exported=inside.exported,
    )


@dataclass(frozen=True)
class ArrayValues:
    """slurm/array.sbatch.j2."""

    version: str
    job_name: str
    run_id: str
    run_dir: str
    array: str
    nodes: int
    output: str
    options: Pairs
    flags: tuple[str, ...]
    with_comment: bool
    requeue: bool


def array_values(target: Target, sweep_id: str, folder: str, tasks: int, at_once: int | None) -> ArrayValues:
    """Of `tasks` runs that ask for what `target` asks for; `folder` holds a link to each. Slurm runs no more
    than `at_once` of them at the same time."""
    options, flags = _sbatch_options(target)
    return ArrayValues(
        version=__version__,
        job_name=target.job.name,
        run_id=sweep_id,
        run_dir=folder,
        array=f"0-{tasks - 1}" + (f"%{at_once}" if at_once is not None else ""),
        nodes=target.nodes,
        output=quote.slurm_file(folder) + "/%a/slurm-%j.out",
        options=options,
        flags=flags,
        with_comment=target.cluster.slurm is None or target.cluster.slurm.comment,
        requeue=target.job.requeue,
    )


def cpus_per_node(job: Job, cluster: Cluster, gpus: int, ranks: int) -> int | None:
    """CPUs of each node that the job asks Slurm for; None where it takes what the site gives."""
    node, slurm = cluster.node, cluster.slurm or Slurm()
    if job.resources.cpus_per_node is not None:
        return job.resources.cpus_per_node
    if node.cpus is not None:  # a fair share: the GPUs asked for of all that the node has
        return node.cpus * gpus // node.gpu.count if node.gpu and node.gpu.count and gpus else node.cpus
    if ranks == 1 or slurm.exclusive or "cpus-per-gpu" in slurm.extra:
        return None
    return ranks  # Slurm gives one task one core, and all ranks of the node would share it


def cpus_note(target: Target) -> str | None:
    """What a Slurm job gets where the profile does not tell how many CPUs a node has."""
    slurm, ranks = target.cluster.slurm, target.ranks_per_node
    if slurm is None or slurm.exclusive or target.cluster.node.cpus or "cpus-per-gpu" in slurm.extra:
        return None
    if target.job.resources.cpus_per_node is not None:
        return None
    given = "what the site gives, mostly one core" if ranks == 1 else f"{ranks} CPUs of each node, one a rank"
    return f"node.cpus is not set in the profile: the job gets {given}; set it, or resources.cpus_per_node"


def _sbatch_options(target: Target) -> tuple[Pairs, tuple[str, ...]]:
    resources, slurm = target.job.resources, target.cluster.slurm
    if slurm is None:
        raise RenderError(f"cluster {target.cluster.name} has no `slurm:` section")
    warned = target.job.stop_seconds(slurm.signal_seconds)
    options: list[tuple[str, str]] = []
    flags: list[str] = []
    gres = list(slurm.gres)
    for name in ("clusters", "partition", "account", "qos", "constraint", "reservation"):
        value = getattr(slurm, name)
        if value is not None:
            options.append((name, value))
    gpus = target.gpus_per_node
    if gpus and slurm.gpu_request != "none":
        asked = f"{slurm.gres_type}:{gpus}" if slurm.gres_type else str(gpus)
        if slurm.gpu_request == "gres":
            gres.insert(0, f"gpu:{asked}")
        else:
            options.append((slurm.gpu_request, asked))
    if gres:
        options.append(("gres", ",".join(gres)))
    if cpus := cpus_per_node(target.job, target.cluster, gpus, target.ranks_per_node):
        options.append(("cpus-per-task", str(cpus)))
    if resources.memory_per_node is not None:
        options.append(("mem", f"{math.ceil(resources.memory_per_node / 2**20)}M"))
    elif slurm.exclusive and _MEMORY.isdisjoint(slurm.extra):
        # Many sites give DefMemPerCPU even to a job that has the node for itself; 0 is all of it.
        options.append(("mem", "0"))
    if resources.time is not None:
        if resources.time <= warned:
            name = "stop_timeout" if target.job.stop_timeout else "slurm.signal_seconds"
            raise RenderError(
                f"resources.time ({resources.time} s) is not longer than {name}"
                f" ({warned} s): the job would be asked to stop at its start"
            )
        options.append(("time", _clock(resources.time)))
    options.append(("signal", f"B:USR2@{warned}"))
    if "propagate" not in slurm.extra:
        # The limits (ulimit) of the host that submits would win over those that slurmd has for jobs.
        options.append(("propagate", "NONE"))
    if slurm.exclusive:
        flags.append("exclusive")
    for name, extra in slurm.extra.items():
        if re.fullmatch(r"[a-z][a-z0-9-]*", name) is None:
            raise RenderError(f"slurm.extra {name!r} is not the long name of an sbatch option")
        if name == "comment" and not slurm.comment:
            pass
        elif name in _MANAGED or name.startswith("container-"):
            raise RenderError(f"slurm.extra {name}: launcher sets this option itself")
        if name == "clusters":
            raise RenderError("slurm.extra clusters: write slurm.clusters, which launcher follows")
        if name in _UNFIT:
            raise RenderError(f"slurm.extra {name}: launcher could not submit or follow such a job")
        if name in _MEMORY and resources.memory_per_node is not None:
            raise RenderError(f"slurm.extra {name} and resources.memory_per_node exclude each other")
        if extra is True:
            flags.append(name)
        elif extra is not False:
            options.append((name, str(extra)))
    for name, value in options:
        if not value:
            raise RenderError(f"slurm: the value of --{name} is empty; leave it out, or write one")
    return tuple(options), tuple(flags)


# What job.sbatch sets on srun, what a step repeats in vain, and what would give it other tasks or nodes.
_MANAGED_ON_SRUN = frozenset(
    {"nodes", "nodelist", "exclude", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "multi-prog", "het-group"}
    | {"kill-on-bad-exit", "wait", "export", "unbuffered", "open-mode", "output", "error", "input", "label"}
    | {"pty", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name", "jobid", "no-kill", "partition"}
    | {"container-image", "container-mounts", "container-env", "no-container-entrypoint", "help", "version"}
    | {"test-only", "no-allocate", "relative", "preserve-env", "chdir", "container-mount-home"}
    | {"no-container-mount-home", "clusters", "overlap"}
)


def _srun_options(slurm: Slurm) -> tuple[str, ...]:
    """Raises RenderError."""
    names = [option[2:].partition("=")[0] for option in slurm.srun_options]
    for name in names:
        if name.endswith("container-mount-home"):
            raise RenderError(f"slurm.srun_options --{name}: write container.mount_home: true or false")
        if name in _MANAGED_ON_SRUN:
            raise RenderError(f"slurm.srun_options --{name}: launcher sets this of the step itself")
    # torchrun starts the ranks: where MpiDefault is pmix, a PMIx server would start for each node in vain.
    return (*(() if "mpi" in names else ("--mpi=none",)), *slurm.srun_options)


def _clock(seconds: int) -> str:
    """Slurm's `D-HH:MM:SS`."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02d}:{minute:02d}:{second:02d}"
