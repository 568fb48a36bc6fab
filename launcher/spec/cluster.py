"""Cluster: one machine room as launcher needs to know it. One YAML profile per cluster."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from launcher.spec.base import Bytes, Env, Rate, Value, number_as_text
from launcher.spec.failures import FailurePattern

HOST = r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$"


def _as_ssh_takes_it(text: str) -> str:
    if re.fullmatch(HOST, text) is None:
        raise ValueError(
            f"{text!r} is no host: write user@host, or a name of your ssh config (which has the port, too)"
        )
    return text


def _as_taskset_takes_it(text: str) -> str:
    if re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text) is None:
        raise ValueError(f"{text!r} is no list of CPUs: write 0-15 or 0-7,16-23")
    return text


def _other_than_gpu(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+){0,2}", text) is None:
        raise ValueError(f"{text!r} is no generic resource: write name:count or name:type:count")
    if text.partition(":")[0] == "gpu":
        raise ValueError("GPUs are asked for by resources.gpus_per_node of the job, as gpu_request says")
    return text


def _long_option(text: str) -> str:
    if re.fullmatch(r"--[a-z][a-z0-9-]*(=[^\r\n]*)?", text) is None:
        raise ValueError(f"{text!r} is no long option of srun: write --name or --name=value")
    return text


Host = Annotated[str, AfterValidator(_as_ssh_takes_it), Field(json_schema_extra={"pattern": HOST})]
"As `ssh` takes it: user@host, or a name of your ssh config."


class Gpu(Value):
    """The GPUs of one node."""

    type: str
    "As the vendor writes it, e.g. NVIDIA RTX A6000."
    count: NonNegativeInt
    memory: Bytes
    "Memory that a process can use on one GPU (`nvidia-smi` total), e.g. 47.4GiB."
    overhead: Bytes | None = None
    "What a rank holds there beside PyTorch's memory: CUDA context, NCCL. Left out, launcher's own figures."


def _as_gpu(value: Any) -> Any:
    return None if value == "auto" else value


class Node(Value):
    """One node; all nodes of a cluster are taken to be alike."""

    gpu: Annotated[
        Gpu | None,
        BeforeValidator(_as_gpu, json_schema_input_type=Literal["auto"] | Gpu | None),
    ] = None
    "`auto` asks nvidia-smi: of this machine (local), of the hosts (ssh)."
    cpus: PositiveInt | None = None
    memory: Bytes | None = None
    "Host memory of one node."
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = None
    "torchrun's --numa-binding: each rank on CPUs near its GPU. The nodes need numactl."
    cpu_bind: tuple[Annotated[str, AfterValidator(_as_taskset_takes_it)], ...] = ()
    "In place of numa_binding: the CPUs of each rank of a node, e.g. [0-15, 16-31]."

    @model_validator(mode="after")
    def _bound_once(self) -> Node:
        if self.numa_binding is not None and self.cpu_bind:
            raise ValueError("numa_binding and cpu_bind exclude each other: give one of them")
        return self


class Network(Value):
    interface: str | None = Field(None, pattern=r"^[A-Za-z0-9_.,:=^-]+$")
    """NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME of a job on several nodes; left out, gloo gets the
    interface that leads to the first node, and NCCL where it would take another one first."""
    env: Env = {}
    "NCCL variables this cluster needs, each with its reason as a comment."
    inter_node: Rate | None = None
    "What all network cards of one node carry together in one direction, e.g. 400Gb/s; for predicted speed."


class Container(Value):
    runtime: Literal["none", "docker", "pyxis", "apptainer", "runpod"] = "none"
    image: str | None = None
    "Used when the job names none."
    base: str | None = None
    "Image that a rendered Dockerfile or Apptainer definition builds on."
    mounts: dict[str, str] = {}
    "Host path -> path in the container."
    shm: Bytes | None = None
    "Size of /dev/shm; Docker's 64 MiB break DataLoader workers."
    mount_home: bool | None = None
    "Whether your home directory is there inside; left out, as the site has it. For pyxis and Apptainer."


def _one_cluster(name: str) -> str:
    if name == "all":
        raise ValueError("name one cluster: a job is in one, and `all` is the name of none")
    return name


class Slurm(Value):
    """sbatch options. Only the batch script asks for GPUs: a step that repeats a typed GRES fails."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gres_type: str | None = None
    "The name between `gpu:` and the count, e.g. a100."
    gres: tuple[Annotated[str, AfterValidator(_other_than_gpu)], ...] = ()
    "Generic resources of each node other than GPUs, as sbatch takes them, e.g. [nvme:1]."
    clusters: Annotated[str, AfterValidator(_one_cluster)] | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    "The name of this cluster, where a site has several and this host's default is another one."
    exclusive: bool = False
    signal_seconds: PositiveInt = 120
    "USR2 reaches the batch shell this long before the time limit."
    extra: dict[
        str, Annotated[str | bool, BeforeValidator(number_as_text, json_schema_input_type=str | bool | int)]
    ] = {}
    "Any other sbatch option by its long name; true for a bare flag."
    srun_options: tuple[Annotated[str, AfterValidator(_long_option)], ...] = ()
    "Further options of the one `srun` that starts the ranks, e.g. [--cpu-bind=none]."
    comment: bool = True
    "Jobs have the run's id as their comment. false: for a site that uses comments itself; see `extra`."


