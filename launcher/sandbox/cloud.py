"""Create pods, run them, restart them when their command returns, stop, end and bill them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.sandbox import catalogue
from launcher.sandbox.container import MARK, Container
from launcher.sandbox.faults import Dice
from launcher.sandbox.isolation import Isolation, kill_marked
from launcher.sandbox.placing import place, price_of
from launcher.sandbox.podlog import PodLog
from launcher.sandbox.problem import ProblemError
from launcher.sandbox.records import ACTIONS, Cluster, Ledger, Pod, Seat, Volume
from launcher.sandbox.request_bodies import Container as Body
from launcher.sandbox.request_bodies import CreateCluster, CreatePod, GpuConfig
from launcher.supervise.interface import own_address

INTERRUPTED_GRACE = 5.0
"Seconds between SIGTERM and SIGKILL when a spot pod is interrupted."


@dataclass(frozen=True)
class Pace:
    """Duration of each step in seconds."""

    provisioning: float = 1.0
    pull: float = 1.0
    restart: float = 1.0
    grace: float = 10.0
    "Time between SIGTERM and SIGKILL when a pod is ended."


@dataclass
class Cloud:
    """All pods, clusters and volumes of the sandbox, with their records in `folder`."""

    folder: Path
    isolation: Isolation
    dice: Dice
    pace: Pace
    api: str = ""
    "Base URL of the API for the pods. Known once the server listens."
    pods: dict[str, Pod] = field(default_factory=dict)
    clusters: dict[str, Cluster] = field(default_factory=dict)
    volumes: dict[str, Volume] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._containers: dict[str, Container] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._halting: set[str] = set()
        self._timers: set[asyncio.Task[None]] = set()
        self.logs: dict[str, PodLog] = {}
        self.gone: list[dict[str, Any]] = []
        "Pods that have been ended."
        (self.folder / "pods").mkdir(parents=True, exist_ok=True)
        self._end_leftover_pods()
        self.ledger = Ledger(self.folder / "ledger.jsonl", time.time())
        self._load_volumes()

    # Volumes

    def volume_folder(self, id: str) -> Path:
        return self.folder / "volumes" / id

    def add_volume(self, volume: Volume) -> Volume:
        self.volume_folder(volume.id).mkdir(parents=True, exist_ok=True)
        self.volumes[volume.id] = volume
        self._save_volumes()
        return volume

    def remove_volume(self, id: str) -> None:
        del self.volumes[id]
        shutil.rmtree(self.volume_folder(id))
        self._save_volumes()

    def _save_volumes(self) -> None:
        _write(self.folder / "volumes.json", [vars(volume) for volume in self.volumes.values()])

    def _load_volumes(self) -> None:
        file = self.folder / "volumes.json"
        for record in json.loads(file.read_text()) if file.exists() else []:
            self.volumes[record["id"]] = Volume(**record)

    # Creation

    def create(
        self,
        body: CreatePod,
        interruptible: bool = False,
        bid: float | None = None,
        terminate_after: float | None = None,
    ) -> Pod:
        if (body.gpu is None) == (body.cpu is None):
            raise ProblemError(400, "exactly one of gpu or cpu must be set")
        if body.cpu is not None and body.mounts.persistent is not None:
            raise ProblemError(400, "mounts.persistent is not valid for CPU pods")
        centre = place(body, body.gpu, self.volumes, self.dice)
        price = self._factor() * price_of(body, bid)
        cpu = None
        if body.cpu is not None:
            flavor = catalogue.CPUS[body.cpu.id]
            memory = int(flavor.ram_per_vcpu * body.cpu.vcpuCount)
            cpu = {"id": body.cpu.id, "vcpuCount": body.cpu.vcpuCount, "memory": memory}
        gpu = {"id": body.gpu.id, "count": body.gpu.count} if body.gpu is not None else None
        pod = self._pod(body, centre, price, gpu, cpu, body.cloud, interruptible)
        pod.registry = body.registry
        pod.terminate_after = terminate_after
        self._begin(pod)
        return pod

    def create_cluster(self, body: CreateCluster) -> Cluster:
        compute = body.compute
        gpu = GpuConfig(id=compute.gpuTypeId, count=compute.gpuCountPerPod)
        centre = place(body, gpu, self.volumes, self.dice)
        gpu_type = catalogue.GPUS[gpu.id]
        price = self._factor() * gpu_type.secure * gpu.count
        now = time.time()
        unlisted = self.dice.happens("unlisted") or 0.0
        cluster = Cluster(self._id(), body.name, body.type, compute.model_dump(), centre, now, now + unlisted)
        address = _address()
        for rank in range(compute.podCount):
            pod = self._pod(body, centre, price, {"id": gpu.id, "count": gpu.count}, None, "SECURE", False)
            pod.seat = Seat(cluster.id, rank, compute.podCount, address, address)
            cluster.pods.append(pod)
        self.clusters[cluster.id] = cluster
        for pod in cluster.pods:
            self._begin(pod)
        return cluster

    def _pod(
        self, body: Body, centre: str, price: float, gpu: dict[str, Any] | None, cpu: dict[str, Any] | None,
        cloud: str, interruptible: bool,
    ) -> Pod:  # fmt: skip
        now = time.time()
        return Pod(
            id=self._id(), name=body.name, image=body.image, args=body.args, env=body.env, disk=body.disk,
            ports=body.ports, mounts=body.mounts.model_dump(exclude_none=True, exclude_defaults=True),
            gpu=gpu, cpu=cpu, cloud=cloud, registry=None, centre=centre, price=round(price, 6),
            key=f"rpa_pod_{secrets.token_hex(16)}", interruptible=interruptible, created=now,
            listed_from=now + (self.dice.happens("unlisted") or 0.0),
        )  # fmt: skip

    def _factor(self) -> float:
        return self.dice.happens("price") or 1.0

    def _id(self) -> str:
        return "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(14))

    # Life

    def _begin(self, pod: Pod) -> None:
        folder = self.folder / "pods" / pod.id
        folder.mkdir(mode=0o700)
        self.pods[pod.id] = pod
        self.logs[pod.id] = PodLog(folder / "log.jsonl")
        volumes = [
            (mount["volumeId"], self.volume_folder(mount["volumeId"]), mount["path"])
            for mount in pod.mounts.get("network", [])
        ]
        if persistent := pod.mounts.get("persistent"):
            (folder / "persistent").mkdir()
            volumes = [("", folder / "persistent", persistent["path"])]
        self._containers[pod.id] = Container(pod, folder, self.isolation, self.logs[pod.id], volumes)
        self._provision(pod)
        self.save()

    def _provision(self, pod: Pod) -> None:
        pod.status = "PROVISIONING"
        self._tasks[pod.id] = asyncio.ensure_future(self._live(pod))

    async def _live(self, pod: Pod) -> None:
        log = self.logs[pod.id]
        if pod.terminate_after is not None:
            self._schedule(
                pod.terminate_after - time.time(), lambda: self.terminate(pod, "terminateAfter has passed")
            )
        await asyncio.sleep(self.pace.provisioning)
        self._set_status(pod, "STARTING")
        self.ledger.open(pod.id, "cpu" if pod.cpu else "gpu", pod.price, time.time())
        log.add("system", f"create container {pod.image}")
        await asyncio.sleep(self.pace.pull + (self.dice.happens("slow-pull") or 0.0))
        if self.dice.happens("pull-error") is not None:
            log.add("system", f"error pulling image: {pod.image}: manifest unknown")
            self.ledger.close(pod.id, time.time())
            self._set_status(pod, "ERROR")
            return
        after = self.dice.happens("interrupt") if pod.interruptible else None
        if after is not None:
            self._schedule(after, lambda: self.interrupt(pod))
        pod.started = time.time()
        self._set_status(pod, "RUNNING")
        while pod.live and pod.id not in self._halting:
            pod.starts += 1
            log.add("system", "start container")
            code = await self._containers[pod.id].run(self.api)
            log.add("system", f"container ended with exit code {code}")
            await asyncio.sleep(self.pace.restart)

    def _set_status(self, pod: Pod, status: str) -> None:
        pod.status = status
        self.save()

    async def _halt(self, pod: Pod, grace: float | None) -> None:
        """End all processes of a pod and its charge."""
        self._halting.add(pod.id)
        await self._containers[pod.id].stop(self.pace.grace if grace is None else grace)
        task = self._tasks.pop(pod.id, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._halting.discard(pod.id)
        pod.halted = time.time()
        self.ledger.close(pod.id, time.time())

    async def stop(self, pod: Pod, why: str, grace: float | None = None) -> None:
        self.logs[pod.id].add("system", f"stop container: {why}")
        await self._halt(pod, grace)
        if not pod.live:
            return
        pod.status = "EXITED"
        pod.started = None
        shutil.rmtree(self.folder / "pods" / pod.id / "disk", ignore_errors=True)
        self.save()

    async def interrupt(self, pod: Pod) -> None:
        if pod.live:
            await self.stop(pod, "the spot instance was taken away", INTERRUPTED_GRACE)

    def start(self, pod: Pod) -> None:
        self._provision(pod)
        self.save()

    async def restart(self, pod: Pod) -> None:
        self.logs[pod.id].add("system", "restart container")
        await self._containers[pod.id].stop(self.pace.grace)

    async def terminate(self, pod: Pod, why: str, grace: float | None = None) -> None:
        """End a pod for good. Returns when no process is left; the API answers earlier."""
        if self.pods.pop(pod.id, None) is None:
            return
        pod.status = "TERMINATED"
        pod.ended = time.time()
        self.logs[pod.id].add("system", f"remove container: {why}")
        index = len(self.gone)
        self.gone.append(pod.summary())
        self.save()
        await self._halt(pod, grace)
        self.gone[index] = pod.summary()
        self.save()
        self.logs.pop(pod.id).close()
        del self._containers[pod.id]
        folder = self.folder / "pods" / pod.id
        for name in ("disk", "persistent", "root"):
            shutil.rmtree(folder / name, ignore_errors=True)

    async def terminate_cluster(self, cluster: Cluster, why: str) -> None:
        if self.clusters.pop(cluster.id, None) is not None:
            await asyncio.gather(*(self.terminate(pod, why) for pod in cluster.pods))

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that takes longer than the API's answer."""
        _keep_task(self._ending, work)

    def _schedule(self, delay: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def wait() -> None:
            await asyncio.sleep(max(0.0, delay))
            self.background(work())

        _keep_task(self._timers, wait())

    async def close(self) -> None:
        """End every pod at once."""
        for task in list(self._timers):
            task.cancel()
        self.clusters.clear()
        for pod in list(self.pods.values()):
            self.background(self.terminate(pod, "the sandbox was ended", 0))
        await asyncio.gather(*(container.stop(0) for container in list(self._containers.values())))
        await asyncio.gather(*self._ending)

    # On disk

    def save(self) -> None:
        live = [pod.summary() for pod in self.pods.values()]
        _write(self.folder / "pods.json", {"live": live, "gone": self.gone})

    def _end_leftover_pods(self) -> None:
        """End the pods of a server that was killed. Kill those of their processes that still run."""
        file = self.folder / "pods.json"
        if not file.exists():
            return
        records = json.loads(file.read_text())
        self.gone = records["gone"]
        for record in records["live"]:
            kill_marked(f"{MARK}={record['id']}")
            shutil.rmtree(self.folder / "pods" / record["id"] / "disk", ignore_errors=True)
            self.gone.append({**record, "status": "TERMINATED", "ended": time.time()})
        self.save()


def allowed(pod: Pod, action: str) -> None:
    if action not in ACTIONS[pod.status]:
        raise ProblemError(409, f"action {action} is not valid for a pod that is {pod.status}")


def _address() -> str:
    """Return this machine's address, which all nodes of a cluster share."""
    try:
        return own_address("203.0.113.1", 9)  # TEST-NET-3 of RFC 5737
    except OSError:
        return "127.0.0.1"


def _keep_task(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    """Start a task and hold a reference to it, because asyncio holds only weak ones."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _write(file: Path, records: Any) -> None:
    new = file.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(json.dumps(records))
    new.replace(file)
