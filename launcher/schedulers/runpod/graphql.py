"""Pods that RunPod itself ends after their time (`terminateAfter`): only GraphQL has such a field."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.planning.cost import no_server_limit
from launcher.rundir.time import stamp

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.errors import ApiError
    from launcher.schedulers.runpod.offers import Offer
    from launcher.spec.cluster import RunPod

_INPUTS = {
    "podFindAndDeployOnDemand": "PodFindAndDeployOnDemandInput",
    "podRentInterruptable": "PodRentInterruptableInput",
    "deployCpuPod": "deployCpuPodInput",
}
WITHOUT = (
    "only RunPod's GraphQL API rents a pod that RunPod itself ends in time: give the API key access to "
    "GraphQL, or set `server_limit: false` in the profile, and then nothing but launcher ends the pod "
    "(docs/runpod.md)"
)


def mutation(section: RunPod, nodes: int, gpus: int) -> str | None:
    """The request that rents such a pod; None where RunPod has none or the profile wants none."""
    if no_server_limit(section, nodes) is not None:
        return None
    if not gpus:
        return "deployCpuPod"
    return "podFindAndDeployOnDemand" if section.bid_per_gpu is None else "podRentInterruptable"


def rent(
    client: Client, section: RunPod, name: str, offer: Offer, body: Mapping[str, Any]
) -> tuple[str, float]:
    """Id, and USD per hour where the answer tells. `body` is the request to REST. Raises ApiError."""
    from launcher.schedulers.runpod.answers import Created, read
    from launcher.schedulers.runpod.errors import ApiError, Fate, LostAnswerError

    query = f"mutation rent($input: {_INPUTS[name]}!) {{ {name}(input: $input) {{ id costPerHr }} }}"
    try:
        data = client.graphql(query, {"input": _input(section, offer, body)})
    except LostAnswerError:
        raise
    except ApiError as error:
        if section.bid_per_gpu is None and _refuses_the_request(error):
            raise ApiError(f"{error}; {WITHOUT}", error.status, error.fate, error.wait) from None
        raise
    if data.get(name) is None:
        raise ApiError("RunPod: GraphQL: no pod, and no reason", 200, Fate.SKIP)
    created = read(Created, data[name], f"GraphQL {name}")
    return created.id, created.costPerHr


def _refuses_the_request(error: ApiError) -> bool:
    """Rather than this offer: the key may not use GraphQL, or it has no such field any more."""
    from launcher.schedulers.runpod.errors import Fate

    return error.status in (400, 401, 403, 404, 422) or (error.status == 200 and error.fate is Fate.STOP)


def _input(section: RunPod, offer: Offer, body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request in GraphQL's words."""
    mounts = body.get("mounts", {}).get("network", [])
    wanted = {
        "name": body["name"],
        "imageName": body["image"],
        "dockerArgs": body["args"],
        "cloudType": body["cloud"],
        "containerDiskInGb": body["disk"],
        "networkVolumeId": mounts[0]["volumeId"] if mounts else None,
        "volumeMountPath": mounts[0]["path"] if mounts else None,
        "dataCenterId": offer.data_center,
        "ports": ",".join(body.get("ports", ())) or None,
        "env": [{"key": key, "value": value} for key, value in body["env"].items()],
        "containerRegistryAuthId": body.get("registry"),
        "terminateAfter": stamp(time.time() + offer.max_seconds),
        **(_gpu(section, body["gpu"]) if "gpu" in body else _cpu(offer, body["cpu"])),
    }
    return {key: value for key, value in wanted.items() if value is not None}


def _gpu(section: RunPod, gpu: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "gpuTypeId": gpu["id"],
        "gpuCount": gpu["count"],
        "allowedCudaVersions": gpu.get("allowedCudaVersions"),
        "volumeInGb": 0,
        "bidPerGpu": section.bid_per_gpu,
    }


def _cpu(offer: Offer, cpu: Mapping[str, Any]) -> dict[str, Any]:
    """As `cpu3c-2-4`: the flavor, vCPUs and GB of memory."""
    return {"instanceId": f"{cpu['id']}-{cpu['vcpuCount']}-{offer.ram_gb:g}"}