class RunPod(Value):
    """What may be rented, and for how much."""

    gpu_id: str | None = None
    "As RunPod's catalogue names the card of `node.gpu`."
    other_gpus: dict[str, Bytes] = {}
    "Further GPU types that may be rented, with the memory of one card: the job is planned for each."
    cpu_id: str | None = None
    "Flavor of the pods of jobs without a GPU, e.g. cpu5c."
    vcpu: int | None = Field(None, ge=2)
    "vCPUs of such a pod: a power of two."
    clouds: tuple[Literal["SECURE", "COMMUNITY"], ...] = Field(("SECURE",), min_length=1)
    data_centers: tuple[str, ...] = ()
    disk_gb: PositiveInt = 50
    volume_id: str | None = None
    "Network volume, mounted at `volume_path`; the run directory lives there."
    volume_path: str = "/workspace"
    registry_id: str | None = None
    cuda_versions: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    max_hours: PositiveFloat = 24
    "Of one pod: it ends after this long, whatever the training does."
    max_price: PositiveFloat | None = None
    "USD per hour of all pods of a run together; what costs more is not rented, or ended at once."
    budget: PositiveFloat | None = None
    "USD for all pods that a run ever has: what is left of it limits the hours."
    unplanned: bool = False
    "A card is rented although it is not known whether the job fits on it."
    bid_per_gpu: PositiveFloat | None = None
    "USD per hour: rents an interruptible (spot) pod. RunPod takes it away when somebody pays more."
    server_limit: bool = True
    """RunPod itself ends each pod after its time, too, though its start script may never have run. It has no
    such limit for clusters of pods. false: rented without one; an interruptible pod always has it."""

    @model_validator(mode="after")
    def _something_to_rent(self) -> RunPod:
        if self.gpu_id is None and self.cpu_id is None:
            raise ValueError("give gpu_id (with node.gpu), or cpu_id and vcpu")
        if (self.cpu_id is None) != (self.vcpu is None):
            raise ValueError("cpu_id and vcpu belong together")
        if self.vcpu is not None and self.vcpu & (self.vcpu - 1):
            raise ValueError(f"vcpu: {self.vcpu} is no power of two")
        if self.gpu_id is None and (self.other_gpus or self.bid_per_gpu):
            raise ValueError("other_gpus and bid_per_gpu need gpu_id")
        return self


