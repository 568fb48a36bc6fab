"""Cluster: a place where jobs run. Each cluster has one YAML profile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from launcher.spec.failure_patterns import FailurePattern
from launcher.spec.quantities import Bytes, Memory, Rate
from launcher.spec.scheduler_section import At, Section, annotation_of, missing_section
from launcher.spec.value import Env, Value

HOST = r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$"


def _ssh_host(text: str) -> str:
    if re.fullmatch(HOST, text) is None:
        raise ValueError(
            f"{text!r} is not a host: write user@host, or a name of your ssh config (which has the port, too)"
        )
    return text


def _cpu_list(text: str) -> str:
    if re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text) is None:
        raise ValueError(f"{text!r} is not a list of CPUs: write 0-15 or 0-7,16-23")
    return text


Host = Annotated[str, AfterValidator(_ssh_host), Field(json_schema_extra={"pattern": HOST})]
"A host as `ssh` accepts it: user@host, or a name of your ssh config."


class Gpu(Value):
    """The GPUs of one node."""

    type: str
    "Name that `nvidia-smi` shows."
    count: NonNegativeInt
    "GPUs of one node."
    memory: Memory
    "Memory of one GPU that a process can use: the total that `nvidia-smi` shows."
    overhead: Bytes | None = None
    "Memory of a rank outside of PyTorch: CUDA context, NCCL. Default: launcher's own figures."


def _as_gpu(value: Any) -> Any:
    return None if value == "auto" else value


class Node(Value):
    """One node. All nodes of a cluster are assumed to be identical."""

    gpu: Annotated[
        Gpu | None,
        BeforeValidator(_as_gpu, json_schema_input_type=Literal["auto"] | Gpu | None),
    ] = None
    "GPUs of a node. `auto` asks nvidia-smi on this machine (local) or on the hosts (ssh)."
    cpus: PositiveInt | None = None
    "CPUs of a node. A job gets the same share of them as of the node's GPUs."
    memory: Memory | None = None
    "Host memory of one node."
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    """torchrun's --numa-binding: each rank on CPUs near its GPU. Needs torch 2.9 and numactl on the nodes.
    The ranks of one host then start through torchrun, too."""
    cpu_bind: tuple[Annotated[str, AfterValidator(_cpu_list)], ...] = ()
    "CPUs of each rank of a node, instead of `numa_binding`."

    @model_validator(mode="after")
    def _bound_once(self) -> Node:
        if self.numa_binding is not None and self.cpu_bind:
            raise ValueError("numa_binding and cpu_bind exclude each other: give one of them")
        return self


class Network(Value):
    """How nodes reach each other."""

    interface: str | None = Field(None, pattern=r"^[A-Za-z0-9_.,:=^-]+$")
    """NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME of a job on several nodes. Default: gloo gets the interface
    that leads to the first node; NCCL gets it too if it would pick another one."""
    env: Env = {}
    "NCCL variables that this cluster needs."
    inter_node: Rate | None = None
    "Bandwidth of all network adapters of a node, one direction, for predicted speed. Default: 100 Gb/s."


class Container(Value):
    """Containers in which jobs run."""

    runtime: Literal["none", "docker", "pyxis", "apptainer", "runpod"] = "none"
    "What starts the container."
    image: str | None = None
    "Image for jobs that do not name one, or `catalog:NAME`."
    base: str | None = None
    "Image that a rendered Dockerfile or Apptainer definition builds on."
    mounts: dict[str, str] = {}
    "Paths of the host, each with its path in the container."
    shm: Bytes | None = None
    "Size of /dev/shm. Docker's default of 64 MiB breaks DataLoader workers."
    mount_home: bool | None = None
    "Whether the container has your home directory (pyxis, Apptainer). Default: the site's setting."


class Paths(Value):
    """Paths on the cluster."""

    runs: str | None = None
    "Folder of the run directories. Default: $LAUNCHER_RUNS, else `runs/` in the current directory."
    access: Literal["private", "group", "all"] = "private"
    "Readers of a run directory: only you (mode 0700), your group (0750) or every user (0755)."
    python: str | None = None
    "Interpreter on the nodes, with launcher and torch. Default: the current one (local), else python3."


MODES = {"private": 0o700, "group": 0o750, "all": 0o755}
"Mode of a run directory, by `paths.access`."


class ContradictionsError(ValueError):
    """Fields of a profile contradict each other. `problems` has the key path and the message of each
    problem."""

    def __init__(self, problems: Sequence[tuple[tuple[str, ...], str]]) -> None:
        super().__init__("; ".join(f"{'.'.join(path)}: {message}" for path, message in problems))
        self.problems = tuple(problems)


class Cluster(Value):
    """A cluster profile."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    "Name of the profile, as given to `-c`."
    description: str = ""
    "One line for `launcher clusters list`."
    scheduler: Literal["local", "slurm", "runpod", "ssh"]
    "How jobs are started. Other packages can add schedulers."
    login: Host | None = None
    "Login node of a Slurm cluster: user@host, or a Host of your ssh config. Default: this host."
    max_nodes: PositiveInt = 1
    "Maximum number of nodes of one job. Default with `ssh`: the number of hosts."
    node: Node = Node()
    "GPUs, CPUs and memory of a node."
    network: Network = Network()
    "How nodes reach each other."
    container: Container = Container()
    "Containers in which jobs run."
    paths: Paths = Paths()
    "Paths on the cluster."
    env: Env = {}
    "Environment variables of launcher's scripts, torchrun and the ranks."
    setup: tuple[str, ...] = ()
    "Lines of shell code that run unchanged before the job."
    checks: Literal["none", "doctor"] = "none"
    "`doctor`: before each start of a job's ranks, every node runs the quick checks of `launcher doctor`."
    slurm: Annotated[Section | None, At("slurm", "Slurm")] = None
    "Options of sbatch, with `scheduler: slurm`."
    runpod: Annotated[Section | None, At("runpod", "RunPod")] = None
    "What to rent, with `scheduler: runpod`."
    ssh: Annotated[Section | None, At("ssh", "Ssh")] = None
    "Hosts, with `scheduler: ssh`."
    usd_per_gpu_hour: NonNegativeFloat | None = None
    "Price of one GPU in USD per hour, for predicted and actual cost."
    failures: tuple[FailurePattern, ...] = ()
    "Lines of output that indicate a failure on this cluster."

    @model_validator(mode="before")
    @classmethod
    def _implied_by_sections(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, at in SECTIONS.items():
            if data.get(name) is not None:
                data = {**at.section_class.implied(data[name]), **data}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        problems = list(self.sections_problems(fields))
        if self.section is not None:
            problems += self.section.contradictions(self)
        if problems:
            raise ContradictionsError(problems)
        return self

    @classmethod
    def sections_problems(cls, data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (key path, message) for sections that do not go with the scheduler, or that are missing.

        Works on unvalidated data, too.
        """
        scheduler = data.get("scheduler")
        if not isinstance(scheduler, str):
            return
        for name in ("login", *SECTIONS):
            if data.get(name) is not None and scheduler != ("slurm" if name == "login" else name):
                yield (name,), f"is given but scheduler is {scheduler}"
        model = cls.section_type(scheduler)
        if (
            model is not None
            and data.get(scheduler) is None
            and (missing := missing_section(model, scheduler))
        ):
            yield ("scheduler",), f"{scheduler} needs {missing}"

    @classmethod
    def section_type(cls, scheduler: str) -> type[BaseModel] | None:
        """Return the model of the scheduler's section, or None if it has none."""
        if scheduler not in cls.model_fields:
            return None
        hint = annotation_of(cls.model_fields[scheduler])
        types = (member for member in (hint, *get_args(hint)) if isinstance(member, type))
        return next((member for member in types if issubclass(member, BaseModel)), None)

    @property
    def section(self) -> Section | None:
        """The section of the profile's scheduler; None if it is missing or its class is not a Section."""
        section = getattr(self, self.scheduler, None)
        return section if isinstance(section, Section) else None

    @property
    def runs_elsewhere(self) -> bool:
        """Whether run directories are on another machine and launcher keeps copies of them here."""
        return self.login is not None or (self.section is not None and self.section.runs_elsewhere)

    @property
    def rents(self) -> bool:
        """Whether nodes are rented for the run, and paid by the hour."""
        return self.section is not None and self.section.rents

    @property
    def starts_container(self) -> bool:
        """Whether the ranks run in an image."""
        always = self.section is not None and self.section.starts_container
        return always or self.container.runtime != "none"

    def with_node(self, **fields: Any) -> Cluster:
        """Return the cluster with these fields of its node replaced."""
        return self.model_copy(update={"node": self.node.model_copy(update=fields)})

    @property
    def gpus_per_node(self) -> int:
        return self.node.gpu.count if self.node.gpu is not None else 0


SECTIONS = {
    name: mark
    for name, info in Cluster.model_fields.items()
    for mark in info.metadata
    if isinstance(mark, At)
}
"The sections of launcher's own schedulers: field name -> where its class is."
