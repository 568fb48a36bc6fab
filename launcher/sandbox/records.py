"""Values that the sandbox stores: pods, clusters, volumes and charges."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from launcher.rundir.time import stamp

LIVE = ("PROVISIONING", "STARTING", "RUNNING")
ACTIONS = {
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
    "TERMINATED": [],
}


def seconds(text: str) -> float:
    """Parse an RFC 3339 time into seconds since the epoch. Raises ValueError."""
    moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


@dataclass(frozen=True)
class Volume:
    """A network volume."""

    id: str
    name: str
    size: int
    "Size in GB."
    centre: str

    def record(self) -> dict[str, Any]:
        return {
            "id": self.id, "name": self.name, "size": self.size, "dataCenter": self.centre, "type": "STANDARD"
        }  # fmt: skip


@dataclass(frozen=True)
class Seat:
    """A pod's rank and addresses in a cluster."""

    cluster: str
    rank: int
    nodes: int
    address: str
    primary: str


@dataclass
class Pod:
    """A pod and its state."""

    id: str
    name: str
    image: str
    args: str
    env: dict[str, str]
    disk: int
    ports: list[str]
    mounts: dict[str, Any]
    gpu: dict[str, Any] | None
    cpu: dict[str, Any] | None
    cloud: str
    registry: str | None
    centre: str
    price: float
    "USD per hour while the pod is live."
    key: str
    "The pod's own API key, valid for itself and its cluster."
    interruptible: bool = False
    seat: Seat | None = None
    status: str = "PROVISIONING"
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    halted: float | None = None
    "When its last process ended, in seconds since the epoch."
    listed_from: float = 0.0
    terminate_after: float | None = None
    starts: int = 0
    "Number of times its command was started."

    @property
    def live(self) -> bool:
        return self.status in LIVE

    def record(self, now: float) -> dict[str, Any]:
        """Return a `Pod` of RunPod's API."""
        answer: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "actions": ACTIONS[self.status],
            "image": self.image,
            "args": self.args,
            "disk": self.disk,
            "mounts": self.mounts,
            "ports": self.ports,
            "env": self.env,
            "registry": self.registry,
            "cloud": self.cloud,
            "dataCenterId": self.centre,
            "cudaVersion": "12.8" if self.gpu else None,
            "ssh": {"proxy": None, "direct": None},
            "template": None,
            "cost": self.price if self.live else 0.0,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "runtime": None,
            "createdAt": stamp(self.created),
            "startedAt": None if self.started is None else stamp(self.started),
        }
        if self.gpu:
            answer["gpu"] = self.gpu
        if self.cpu:
            answer["cpu"] = self.cpu
        if self.seat:
            answer["cluster"] = {"id": self.seat.cluster, "rank": self.seat.rank, "ip": self.seat.address}
        if self.status == "RUNNING" and self.started is not None:
            gpus = [{"util": 0, "memoryUtil": 0}] * (self.gpu or {}).get("count", 0)
            answer["runtime"] = {"uptime": int(now - self.started), "gpus": gpus, "ports": []}
        return answer

    def summary(self) -> dict[str, Any]:
        """Return the fields kept on disk and shown by the control route, without `env`: it may be secret."""
        return {
            "id": self.id, "name": self.name, "status": self.status, "interruptible": self.interruptible,
            "cluster": self.seat.cluster if self.seat else None, "centre": self.centre, "price": self.price,
            "gpu": self.gpu, "cpu": self.cpu, "created": self.created, "ended": self.ended,
            "halted": self.halted, "starts": self.starts,
        }  # fmt: skip


@dataclass
class Cluster:
    """A cluster of pods."""

    id: str
    name: str
    type: str
    compute: dict[str, Any]
    centre: str
    created: float
    listed_from: float
    pods: list[Pod] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return a `Cluster` of RunPod's API."""
        counts: dict[str, int] = {}
        for pod in self.pods:
            counts[pod.status] = counts.get(pod.status, 0) + 1
        first = self.pods[0]
        return {
            "id": self.id,
            "name": self.name,
            "type": self.type,
            "compute": self.compute,
            "dataCenterId": self.centre,
            "pods": {"total": len(self.pods), "byStatus": counts},
            "network": {"cidr": f"{first.seat.primary}/32" if first.seat else ""},
            "primary": {"podId": first.id, "status": first.status},
            "createdAt": stamp(self.created),
        }


@dataclass(frozen=True)
class Charge:
    """The charge for one pod at one price. `end` is None while the pod runs."""

    pod: str
    kind: str
    "`gpu` or `cpu`."
    start: float
    end: float | None
    usd_per_hour: float

    def usd(self, now: float, first: float = 0.0, last: float = math.inf) -> float:
        """Return the USD for the time within [first, last). Every started second is billed in full."""
        until = self.start + math.ceil((now if self.end is None else self.end) - self.start)
        return max(0.0, min(last, until) - max(first, self.start)) * self.usd_per_hour / 3600


class Ledger:
    """All charges, kept on disk: one line when a charge begins and one when it ends."""

    def __init__(self, file: Path, now: float) -> None:
        self.file = file
        self.charges: dict[tuple[str, float], Charge] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                charge = Charge(**json.loads(line))
                self.charges[charge.pod, charge.start] = charge
            # The pods of a killed server ended with it. The file's modification time shows when.
            last_alive = min(now, file.stat().st_mtime)
            for charge in [charge for charge in self.charges.values() if charge.end is None]:
                self.close(charge.pod, max(last_alive, charge.start))

    def open(self, pod: str, kind: str, usd_per_hour: float, now: float) -> None:
        self._write(Charge(pod, kind, now, None, usd_per_hour))

    def close(self, pod: str, now: float) -> None:
        for charge in [
            charge for charge in self.charges.values() if charge.pod == pod and charge.end is None
        ]:
            self._write(Charge(charge.pod, charge.kind, charge.start, now, charge.usd_per_hour))

    def keep_alive(self) -> None:
        if any(charge.end is None for charge in self.charges.values()):
            self.file.touch()

    def total(self, now: float) -> float:
        return sum(charge.usd(now) for charge in self.charges.values())

    def _write(self, charge: Charge) -> None:
        self.charges[charge.pod, charge.start] = charge
        with open(self.file, "a") as file:
            file.write(json.dumps(vars(charge)) + "\n")
