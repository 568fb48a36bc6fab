"""The GraphQL operations that REST v2 lacks: spot pods, and a time at which RunPod itself ends a pod.

This is not a full GraphQL server. A request has one field. Its argument `input` is a variable or an object of
variables and constants. The answer holds every field that this server knows, even if it was not requested.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any, Literal

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launcher.sandbox import catalogue
from launcher.sandbox.cloud import Cloud
from launcher.sandbox.guard import Guard, require_account_key
from launcher.sandbox.placing import NO_CAPACITY
from launcher.sandbox.problem import ProblemError
from launcher.sandbox.records import Pod, seconds
from launcher.sandbox.request_bodies import CreatePod, RequestBody, Text

_FIELD = re.compile(
    r"\b(?P<name>podRentInterruptable|podFindAndDeployOnDemand|deployCpuPod|podTerminate|podStop|podResume|pod"
    r"|gpuTypes)\b"
    r"\s*(\(\s*input\s*:\s*(\$(?P<variable>\w+)|(?P<object>\{[^}]*\}))\s*\))?"
)
_PAIR = re.compile(r'(\w+)\s*:\s*(\$\w+|"(?:[^"\\]|\\.)*"|[-\w.]+)')


class Variable(RequestBody):
    key: Text
    value: str


class _Deploy(RequestBody):
    name: Text
    imageName: Text  # noqa: N815
    cloudType: Literal["SECURE", "COMMUNITY", "ALL"] = "ALL"  # noqa: N815
    dockerArgs: str = ""  # noqa: N815
    containerDiskInGb: int = Field(20, ge=1)  # noqa: N815
    volumeMountPath: str = "/workspace"  # noqa: N815
    networkVolumeId: str | None = None  # noqa: N815
    dataCenterId: str | None = None  # noqa: N815
    ports: str = ""
    env: list[Variable] = []
    startSsh: bool = False  # noqa: N815
    startJupyter: bool = False  # noqa: N815
    containerRegistryAuthId: str | None = None  # noqa: N815
    templateId: str | None = None  # noqa: N815
    stopAfter: str | None = None  # noqa: N815
    terminateAfter: str | None = None  # noqa: N815

    def computing(self) -> dict[str, Any]:
        """Return the GPU or CPU fields of the REST request."""
        raise NotImplementedError

    def mounts(self) -> dict[str, Any]:
        if self.networkVolumeId is None:
            return {}
        return {"network": [{"volumeId": self.networkVolumeId, "path": self.volumeMountPath}]}

    def body(self) -> CreatePod:
        return CreatePod.model_validate(
            {
                "name": self.name,
                "image": self.imageName,
                **self.computing(),
                "cloud": "COMMUNITY" if self.cloudType == "COMMUNITY" else "SECURE",
                "args": self.dockerArgs,
                "disk": self.containerDiskInGb,
                "env": {variable.key: variable.value for variable in self.env},
                "ports": [port for port in self.ports.split(",") if port],
                "dataCenterIds": [self.dataCenterId] if self.dataCenterId else [],
                "mounts": self.mounts(),
                "registry": self.containerRegistryAuthId,
            }
        )

    def limit(self) -> float | None:
        """Return when the pod is ended, in seconds since the epoch, or None. Raises ProblemError."""
        if self.terminateAfter is None:
            return None
        try:
            limit = seconds(self.terminateAfter)
        except ValueError:
            raise ProblemError(400, f"terminateAfter: {self.terminateAfter!r} is not a time") from None
        if limit <= time.time():
            raise ProblemError(400, "terminateAfter has passed already")
        return limit


class Deploy(_Deploy):
    """The fields of PodRentInterruptableInput and PodFindAndDeployOnDemandInput that launcher uses."""

    gpuTypeId: Text  # noqa: N815
    gpuCount: int = Field(1, ge=1)  # noqa: N815
    bidPerGpu: float | None = Field(None, gt=0, strict=False)  # noqa: N815
    volumeInGb: int = 0  # noqa: N815
    supportPublicIp: bool = False  # noqa: N815
    minVcpuCount: int = 1  # noqa: N815
    minMemoryInGb: int = 1  # noqa: N815
    allowedCudaVersions: list[str] = []  # noqa: N815
    minCudaVersion: str | None = None  # noqa: N815

    def computing(self) -> dict[str, Any]:
        gpu = {"id": self.gpuTypeId, "count": self.gpuCount, "allowedCudaVersions": self.allowedCudaVersions}
        return {"gpu": gpu}

    def mounts(self) -> dict[str, Any]:
        if self.networkVolumeId is None and self.volumeInGb:
            return {"persistent": {"size": self.volumeInGb, "path": self.volumeMountPath}}
        return super().mounts()


class DeployCpu(_Deploy):
    """The fields of deployCpuPodInput that launcher uses. It has no `volumeInGb`."""

    instanceId: str = Field(pattern=r"^[a-z0-9]+-\d+-[\d.]+$")  # noqa: N815

    def computing(self) -> dict[str, Any]:
        flavor, vcpu, memory = self.instanceId.split("-")
        flavor_ = catalogue.CPUS.get(flavor)
        if flavor_ is None or float(memory) != flavor_.ram_per_vcpu * int(vcpu):
            raise ProblemError(400, f"instanceId: {self.instanceId} does not exist")
        return {"cpu": {"id": flavor, "vcpuCount": int(vcpu)}}


class GraphQL:
    """The GraphQL route."""

    def __init__(self, cloud: Cloud, guard: Guard) -> None:
        self.cloud = cloud
        self.guard = guard

    def routes(self) -> list[Route]:
        return [Route("/graphql", self.guard(self.answer), methods=["POST"])]

    async def answer(self, request: Request) -> Response:
        """Answer a request. Errors have status 200, as RunPod's do."""
        require_account_key(request)
        try:
            body = json.loads(await request.body())
            name, input_ = _parse_query(body["query"], body.get("variables") or {})
        except (ValueError, KeyError, TypeError) as error:
            return _error(f"the query is not understood: {error}", "GRAPHQL_VALIDATION_FAILED")
        try:
            return JSONResponse({"data": {name: self._do(name, input_)}})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            return _error(f'Variable "$input": field "{where}": {first["msg"]}', "BAD_USER_INPUT")
        except ProblemError as problem:
            return _error(problem.detail, "RUNPOD")

    def _do(self, name: str, input_: dict[str, Any]) -> Any:
        if name == "gpuTypes":
            return [_gpu_type(gpu_type) for gpu_type in catalogue.GPUS.values()]
        if name == "deployCpuPod":
            cpu = DeployCpu.model_validate(input_)
            return _pod(self.cloud.create(cpu.body(), terminate_after=cpu.limit()))
        if name in ("podRentInterruptable", "podFindAndDeployOnDemand"):
            return self._deploy(Deploy.model_validate(input_), interruptible=name == "podRentInterruptable")
        pod = self.cloud.pods.get(str(input_.get("podId")))
        if name == "pod":
            return None if pod is None else _pod(pod)
        if pod is None:
            raise ProblemError(404, "pod not found to " + name.removeprefix("pod").lower())
        if name == "podTerminate":
            self.cloud.background(self.cloud.terminate(pod, "deleted"))
            return None
        if name == "podStop":
            self.cloud.background(self.cloud.stop(pod, "stopped"))
        else:
            self.cloud.start(pod)
        return _pod(pod)

    def _deploy(self, deploy: Deploy, interruptible: bool) -> dict[str, Any]:
        if interruptible != (deploy.bidPerGpu is not None):
            raise ProblemError(400, "podRentInterruptable needs bidPerGpu, and no other mutation accepts it")
        gpu_type = catalogue.GPUS.get(deploy.gpuTypeId)
        if gpu_type is not None and deploy.minMemoryInGb > gpu_type.host * deploy.gpuCount:
            raise ProblemError(400, NO_CAPACITY)
        return _pod(self.cloud.create(deploy.body(), interruptible, deploy.bidPerGpu, deploy.limit()))


