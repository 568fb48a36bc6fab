"""What RunPod answers, as far as it is needed: of the documented types, or one clear error."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.schedulers.runpod.errors import HostileAnswerError, clean

Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,100}$")]
"It becomes a part of addresses and of handles."
Name = Annotated[str, Field(max_length=200)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Stock = Literal["NONE", "LOW", "MEDIUM", "HIGH"]
A = TypeVar("A", bound="Answer")


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Membership(Answer):
    id: Id
    rank: int | None = None


class Held(Answer):
    id: Name
    count: int = 1


class Pod(Answer):
    id: Id
    name: str
    status: Literal["PROVISIONING", "STARTING", "RUNNING", "EXITED", "ERROR", "TERMINATED"]
    cost: Money
    "USD per hour as it is billed."
    dataCenterId: Name | None = None  # noqa: N815
    gpu: Held | None = None
    cluster: Membership | None = None
    createdAt: Name = ""  # noqa: N815

    @property
    def living(self) -> bool:
        return self.status in ("PROVISIONING", "STARTING", "RUNNING")


class Created(Answer):
    id: Id
    costPerHr: Money = 0.0  # noqa: N815


class Pods(Answer):
    pods: list[Pod]


class Cluster(Answer):
    id: Id
    name: str
    dataCenterId: Name | None = None  # noqa: N815
    createdAt: Name = ""  # noqa: N815


class Clusters(Answer):
    clusters: list[Cluster]


class Place(Answer):
    id: Name
    availability: Stock


class Prices(Answer):
    secure: Money
    community: Money


class Counts(Answer):
    secure: int
    community: int


class GpuType(Answer):
    id: Name
    memory: int
    secure: bool
    community: bool
    price: Prices
    "USD per hour of one GPU."
    maxCount: Counts  # noqa: N815
    availability: Stock | None = None
    dataCenters: list[Place] = []  # noqa: N815


class GpuTypes(Answer):
    gpus: list[GpuType]


class CpuPrice(Answer):
    securePerVcpu: Money  # noqa: N815


class CpuType(Answer):
    id: Name
    ramGbPerVcpu: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # noqa: N815
    price: CpuPrice
    availability: Stock | None = None
    dataCenters: list[Place] = []  # noqa: N815


class CpuTypes(Answer):
    cpus: list[CpuType]


class Volume(Answer):
    id: Id
    dataCenter: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,40}$")]  # noqa: N815


class LogLine(Answer):
    line: str
    ts: str = ""
    source: str = ""


def read(kind: type[A], value: Any, what: str) -> A:
    """Raises HostileAnswerError; what stood in the answer is not shown, it may hold secrets."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise HostileAnswerError(
            f"RunPod: {what}: not what its API promises: {clean(where)}: {clean(first['msg'])}"
        ) from None
