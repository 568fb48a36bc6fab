"""The scripts of a Slurm job, and the values that their templates use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from launcher import __version__
from launcher.render import quote, shipped
from launcher.render.container import container
from launcher.render.quote import RenderError
from launcher.render.render import RenderedFile, rendered, start_script
from launcher.render.values import Pairs, Target, secret_values, setup_lines, uses_modules
from launcher.schedulers.slurm.profile import Slurm
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job


def scripts(target: Target) -> tuple[RenderedFile, ...]:
    """Render start.sh, job.sbatch, slurm-lib.sh, check-node.sh and on-node.sh. Raises RenderError."""
    _check_own_templates(target)
    start, values = start_script(target), batch_values(target)
    return (
        start,
        rendered(target, "job.sbatch", "slurm/job.sbatch.j2", values),
        rendered(target, "slurm-lib.sh", "slurm/slurm-lib.sh.j2", values, 0o644),
        rendered(target, "check-node.sh", "slurm/check-node.sh.j2", values),
        rendered(target, "on-node.sh", "slurm/on-node.sh.j2", values),
    )


def array_script(
    target: Target, sweep_id: str, folder: str, tasks: int, at_once: int | None = None
) -> RenderedFile:
    """Render the batch script of `tasks` runs that ask for the same as `target`. Raises RenderError."""
    values = array_values(target, sweep_id, folder, tasks, at_once)
    return rendered(target, "array.sbatch", "slurm/array.sbatch.j2", values)


def _check_own_templates(target: Target) -> None:
    """Refuse ejected copies of templates that are no longer used. Their changes would be lost silently."""
    own = shipped.project_templates(target.project_dir) if target.project_dir is not None else None
    if own is None:
        return
    for name in sorted(shipped.IN_LIBRARY):
        if (own / name).is_file():
            raise RenderError(
                f"{own / name} is no longer read: its functions are in {shipped.LIBRARY} now. Eject that, "
                "copy your changes into it, and delete the file"
            )


# Options that job.sbatch sets itself or that would break the step.
_MANAGED = frozenset(
    {"job-name", "comment", "nodes", "ntasks", "ntasks-per-node", "output", "error", "open-mode", "signal"}
    | {"requeue", "no-requeue", "export", "array", "time", "cpus-per-task", "gpus", "gres", "gpus-per-node"}
    | {"gpus-per-task", "partition", "account", "qos", "constraint", "reservation", "exclusive", "wrap"}
)
# With these sbatch submits nothing, waits, prints something else, or submits to another cluster or as another
# user, or the step gets other tasks or nodes than the supervisors expect.
_UNFIT = frozenset(
    {"test-only", "wait", "parsable", "quiet", "verbose", "help", "usage", "version", "uid", "gid", "input"}
    | {"cluster-constraint", "export-file", "get-user-env", "no-kill", "ntasks-per-gpu"}
)

CHECK_SECONDS = 300
"Timeout for all nodes to answer the check before the start. A first import from a cold file system is slow."

MEMORY_OPTIONS = frozenset({"mem", "mem-per-cpu", "mem-per-gpu"})


def batch_values(target: Target) -> dict[str, Any]:
    """Return the values of slurm/job.sbatch.j2, slurm-lib.sh.j2, check-node.sh.j2 and on-node.sh.j2."""
    options, flags = _sbatch_options(target)
    slurm = Slurm.used_by(target.cluster)
    inside = container(target)
    return {
        "version": __version__,
        "job_name": target.job.name,
        "run_id": target.run_id,
        "run_dir": target.run_dir,
        "python": target.python,
        "nodes": target.nodes,
        "output": quote.slurm_file(target.run_dir) + "/slurm-%j.out",
        # Prefix of the file name; the restart count and the node follow.
        "step_output": quote.slurm_file(target.run_dir) + "/slurm-%j-",
        # Further #SBATCH options that have a value.
        "options": options,
        # Further #SBATCH options without a value.
        "flags": flags,
        "requeue": target.job.requeue,
        # Prefix of the handle; the job id follows.
        "handle_prefix": f"slurm:{target.cluster.name}:",
        "signal_seconds": target.job.stop_seconds(slurm.signal_seconds),
        "retries_same": target.job.retries.same,
        "retries_preemptions": target.job.retries.preemptions,
        "retries_time_limits": target.job.retries.time_limits,
        "check_seconds": CHECK_SECONDS,
        # Nodes that the profile excludes; sbatch accepts one such option.
        "exclude": str(slurm.extra.get("exclude", "")),
        "gpus": target.gpus_per_node if slurm.assigns_gpus else 0,
        "shm_mib": (target.cluster.container.shm or 0) // 2**20,
        # Host paths that the container image and its mounts need.
        "needed_paths": (*filter(None, [inside.image_file]), *(path for path, _ in inside.mounts)),
        # Whether the doctor examines each node first. In a container, start.sh has it do so.
        "checks": target.cluster.checks == "doctor" and target.cluster.container.runtime == "none",
        "check_python": target.cluster.container.runtime == "none",
        "setup": setup_lines(target.cluster),
        "uses_modules": uses_modules(target.cluster),
        # Secrets to mask in the output of `setup`.
        "secrets": secret_values(target),
        # Further srun options (pyxis).
        "step_options": (*_srun_options(slurm), *inside.step_options),
        "with_comment": slurm.comment,
        # Command that starts the payload (apptainer exec ...).
        "prefix": inside.prefix,
        "contained": target.cluster.container.runtime != "none",
        # Variable names that Apptainer must be told explicitly.
        "exported": inside.exported,
    }


def array_values(
    target: Target, sweep_id: str, folder: str, tasks: int, at_once: int | None
) -> dict[str, Any]:
    """Return the values of slurm/array.sbatch.j2.

    It starts `tasks` runs that ask for the same as `target`. `folder` holds a link to each.

    Slurm runs at most `at_once` of them at the same time.
    """
    options, flags = _sbatch_options(target)
    return {
        "version": __version__,
        "job_name": target.job.name,
        "run_id": sweep_id,
        "run_dir": folder,
        "array": f"0-{tasks - 1}" + (f"%{at_once}" if at_once is not None else ""),
        "nodes": target.nodes,
        "output": quote.slurm_file(folder) + "/%a/slurm-%j.out",
        "options": options,
        "flags": flags,
        "with_comment": Slurm.used_by(target.cluster).comment,
        "requeue": target.job.requeue,
    }


def cpus_per_node(job: Job, cluster: Cluster, gpus: int, ranks: int) -> int | None:
    """Return the CPUs per node that the job requests from Slurm. None leaves the number to the site."""
    node, slurm = cluster.node, Slurm.used_by(cluster)
    if job.resources.cpus_per_node is not None:
        return job.resources.cpus_per_node
    if node.cpus is not None:  # a fair share: proportional to the GPUs asked for
        return node.cpus * gpus // node.gpu.count if node.gpu and node.gpu.count and gpus else node.cpus
    if ranks == 1 or slurm.exclusive or "cpus-per-gpu" in slurm.extra:
        return None
    return ranks  # Slurm gives a task one core, which all ranks of the node would share


def cpus_note(target: Target) -> str | None:
    """Return a note about the CPUs that a job gets if the profile does not set the CPUs per node, or None."""
    slurm, ranks = Slurm.used_by(target.cluster), target.ranks_per_node
    if slurm.exclusive or target.cluster.node.cpus or "cpus-per-gpu" in slurm.extra:
        return None
    if target.job.resources.cpus_per_node is not None:
        return None
    given = "what the site gives, mostly one core" if ranks == 1 else f"{ranks} CPUs of each node, one a rank"
    return f"node.cpus is not set in the profile: the job gets {given}; set it, or resources.cpus_per_node"


def _sbatch_options(target: Target) -> tuple[Pairs, tuple[str, ...]]:
    """Return the options of sbatch with a value, and those without one. Raises RenderError."""
    slurm = Slurm.used_by(target.cluster)
    options = [
        *_places(slurm),
        *_gpus(slurm, target.gpus_per_node),
        *_cpus_and_memory(target, slurm),
        *_times(target, slurm),
    ]
    flags = ["exclusive"] if slurm.exclusive else []
    if "propagate" not in slurm.extra:
        # The submitting host's limits (ulimit) would override those that slurmd has for jobs.
        options.append(("propagate", "NONE"))
    for name, value in slurm.extra.items():
        if problem := _problem_of_extra(name, target, slurm):
            raise RenderError(f"slurm.extra {problem}")
        if value is True:
            flags.append(name)
        elif value is not False:
            options.append((name, str(value)))
    for name, text in options:
        if not text:
            raise RenderError(f"slurm: the value of --{name} is empty; leave it out, or write one")
    return tuple(options), tuple(flags)


def _places(slurm: Slurm) -> Pairs:
    names = ("clusters", "partition", "account", "qos", "constraint", "reservation")
    return tuple((name, value) for name in names if (value := getattr(slurm, name)) is not None)


def _gpus(slurm: Slurm, gpus: int) -> Iterator[tuple[str, str]]:
    gres = list(slurm.gres)
    if gpus and slurm.assigns_gpus:
        gpu_text = f"{slurm.gres_type}:{gpus}" if slurm.gres_type else str(gpus)
        if slurm.gpu_request == "gres":
            gres.insert(0, f"gpu:{gpu_text}")
        else:
            yield slurm.gpu_request, gpu_text
    if gres:
        yield "gres", ",".join(gres)


def _cpus_and_memory(target: Target, slurm: Slurm) -> Iterator[tuple[str, str]]:
    if cpus := cpus_per_node(target.job, target.cluster, target.gpus_per_node, target.ranks_per_node):
        yield "cpus-per-task", str(cpus)
    memory = target.job.resources.memory_per_node
    if memory is not None:
        yield "mem", f"{math.ceil(memory / 2**20)}M"
    elif slurm.exclusive and MEMORY_OPTIONS.isdisjoint(slurm.extra):
        # Many sites apply DefMemPerCPU even to a job that has the whole node; 0 asks for all memory.
        yield "mem", "0"


def _times(target: Target, slurm: Slurm) -> Iterator[tuple[str, str]]:
    job, warned = target.job, target.job.stop_seconds(slurm.signal_seconds)
    limit = job.resources.time
    if limit is not None:
        if limit <= warned:
            name = "stop_timeout" if job.stop_timeout else "slurm.signal_seconds"
            raise RenderError(
                f"resources.time ({limit} s) is not longer than {name} ({warned} s): the job would be asked "
                "to stop at its start"
            )
        yield "time", _clock(limit)
    yield "signal", f"B:USR2@{warned}"


def _problem_of_extra(name: str, target: Target, slurm: Slurm) -> str | None:
    """Return why `slurm.extra` cannot have this option."""
    if re.fullmatch(r"[a-z][a-z0-9-]*", name) is None:
        return f"{name!r} is not the long name of an sbatch option"
    managed = name in _MANAGED or name.startswith("container-")
    if managed and not (name == "comment" and not slurm.comment):
        return f"{name}: launcher sets this option itself"
    if name == "clusters":
        return "clusters: write slurm.clusters, which launcher follows"
    if name in _UNFIT:
        return f"{name}: launcher cannot submit or follow a job with this option"
    if name in MEMORY_OPTIONS and target.job.resources.memory_per_node is not None:
        return f"{name} and resources.memory_per_node exclude each other"
    return None


# Options that job.sbatch sets on srun, that have no effect on a step, or that would change its tasks or
# nodes.
_MANAGED_ON_SRUN = frozenset(
    {"nodes", "nodelist", "exclude", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "multi-prog", "het-group"}
    | {"kill-on-bad-exit", "wait", "export", "unbuffered", "open-mode", "output", "error", "input", "label"}
    | {"pty", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name", "jobid", "no-kill", "partition"}
    | {"container-image", "container-mounts", "container-env", "no-container-entrypoint", "help", "version"}
    | {"test-only", "no-allocate", "relative", "preserve-env", "chdir", "container-mount-home"}
    | {"no-container-mount-home", "clusters", "overlap"}
)


def _srun_options(slurm: Slurm) -> tuple[str, ...]:
    """Options of srun from the profile. Raises RenderError."""
    names = [option[2:].partition("=")[0] for option in slurm.srun_options]
    for name in names:
        if name.endswith("container-mount-home"):
            raise RenderError(f"slurm.srun_options --{name}: write container.mount_home: true or false")
        if name in _MANAGED_ON_SRUN:
            raise RenderError(f"slurm.srun_options --{name}: launcher sets this option itself")
    # torchrun starts the ranks. If MpiDefault is pmix, a useless PMIx server would start for each node.
    return (*(() if "mpi" in names else ("--mpi=none",)), *slurm.srun_options)


def _clock(seconds: int) -> str:
    """Return a duration in Slurm's format `D-HH:MM:SS`."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02d}:{minute:02d}:{second:02d}"
