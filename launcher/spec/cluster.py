"""Cluster: a place where jobs run. Each cluster has one YAML profile."""

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
from launcher.spec.failure_patterns import FailurePattern

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


def _generic_resource(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+){0,2}", text) is None:
        raise ValueError(f"{text!r} is not a generic resource: write name:count or name:type:count")
    if text.partition(":")[0] == "gpu":
        raise ValueError("a job asks for GPUs by resources.gpus_per_node; gpu_request sets the option used")
    return text


def _long_option(text: str) -> str:
    if re.fullmatch(r"--[a-z][a-z0-9-]*(=[^\r\n]*)?", text) is None:
        raise ValueError(f"{text!r} is not a long option of srun: write --name or --name=value")
    return text


Host = Annotated[str, AfterValidator(_ssh_host), Field(json_schema_extra={"pattern": HOST})]
"A host as `ssh` accepts it: user@host, or a name of your ssh config."


class Gpu(Value):
    """The GPUs of one node."""

    type: str
    "Name that `nvidia-smi` shows."
    count: NonNegativeInt
    "GPUs of one node."
    memory: Bytes
    "Memory of one GPU that a process can use: the total that `nvidia-smi` shows."
    overhead: Bytes | None = None
    "Memory of a rank outside of PyTorch: CUDA context, NCCL. Default: launcher's own figures."


def _as_gpu(value: Any) -> Any:
    return None if value == "auto" else value


class Node(Value):
    """One node. All nodes of a cluster are assumed to be alike."""

    gpu: Annotated[
        Gpu | None,
        BeforeValidator(_as_gpu, json_schema_input_type=Literal["auto"] | Gpu | None),
    ] = None
    "GPUs of a node. `auto` asks nvidia-smi on this machine (local) or on the hosts (ssh)."
    cpus: PositiveInt | None = None
    "CPUs of a node. A job gets the same share of them as of the node's GPUs."
    memory: Bytes | None = None
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
    "Image of jobs that name none, or `catalog:NAME`."
    base: str | None = None
    "Image that a rendered Dockerfile or Apptainer definition builds on."
    mounts: dict[str, str] = {}
    "Paths of the host, each with its path in the container."
    shm: Bytes | None = None
    "Size of /dev/shm. Docker's default of 64 MiB breaks DataLoader workers."
    mount_home: bool | None = None
    "Whether the container has your home directory (pyxis, Apptainer). Default: the site's setting."


def _one_cluster(name: str) -> str:
    if name == "all":
        raise ValueError("name one cluster; `all` is not possible, because a job runs in one cluster")
    return name


class Slurm(Value):
    """Options of sbatch."""

    partition: str | None = None
    "Partition, or several with commas."
    account: str | None = None
    "Account to charge."
    qos: str | None = None
    "Quality of service."
    constraint: str | None = None
    "Features that the nodes must have."
    reservation: str | None = None
    "Reservation to use."
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    "Option that asks for GPUs. none: the site gives them without a request."
    gres_type: str | None = None
    "GPU type as Slurm names it: the word between `gpu:` and the count."
    gres: tuple[Annotated[str, AfterValidator(_generic_resource)], ...] = ()
    "Generic resources of each node other than GPUs."
    clusters: Annotated[str, AfterValidator(_one_cluster)] | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    "Name of this cluster (`--clusters`), if the site has several and another one is the default."
    exclusive: bool = False
    "Ask for whole nodes. Without `memory_per_node` of the job, also ask for all their memory."
    signal_seconds: PositiveInt = 120
    "How long before the time limit the run is asked to save and stop."
    extra: dict[
        str, Annotated[str | bool, BeforeValidator(number_as_text, json_schema_input_type=str | bool | int)]
    ] = {}
    "Any other option of sbatch by its long name; true for a flag."
    srun_options: tuple[Annotated[str, AfterValidator(_long_option)], ...] = ()
    "Further options of the `srun` that starts the ranks."
    comment: bool = True
    "Write the run's id into the job's comment. false: for sites that use comments themselves."


