"""Request bodies that this server understands. RunPod's OpenAPI document, if given, adds further checks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(min_length=1)]


class RequestBody(BaseModel):
    """Base class of request bodies. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NetworkMount(RequestBody):
    volumeId: str  # noqa: N815
    path: str


class PersistentMount(RequestBody):
    size: int = Field(ge=10)
    path: str


class Mounts(RequestBody):
    persistent: PersistentMount | None = None
    network: list[NetworkMount] = Field([], max_length=1)


class GpuConfig(RequestBody):
    id: str
    count: int = Field(1, ge=1)
    allowedCudaVersions: list[str] = []  # noqa: N815
    minCudaVersion: str | None = None  # noqa: N815


class CpuConfig(RequestBody):
    id: Text
    vcpuCount: int = Field(ge=2)  # noqa: N815


class Container(RequestBody):
    name: Text
    image: Text
    args: str = ""
    disk: int = Field(20, ge=1)
    env: dict[str, str] = {}
    ports: list[str] = []
    dataCenterIds: list[str] = []  # noqa: N815
    mounts: Mounts = Mounts()
    startJupyter: bool = False  # noqa: N815
    startSsh: bool = False  # noqa: N815


class CreatePod(Container):
    cloud: Literal["SECURE", "COMMUNITY"] = "SECURE"
    gpu: GpuConfig | None = None
    cpu: CpuConfig | None = None
    registry: str | None = None
    globalNetworking: bool = False  # noqa: N815


class Compute(RequestBody):
    gpuTypeId: Text  # noqa: N815
    gpuCountPerPod: int = Field(ge=1)  # noqa: N815
    podCount: int = Field(ge=2, le=250)  # noqa: N815


class CreateCluster(Container):
    type: Literal["APPLICATION", "TRAINING", "SLURM", "RAY"]
    compute: Compute


class PodAction(RequestBody):
    action: Literal["start", "stop", "restart", "terminate"]


class CreateVolume(RequestBody):
    name: Text
    size: int = Field(ge=10, le=4096)
    dataCenter: Text  # noqa: N815
    type: Literal["STANDARD", "HIGH_PERFORMANCE"] = "STANDARD"
