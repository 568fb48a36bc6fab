"""REST v2: pods, clusters, network volumes, catalogue and billing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from launcher.sandbox import billing, catalogue
from launcher.sandbox.cloud import Cloud, allowed
from launcher.sandbox.guard import Guard, require_account_key, require_pod_access
from launcher.sandbox.problem import ProblemError
from launcher.sandbox.records import Cluster, Pod, Volume
from launcher.sandbox.request_bodies import CreateCluster, CreatePod, CreateVolume, PodAction

T = TypeVar("T")


class Rest:
    """The routes of REST v2."""

    def __init__(self, cloud: Cloud, guard: Guard) -> None:
        self.cloud = cloud
        self.guard = guard

    def routes(self) -> list[Route]:
        table = [
            ("GET", "/pods", self.list_pods),
            ("POST", "/pods", self.create_pod),
            ("GET", "/pods/{id}", self.get_pod),
            ("DELETE", "/pods/{id}", self.delete_pod),
            ("POST", "/pods/{id}/action", self.act),
            ("GET", "/pods/{id}/logs", self.logs),
            ("GET", "/clusters", self.list_clusters),
            ("POST", "/clusters", self.create_cluster),
            ("GET", "/clusters/{id}", self.get_cluster),
            ("DELETE", "/clusters/{id}", self.delete_cluster),
            ("GET", "/clusters/{id}/pods", self.cluster_pods),
            ("GET", "/network-volumes", self.list_volumes),
            ("POST", "/network-volumes", self.create_volume),
            ("GET", "/network-volumes/{id}", self.get_volume),
            ("DELETE", "/network-volumes/{id}", self.delete_volume),
            ("GET", "/catalog/gpus", self.gpus),
            ("GET", "/catalog/gpus/{id}", self.gpu),
            ("GET", "/catalog/cpus", self.cpus),
            ("GET", "/catalog/cpus/{id}", self.cpu),
            ("GET", "/catalog/datacenters", self.centres),
            ("GET", "/catalog/datacenters/{id}", self.centre),
            ("GET", "/billing/pods", self.billed),
        ]
        return [Route("/v2" + path, self.guard(handler), methods=[method]) for method, path, handler in table]

    # Pods

    async def list_pods(self, request: Request) -> Response:
        require_account_key(request)
        members = request.query_params.get("includeClusterPods") == "true"
        now = time.time()
        records = [
            pod.record(now)
            for pod in self.cloud.pods.values()
            if pod.listed_from <= now and (members or pod.seat is None)
        ]
        return JSONResponse({"pods": records})

    async def create_pod(self, request: Request) -> Response:
        require_account_key(request)
        pod = self.cloud.create(await self.guard.body(request, CreatePod))
        return JSONResponse(pod.record(time.time()), 201)

    async def get_pod(self, request: Request) -> Response:
        return JSONResponse(self._pod(request).record(time.time()))

    async def delete_pod(self, request: Request) -> Response:
        pod = self._pod(request)
        _require_no_cluster(pod)
        self.cloud.background(self.cloud.terminate(pod, "deleted"))
        return Response(status_code=204)

    async def act(self, request: Request) -> Response:
        pod = self._pod(request)
        action = (await self.guard.body(request, PodAction)).action
        _require_no_cluster(pod)
        allowed(pod, action)
        if action == "terminate":
            self.cloud.background(self.cloud.terminate(pod, "deleted"))
            return Response(status_code=204)
        if action == "stop":
            self.cloud.background(self.cloud.stop(pod, "stopped"))
        elif action == "start":
            self.cloud.start(pod)
        else:
            self.cloud.background(self.cloud.restart(pod))
        return JSONResponse(pod.record(time.time()))

    async def logs(self, request: Request) -> Response:
        pod = self._pod(request)
        log = self.cloud.logs[pod.id]
        query = request.query_params
        source = query.get("source")
        if source not in (None, "container", "system"):
            raise ProblemError(422, f"source: {source!r} is not one of container, system")
        try:
            tail = int(query.get("tail", "100"))
            after = log.cursor(request.headers.get("last-event-id"), query.get("since"), tail, source)
        except ValueError as error:
            raise ProblemError(422, f"tail, since or Last-Event-ID: {error}") from None
        if not 0 <= tail <= 5000:
            raise ProblemError(422, "tail: 0 to 5000")
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(log.follow(source, after), headers=headers, media_type="text/event-stream")

    def _pod(self, request: Request) -> Pod:
        pod = _named(request, self.cloud.pods, f"pod {request.path_params['id']}")
        require_pod_access(request, pod)
        return pod

    # Clusters

    async def list_clusters(self, request: Request) -> Response:
        require_account_key(request)
        now = time.time()
        records = [cluster.record() for cluster in self.cloud.clusters.values() if cluster.listed_from <= now]
        return JSONResponse({"clusters": records})

    async def create_cluster(self, request: Request) -> Response:
        require_account_key(request)
        cluster = self.cloud.create_cluster(await self.guard.body(request, CreateCluster))
        return JSONResponse(cluster.record(), 201)

    async def get_cluster(self, request: Request) -> Response:
        return JSONResponse(self._cluster(request).record())

    async def cluster_pods(self, request: Request) -> Response:
        now = time.time()
        return JSONResponse({"pods": [pod.record(now) for pod in self._cluster(request).pods]})

    async def delete_cluster(self, request: Request) -> Response:
        self.cloud.background(self.cloud.terminate_cluster(self._cluster(request), "deleted"))
        return Response(status_code=204)

    def _cluster(self, request: Request) -> Cluster:
        cluster = _named(request, self.cloud.clusters, f"cluster {request.path_params['id']}")
        if request.state.pod is not None and request.state.pod not in cluster.pods:
            raise ProblemError(403, "access denied: this key belongs to a pod of another cluster")
        return cluster

    # Volumes

    async def list_volumes(self, request: Request) -> Response:
        require_account_key(request)
        return JSONResponse({"networkVolumes": [one.record() for one in self.cloud.volumes.values()]})

    async def create_volume(self, request: Request) -> Response:
        require_account_key(request)
        body = await self.guard.body(request, CreateVolume)
        if body.dataCenter not in catalogue.CENTRES:
            raise ProblemError(400, f"data center {body.dataCenter} not found")
        volume = Volume(secrets.token_hex(5), body.name, body.size, body.dataCenter)
        return JSONResponse(self.cloud.add_volume(volume).record(), 201)

    async def get_volume(self, request: Request) -> Response:
        return JSONResponse(self._volume(request).record())

    async def delete_volume(self, request: Request) -> Response:
        volume = self._volume(request)
        used = [mount for pod in self.cloud.pods.values() for mount in pod.mounts.get("network", [])]
        if any(mount["volumeId"] == volume.id for mount in used):
            raise ProblemError(409, "the volume is attached to a pod")
        self.cloud.remove_volume(volume.id)
        return Response(status_code=204)

    def _volume(self, request: Request) -> Volume:
        require_account_key(request)
        return _named(request, self.cloud.volumes, f"network volume {request.path_params['id']}")

    # Catalogue and bills

    async def gpus(self, request: Request) -> Response:
        available = _availability(request)
        return JSONResponse({"gpus": [catalogue.gpu(one, available) for one in catalogue.GPUS.values()]})

    async def gpu(self, request: Request) -> Response:
        one = _named(request, catalogue.GPUS, "gpu type")
        return JSONResponse(catalogue.gpu(one, _availability(request)))

    async def cpus(self, request: Request) -> Response:
        available = _availability(request)
        return JSONResponse({"cpus": [catalogue.cpu(one, available) for one in catalogue.CPUS.values()]})

    async def cpu(self, request: Request) -> Response:
        one = _named(request, catalogue.CPUS, "cpu flavor")
        return JSONResponse(catalogue.cpu(one, _availability(request)))

    async def centres(self, request: Request) -> Response:
        include = _included(request)
        return JSONResponse({"dataCenters": [catalogue.centre(id, include) for id in catalogue.CENTRES]})

    async def centre(self, request: Request) -> Response:
        _named(request, catalogue.CENTRES, "data center")
        return JSONResponse(catalogue.centre(request.path_params["id"], _included(request)))

    async def billed(self, request: Request) -> Response:
        require_account_key(request)
        return JSONResponse(billing.pods(self.cloud.ledger, dict(request.query_params), time.time()))


def _named(request: Request, items: Mapping[str, T], what: str) -> T:
    """Return the item that the request's path names. Raises ProblemError."""
    if (item := items.get(request.path_params["id"])) is None:
        raise ProblemError(404, f"{what} not found")
    return item


def _require_no_cluster(pod: Pod) -> None:
    if pod.seat is not None:
        raise ProblemError(409, f"pod {pod.id} belongs to cluster {pod.seat.cluster}; end the cluster")


def _included(request: Request) -> set[str]:
    return {part for value in request.query_params.getlist("include") for part in value.split(",")}


def _availability(request: Request) -> bool:
    wanted = "AVAILABILITY" in _included(request)
    if wanted != ("product" in request.query_params):
        raise ProblemError(400, "include=AVAILABILITY and product belong together")
    return wanted