class RunPod(Value):
    """What launcher may rent, and for how much."""

    gpu_id: str | None = None
    "Id of the GPU type in RunPod's catalogue; `node.gpu` describes it."
    other_gpus: dict[str, Bytes] = {}
    "Further GPU types that may be rented, with the memory of one GPU. The job is planned for each."
    cpu_id: str | None = None
    "Flavor of the pods of jobs without a GPU."
    vcpu: int | None = Field(None, ge=2)
    "vCPUs of a pod without a GPU: a power of two."
    clouds: tuple[Literal["SECURE", "COMMUNITY"], ...] = Field(("SECURE",), min_length=1)
    "Clouds to rent in. Network volumes exist in SECURE only, so launcher never rents COMMUNITY."
    data_centers: tuple[str, ...] = ()
    "Data centre of the volume, if the API key may not ask for it. Pods must be in the same one."
    disk_gb: PositiveInt = 50
    "Disk of the pod in GB."
    volume_id: str | None = None
    "Network volume, mounted at `volume_path`. It holds the run directories."
    volume_path: str = "/workspace"
    "Path of the network volume in the pod."
    registry_id: str | None = None
    "RunPod's id of the credentials for a private image registry. Not for spot pods or several nodes."
    cuda_versions: tuple[str, ...] = ()
    "Rent only hosts whose driver runs one of these CUDA versions."
    ports: tuple[str, ...] = ()
    "Ports of the pod to expose, in RunPod's notation."
    max_hours: PositiveFloat = 24
    "Time limit of one pod in hours, from its creation, whatever the training does."
    max_price: PositiveFloat | None = None
    "Highest price of all pods of a run together, in USD per hour. A pod billed above it is ended at once."
    budget: PositiveFloat | None = None
    "USD for all pods of a run together. The unspent rest limits the hours."
    unplanned: bool = False
    "Rent although launcher does not know whether the job fits."
    bid_per_gpu: PositiveFloat | None = None
    "USD per hour: rent an interruptible (spot) pod, which RunPod takes away if another user pays more."
    server_limit: bool = True
    """Let RunPod end each pod after its time, even if the start script never ran. RunPod has no such limit
    for pods of several nodes. false rents without the limit; a spot pod always has it."""

    @model_validator(mode="after")
    def _something_to_rent(self) -> RunPod:
        if self.gpu_id is None and self.cpu_id is None:
            raise ValueError("give gpu_id (with node.gpu), or cpu_id and vcpu")
        if (self.cpu_id is None) != (self.vcpu is None):
            raise ValueError("cpu_id and vcpu belong together")
        if self.vcpu is not None and self.vcpu & (self.vcpu - 1):
            raise ValueError(f"vcpu: {self.vcpu} is not a power of two")
        if self.gpu_id is None and (self.other_gpus or self.bid_per_gpu):
            raise ValueError("other_gpus and bid_per_gpu need gpu_id")
        return self


class Ssh(Value):
    """Hosts without a batch system, reached over ssh."""

    hosts: Annotated[tuple[Host, ...], Field(min_length=1)]
    "Hosts as `ssh` accepts them. A job on n nodes takes the first n that have enough free GPUs."

    @field_validator("hosts")
    @classmethod
    def _each_once(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
            raise ValueError(f"{', '.join(twice)} is listed twice")
        return hosts


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
    slurm: Slurm | None = None
    "Options of sbatch, with `scheduler: slurm`."
    runpod: RunPod | None = None
    "What to rent, with `scheduler: runpod`."
    ssh: Ssh | None = None
    "Hosts, with `scheduler: ssh`."
    usd_per_gpu_hour: NonNegativeFloat | None = None
    "Price of one GPU in USD per hour, for predicted and actual cost."
    failures: tuple[FailurePattern, ...] = ()
    "Lines of output that indicate a failure on this cluster."

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
            raise ValueError(f"max_nodes is {self.max_nodes}, but ssh.hosts names {len(self.ssh.hosts)}")
        for section in ("slurm", "runpod", "ssh"):
            if getattr(self, section) is not None and self.scheduler != section:
                raise ValueError(f"`{section}:` is given but scheduler is {self.scheduler}")
        return self

    @property
    def runs_elsewhere(self) -> bool:
        """Whether run directories are on another machine and launcher keeps copies of them here."""
        return self.login is not None or self.ssh is not None or self.runpod is not None

    @property
    def gpus_per_node(self) -> int:
        return self.node.gpu.count if self.node.gpu is not None else 0

    def with_gpu(self, gpu_id: str) -> Cluster:
        """RunPod: return the same profile, planned for another of its GPU types."""
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