def _parse_query(query: str, variables: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the query's field and its input. Raises ValueError."""
    inside = query[query.index("{") + 1 :]
    match = _FIELD.search(inside)
    if match is None:
        raise ValueError("it has none of the fields that this server knows")
    if match["variable"]:
        input_ = variables[match["variable"]]
        if not isinstance(input_, dict):
            raise ValueError(f"variable {match['variable']} is not an object")
        return match["name"], input_
    pairs = _PAIR.findall(match["object"] or "")
    return match["name"], {
        key: variables[value[1:]] if value.startswith("$") else json.loads(value) for key, value in pairs
    }


def _error(message: str, code: str) -> Response:
    return JSONResponse({"errors": [{"message": message, "extensions": {"code": code}}], "data": None})


def _pod(pod: Pod) -> dict[str, Any]:
    status = "RUNNING" if pod.live else "EXITED" if pod.status == "ERROR" else pod.status
    return {
        "id": pod.id, "name": pod.name, "desiredStatus": status, "costPerHr": pod.price,
        "imageName": pod.image, "machineId": f"machine-{pod.centre}",
        "machine": {"dataCenterId": pod.centre, "podHostId": pod.id},
        "gpuCount": (pod.gpu or {}).get("count", 0),
        "podType": "INTERRUPTABLE" if pod.interruptible else "RESERVED",
    }  # fmt: skip


def _gpu_type(gpu_type: catalogue.Gpu) -> dict[str, Any]:
    return {
        "id": gpu_type.id,
        "displayName": gpu_type.name,
        "memoryInGb": gpu_type.memory,
        "securePrice": gpu_type.secure,
        "communityPrice": gpu_type.community,
        "secureSpotPrice": gpu_type.secure * catalogue.SPOT,
        "communitySpotPrice": gpu_type.community * catalogue.SPOT,
        "lowestPrice": {
            "minimumBidPrice": gpu_type.secure * catalogue.SPOT,
            "uninterruptablePrice": gpu_type.secure,
            "stockStatus": catalogue.best(gpu_type.stock.values()).capitalize(),
        },
    }