class Ssh(Value):
    """Hosts without a batch system."""

    hosts: Annotated[tuple[Host, ...], Field(min_length=1)]
    "As `ssh` takes them. A job on n nodes takes the first n that have room; the run lies on the first."

    @field_validator("hosts")
    @classmethod
    def _each_once(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
            raise ValueError(f"{', '.join(twice)} is there twice")
        return hosts


class Paths(Value):
    runs: str | None = None
    "Where run directories are kept; left out, $LAUNCHER_RUNS or `runs/` in the current directory."
    access: Literal["private", "group", "all"] = "private"
    "Who may enter a run directory: you alone (mode 0700), your group (0750) or every user (0755)."
    python: str | None = None
    "Interpreter on the nodes with launcher and torch; left out, the one in use (local) or python3."


MODES = {"private": 0o700, "group": 0o750, "all": 0o755}
"Of a run directory, by `paths.access`."


class Cluster(Value):
    """A profile. `setup` is shell text of the profile's author and runs as written, before the job."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    description: str = ""
    scheduler: Literal["local", "slurm", "runpod", "ssh"]
    login: Host | None = None
    "The login node, as `ssh` takes it (user@host, or a name of your ssh config); left out, this host."
    max_nodes: PositiveInt = 1
    node: Node = Node()
    network: Network = Network()
    container: Container = Container()
    paths: Paths = Paths()
    env: Env = {}
    setup: tuple[str, ...] = ()
    "Lines of shell, e.g. `module load cuda`."
    slurm: Slurm | None = None
    runpod: RunPod | None = None
    ssh: Ssh | None = None
    usd_per_gpu_hour: NonNegativeFloat | None = None
    failures: tuple[FailurePattern, ...] = ()
    "Words that tell of a failure on this cluster, such as those of its own scripts."

    @model_validator(mode="before")
    @classmethod
    def _as_many_nodes_as_hosts(cls, data: Any) -> Any:
        ssh = data.get("ssh") if isinstance(data, dict) else None
        hosts = ssh.get("hosts") if isinstance(ssh, dict) else None
        return {"max_nodes": len(hosts), **data} if isinstance(hosts, list) and hosts else data

    @model_validator(mode="after")
    def _section_of_scheduler(self) -> Cluster:
        if self.scheduler == "runpod" and self.runpod is None:
            raise ValueError("scheduler: runpod needs a `runpod:` section with at least gpu_id or cpu_id")
        if self.runpod is not None and self.runpod.gpu_id is not None and self.node.gpu is None:
            raise ValueError("runpod.gpu_id needs `node.gpu` (type, count, memory)")
        if self.runpod is not None and self.runpod.gpu_id is None and self.gpus_per_node:
            raise ValueError("node.gpu needs runpod.gpu_id")
        if self.login is not None and self.scheduler != "slurm":
            raise ValueError(f"`login:` is given but scheduler is {self.scheduler}")
        if self.scheduler == "ssh" and self.ssh is None:
            raise ValueError("scheduler: ssh needs an `ssh:` section, for example `ssh: {hosts: [tensor01]}`")
        if self.ssh is not None and self.max_nodes > len(self.ssh.hosts):
            raise ValueError(f"max_nodes is {self.max_nodes}, and ssh.hosts names {len(self.ssh.hosts)}")
        for section in ("slurm", "runpod", "ssh"):
            if getattr(self, section) is not None and self.scheduler != section:
                raise ValueError(f"`{section}:` is given but scheduler is {self.scheduler}")
        return self

    @property
    def runs_elsewhere(self) -> bool:
        """Its run directories are on another machine; here are copies."""
        return self.login is not None or self.ssh is not None or self.runpod is not None

    @property
    def gpus_per_node(self) -> int:
        return self.node.gpu.count if self.node.gpu is not None else 0

    def with_gpu(self, gpu_id: str) -> Cluster:
        """RunPod: the same profile with another of its GPU types as the one that is planned for."""
        if self.runpod is None or self.node.gpu is None or gpu_id == self.runpod.gpu_id:
            return self
        gpu = self.node.gpu.model_copy(update={"type": gpu_id, "memory": self.runpod.other_gpus[gpu_id]})
        return self.model_copy(
            update={
                "node": self.node.model_copy(update={"gpu": gpu}),
                "runpod": self.runpod.model_copy(update={"gpu_id": gpu_id}),
                "usd_per_gpu_hour": None,
            }
        )
