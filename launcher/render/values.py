"""A run to render, and the values of its start.sh. A template has access only to its values."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.render import quote
from launcher.render.quote import RenderError
from launcher.spec.cluster import Cluster
from launcher.spec.job import Job, Secret
from launcher.spec.recipe import Recipe
from launcher.spec.text import no_nul
from launcher.spec.variables import TRAVELS_AS

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PodCode:
    """A snapshot of the job's code, for a pod."""

    digest: str
    inline: bytes | None
    "The archive (tar.gz) if it is part of the start script; None if it is on the volume."


@dataclass(frozen=True)
class Target:
    """A run with everything that its scripts need. Paths are text, valid where the processes run."""

    job: Job
    cluster: Cluster
    run_id: str
    run_dir: str
    "Absolute; on a pod, a folder of the volume."
    workdir: str
    "Absolute."
    python: str
    "Interpreter that has launcher and torch where the processes run."
    nodes: int
    ranks_per_node: int
    recipe: Recipe | None = None
    "Recipe of attempt 0."
    project_dir: Path | None = None
    "Folder whose `templates/` take precedence over the shipped ones."
    carried: Mapping[str, str] = field(default_factory=dict)
    "RunPod: the files of the run directory at the start, as relative path -> text (run.json ...)."
    code: PodCode | None = None
    "RunPod: the code that is unpacked into `workdir`."
    secrets_given: bool = False
    "Whether each secret is already an environment variable under its own name."

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
    def numa_binding(self) -> str | None:
        return self.cluster.node.numa_binding if self.gpus_per_node else None

    @property
    def under_torchrun(self) -> bool:
        """Whether torchrun starts the ranks. Otherwise `launcher.supervise.local_ranks` does."""
        return self.nodes > 1 or self.numa_binding is not None

    @property
    def image(self) -> str | None:
        return self.job.image or self.cluster.container.image


def start_values(target: Target) -> dict[str, Any]:
    """Return the values of torchrun/start.sh.j2, torchrun/numa-binding.sh.j2 and torchrun/per-node.sh.j2."""
    job, cluster = target.job, target.cluster
    argv = job.command if job.command is not None else (target.python, "-m", "launcher.train")
    _check_lengths(argv, job.env, doubled=target.under_torchrun)
    expandable = target.recipe is None or target.recipe.expandable_segments
    chosen = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & job.env.keys()
    expands = expandable and not chosen and target.gpus_per_node
    return {
        "version": __version__,
        "job_name": job.name,
        "run_id": target.run_id,
        "run_dir": target.run_dir,
        "workdir": target.workdir,
        "python": target.python,
        "nodes": target.nodes,
        "ranks": target.ranks_per_node,
        "gpus": target.gpus_per_node,
        "shm_mib": (cluster.container.shm or 0) // 2**20,
        "cluster_name": cluster.name,
        "cluster_env": tuple(cluster.env.items()),
        # A job on one host needs none, and NCCL fails if the interface is missing (ens1 on a single pod).
        "interface": cluster.network.interface if target.nodes > 1 else None,
        "network_env": tuple(cluster.network.env.items()),
        "setup": setup_lines(cluster),
        # Whether the doctor examines the node before the ranks start.
        "checks": cluster.checks == "doctor",
        # Whether a line of `setup` calls `module` or `ml`.
        "uses_modules": uses_modules(cluster),
        "numa_binding": target.numa_binding,
        "cpu_bind": _cpu_bind(target),
        "job_env": tuple(job.env.items()),
        "alloc_conf": "expandable_segments:True" if expands else None,
        "secrets": secret_values(target),
        "argv": argv,
    }


def setup_lines(cluster: Cluster) -> tuple[quote.Written, ...]:
    """The profile author's own shell lines, the only text that is written unquoted."""
    return tuple(quote.Written(line) for line in cluster.setup)


LONGEST_BYTES = 128 * 1024 - 1
"Maximum size of one argument or variable of a process under Linux (MAX_ARG_STRLEN)."


def _check_lengths(argv: tuple[str, ...], env: Mapping[str, str], *, doubled: bool) -> None:
    """Raise RenderError for values that are too long for a process. torchrun needs every `$` doubled."""
    sizes = {f"command: argument {number}": text for number, text in enumerate(argv)}
    if doubled:
        sizes = {what: text.replace("$", "$$") for what, text in sizes.items()}
    sizes |= {f"env.{name}": f"{TRAVELS_AS}{name}={value}" for name, value in env.items()}
    for what, text in sizes.items():
        if (size := len(text.encode(errors="surrogateescape"))) > LONGEST_BYTES:
            raise RenderError(
                f"{what} has {size / 1024:.0f} KiB, and Linux gives a process at most 128 KiB in one argument"
                " or variable: write it to a file and give the file's name"
            )


def _cpu_bind(target: Target) -> tuple[str, ...]:
    """The CPUs of each rank of a node. Raises RenderError."""
    lists = target.cluster.node.cpu_bind
    if lists and len(lists) < target.ranks_per_node:
        raise RenderError(
            f"node.cpu_bind: the profile has CPUs for {len(lists)} ranks of a node, the job starts"
            f" {target.ranks_per_node}"
        )
    return lists[: target.ranks_per_node]


def uses_modules(cluster: Cluster) -> bool:
    return any(re.search(r"(^|[\s;&|(])(module|ml)\s", line) for line in cluster.setup)


def secret_values(target: Target) -> list[dict[str, str | None]]:
    """Return the secrets as the templates need them."""
    return [_secret(target, secret) for secret in target.job.secrets]


def _secret(target: Target, secret: Secret) -> dict[str, str | None]:
    file = secret.file
    home = file[2:] if file is not None and file.startswith("~/") else None
    given = target.secrets_given
    return {
        "name": secret.name,
        # The variable from which it is copied.
        "source": secret.name if given else secret.env or secret.name,
        "file": None if given or home is not None else file,
        # The part after `~/` of a file in the home directory.
        "home_file": None if given else home,
    }
