"""What a test cluster looks like, and its configuration files as text."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

CLUSTER = "lab"
MAIN = "Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF"
SCAVENGE = "Nodes=ALL MaxTime=INFINITE DefaultTime=60 PriorityTier=1 GraceTime=10"
PARTITIONS = {
    "main": MAIN,
    "short": "Nodes=ALL MaxTime=10 DefaultTime=1 PriorityTier=10 PreemptMode=OFF",
    "scavenge": f"{SCAVENGE} PreemptMode=REQUEUE",
    "scavenge-cancel": f"{SCAVENGE} PreemptMode=CANCEL",
}
OCTETS = range(60, 100)
REQUEUE_SECONDS = 8
"How long a requeued job waits: until the credential of its last start has expired (Slurm: 120)."


@dataclass(frozen=True)
class Shape:
    """Nodes n1 ... have addresses 10.OCTET.0.1 ...; CPUs and memory are pretended."""

    nodes: int = 4
    gpus_per_node: int = 2
    cpus: int = 16
    memory_mib: int = 16000
    accounting: bool = True
    enforce: tuple[str, ...] = ()
    "What of accounting holds jobs back: associations, limits, qos."
    own_name_is_loopback: bool = False
    "As Debian and Ubuntu install it: in a node's own /etc/hosts its name is 127.0.1.1."
    octet: int = 0
    "0: one that no other cluster on this machine has."
    partitions: tuple[tuple[str, str], ...] = tuple(PARTITIONS.items())

    @property
    def names(self) -> list[str]:
        return [f"n{i + 1}" for i in range(self.nodes)]

    @property
    def port(self) -> int:
        """slurmctld's; the next ones are slurmdbd's, MariaDB's and, from the tenth on, the nodes'."""
        return 12000 + 500 * (self.octet - OCTETS[0])

    @property
    def head(self) -> str:
        return f"10.{self.octet}.255.254"

    def address(self, node: str) -> str:
        i = int(node[1:]) - 1
        return f"10.{self.octet}.{i // 250}.{i % 250 + 1}"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Shape:
        fields = json.loads(path.read_text())
        return Shape(**{**fields, "partitions": tuple((name, text) for name, text in fields["partitions"])})


def hosts(shape: Shape, node: str) -> str:
    """/etc/hosts of a node."""
    lines = ["127.0.0.1 localhost", f"{shape.head} {socket.gethostname()}"]
    known = {name: shape.address(name) for name in shape.names}
    if shape.own_name_is_loopback:
        known[node] = "127.0.1.1"
    return "\n".join([*lines, *(f"{address} {name}" for name, address in known.items()), ""])


def slurm_conf(shape: Shape, folder: Path, user: str, cgroups: bool) -> str:
    """`cgroups`: memory limits are real; else memory is looked at every second."""
    fanout = 16
    lines = f"""
ClusterName={CLUSTER}
SlurmctldHost={socket.gethostname()}({shape.head})
SlurmctldPort={shape.port}
SlurmUser={user}
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={max(REQUEUE_SECONDS, shape.nodes // 4)}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.own-pid
SlurmdPidFile={folder}/run/slurmd-%n.own-pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=4000
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
{"TaskPlugin=task/cgroup" if cgroups else "JobAcctGatherParams=OverMemoryKill"}
SlurmctldTimeout=10
SlurmdTimeout={5 + shape.nodes // 10}
MessageTimeout={10 + shape.nodes // 20}
KillWait=20
CompleteWait=0
InactiveLimit=0
ReturnToService=2
UnkillableStepTimeout=60
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MaxArraySize=10001
MaxJobCount=20000
TreeWidth={fanout}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
""".strip().splitlines()
    if shape.accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            f"AccountingStorageHost={shape.head}",
            f"AccountingStoragePort={shape.port + 1}",
            f"AccountingStoragePass={folder}/munge/socket",
            "AccountingStoreFlags=job_comment",
        ]
    if shape.enforce:
        lines += [
            f"AccountingStorageEnforce={','.join(shape.enforce)}",
            "AccountingStorageTRES=gres/gpu,gres/gpu:a",
        ]
    gpus = ""
    if shape.gpus_per_node:
        lines.append("GresTypes=gpu")
        gpus = f" Gres=gpu:{shape.gpus_per_node}"
    for i, name in enumerate(shape.names):
        where = f"NodeHostname={name} NodeAddr={shape.address(name)} Port={shape.port + 10 + i}"
        lines.append(f"NodeName={name} {where} CPUs={shape.cpus} RealMemory={shape.memory_mib}{gpus}")
    lines += [f"PartitionName={name} {text}" for name, text in shape.partitions]
    return "\n".join([*lines, ""])


def slurmdbd_conf(shape: Shape, folder: Path, user: str) -> str:
    return f"""
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost={socket.gethostname()}
DbdAddr={shape.head}
DbdPort={shape.port + 1}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={shape.port + 2}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.own-pid
""".lstrip()


def gres_conf(shape: Shape, folder: Path) -> str:
    """A GPU must be a character device, whichever."""
    if not shape.gpus_per_node:
        return ""
    files = f"{folder}/dev/gpu[0-{shape.gpus_per_node - 1}]"
    return f"NodeName=n[1-{shape.nodes}] Name=gpu File={files}\n"


def cgroup_conf(cgroups: bool, version: tuple[int, ...]) -> str:
    """Without limits the plugin must not ask systemd for a scope: the nodes' pids are not the host's."""
    if cgroups:
        return (
            "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainCores=no\n"
            "ConstrainDevices=no\nConstrainRAMSpace=yes\nConstrainSwapSpace=no\n"
        )
    return f"CgroupPlugin={'disabled' if version >= (24, 5) else 'cgroup/v1'}\n"
