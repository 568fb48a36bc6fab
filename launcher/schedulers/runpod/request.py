"""Build the request that rents a pod: the rendered form, and the form that is sent to REST or GraphQL."""

from __future__ import annotations

import functools
import gzip
import io
import json
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.planning.cost import hours_of
from launcher.render.values import PodCode
from launcher.rundir.time import stamp
from launcher.schedulers.base import Prepared, Request, SchedulerError
from launcher.schedulers.over_ssh import snapshot
from launcher.schedulers.prepare import about, target
from launcher.schedulers.runpod.errors import ApiError, Fate, LostAnswerError
from launcher.schedulers.runpod.handle import pod_run_dir
from launcher.schedulers.runpod.offers import CLOUD, Market, Need, Offer, query_market
from launcher.schedulers.runpod.pods import Created, read
from launcher.schedulers.runpod.profile import RunPod
from launcher.schedulers.runpod.scripts import (
    TooLongError,
    brings_code,
    notes,
    pod_workdir,
    scripts,
)
from launcher.spec import variables
from launcher.spec.quantities import format_bytes

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.schedulers.runpod.api import Client
    from launcher.spec.job import Job

DEFAULT_PYTHON = "python3"
UNPLANNED = "or rent it anyway with --unplanned"
NOT_PLANNED = (
    "it is unknown whether the job fits: run `launcher plan JOB -c CLUSTER` once (it needs torch, and may "
    f"take a minute), {UNPLANNED}"
)
NO_HOST = (
    "and `node.memory` is not set in the profile: RunPod chooses a host by its memory only for a single pod "
    "with `server_limit: true`. Set it, "
)
SHOWN = 4
"Maximum number of offers to show."
_INPUTS = {
    "podFindAndDeployOnDemand": "PodFindAndDeployOnDemandInput",
    "podRentInterruptable": "PodRentInterruptableInput",
    "deployCpuPod": "deployCpuPodInput",
}
WITHOUT = (
    "only RunPod's GraphQL API rents a pod that RunPod itself ends in time: give the API key access to "
    "GraphQL, or set `server_limit: false` in the profile; then only launcher ends the pod "
    "(docs/runpod.md)"
)


@dataclass(frozen=True)
class PodPrepared(Prepared):
    """A run that is rendered for RunPod."""

    others: tuple[PodPrepared, ...] = ()
    "The same run, planned for the profile's other GPU types."
    archive: bytes | None = None
    "The job's code, if it is too large for the start script."
    market: Market | None = None
    "What can be rented for the run, if RunPod has been asked."
    pause: ApiError | None = None
    "The error in which RunPod asked for a pause before it is asked again."

    @property
    def section(self) -> RunPod:
        return RunPod.used_by(self.request.cluster)

    @property
    def gpu_id(self) -> str | None:
        """The GPU type that the run is planned for, or None for a CPU pod."""
        return self.section.gpu_id if self.request.plan.layout.gpus_per_node else None

    @property
    def why_unplanned(self) -> str | None:
        """Why it is unknown whether the job fits on this GPU type, or None.

        It is None for a command that declares no model, for which this is never known.
        """
        job, plan = self.request.job, self.request.plan
        if not plan.layout.gpus_per_node:
            return None
        if plan.estimate is None and (job.task is not None or job.plan.model is not None):
            return NOT_PLANNED
        needed = _host_memory(job, plan)
        if needed is None or self.request.cluster.node.memory is not None:
            return None
        if host_gb(self.section, job, plan) is not None:
            return None
        if job.resources.memory_per_node is not None:
            what, instead = "resources.memory_per_node asks for", "leave memory_per_node out"
        else:
            what, instead = "its plan keeps in host memory", "fix recipe.offload=none"
        return f"{what} {format_bytes(needed)} per node, {NO_HOST}{instead}, {UNPLANNED}"

    @property
    def needs(self) -> list[Need]:
        """What the run needs, for each GPU type that may be rented."""
        needs = []
        for prepared in (self, *self.others):
            if prepared.why_unplanned is not None and not self.section.unplanned:
                continue
            plan, job = prepared.request.plan, prepared.request.job
            hours = hours_of(job.steps, job.batch.global_, plan.samples_per_second)
            layout = plan.layout
            on_host = host_gb(self.section, job, plan)
            needs.append(Need(prepared.gpu_id, layout.gpus_per_node, layout.nodes, hours, on_host))
        return needs


def host_gb(section: RunPod, job: Job, plan: Plan) -> int | None:
    """Return the GB (10^9 bytes) of host memory to request for a pod with GPUs, or None if it needs none, or
    if the RunPod request has no such field."""
    layout = plan.layout
    if not layout.gpus_per_node or mutation(section, layout.nodes, layout.gpus_per_node) is None:
        return None
    needed = _host_memory(job, plan)
    return None if needed is None else math.ceil(needed / 10**9)


def _host_memory(job: Job, plan: Plan) -> int | None:
    """Return the bytes of host memory that a node must have: `resources.memory_per_node`, or else what the
    ranks of an offloading recipe need. None if neither is given."""
    if job.resources.memory_per_node is not None:
        return job.resources.memory_per_node
    return plan.estimate.host_per_node if plan.estimate is not None and plan.recipe.offloads else None


def prepare(request: Request) -> PodPrepared:
    """Render the run for each GPU type of the request. Raises RenderError, SchedulerError, OSError."""
    code = snapshot.of_request(request) if brings_code(request.job) else None
    by_gpu = [_prepare_for_gpu(each, code) for each in (request, *request.others)]
    _refuse(by_gpu[0])
    notes = code.notes if code is not None else ()
    return replace(by_gpu[0], others=tuple(by_gpu[1:]), warnings=(*by_gpu[0].warnings, *notes))


def market_for(client: Client, prepared: PodPrepared) -> Market:
    """Query RunPod for what can be rented for the run. Raises SchedulerError."""
    seconds = prepared.section.max_seconds(prepared.request.job)
    market = query_market(client, prepared.section, prepared.needs, seconds)
    if prepared.section.unplanned:
        return market
    left_out = [
        f"{option.gpu_id}: {why}" for option in (prepared, *prepared.others) if (why := option.why_unplanned)
    ]
    return replace(market, left_out=(*left_out, *market.left_out))


def order_by_offer(prepared: PodPrepared, market: Market) -> PodPrepared:
    """Put the GPU type of the first offer first, so that launcher shows what it tries first."""
    ordered = [prepared, *prepared.others]
    if market.offers:
        ordered.sort(key=lambda option: option.gpu_id != market.offers[0].need.gpu_id)
    return replace(ordered[0], others=tuple(replace(option, others=()) for option in ordered[1:]))


def offer_lines(market: Market, budget: float | None) -> tuple[str, ...]:
    """Describe the offers to the user, before anything is rented."""
    lines = [
        f"{'rents' if not index else 'else'} {offer}" for index, offer in enumerate(market.offers[:SHOWN])
    ]
    if market.offers and (why := market.offers[0].unfinished(budget)) is not None:
        lines.insert(1, f"it {why}")
    if len(market.offers) > SHOWN:
        lines.append(f"and {len(market.offers) - SHOWN} more offers")
    lines += [f"not rented: {why}" for why in market.left_out[:SHOWN]]
    if len(market.left_out) > SHOWN:
        lines.append(f"and {len(market.left_out) - SHOWN} more that launcher does not rent")
    return tuple(lines)


def _prepare_for_gpu(request: Request, code: snapshot.Snapshot | None) -> PodPrepared:
    section = RunPod.used_by(request.cluster)
    run_dir = pod_run_dir(request.cluster.paths.runs, section.volume_path, request.run_id)
    workdir = pod_workdir(request.cluster, request.job, run_dir, code.digest if code is not None else None)
    layout = request.plan.layout
    record = about(request).replace(workdir=workdir)
    carried = {
        "run.json": json.dumps(record.as_json(), ensure_ascii=False),
        "plan.json": json.dumps(request.plan.model_dump(mode="json"), ensure_ascii=False),
    }
    python = request.cluster.paths.python or DEFAULT_PYTHON
    where, archive = replace(target(request, run_dir, workdir, python, carried), secrets_given=True), None
    if code is not None:
        where = replace(where, code=PodCode(code.digest, pack(code)))
    try:
        files = scripts(where)
    except TooLongError:
        if code is None:
            raise
        where, archive = replace(where, code=PodCode(code.digest, None)), pack(code)
        files = scripts(where)
    return PodPrepared(
        request=request,
        run_dir=run_dir,
        files=files,
        target=where,
        command=command(section, layout.nodes, layout.gpus_per_node),
        about=record,
        warnings=(*request.plan.warnings, *notes(where)),
        archive=archive,
    )


def command(section: RunPod, nodes: int, gpus: int) -> tuple[str, ...]:
    """Return the request that rents the pod, in the form shown to the user."""
    if (name := mutation(section, nodes, gpus)) is not None:
        return ("POST", "/graphql", name)
    return ("POST", "/v2/clusters" if nodes > 1 else "/v2/pods")


def _refuse(prepared: PodPrepared) -> None:
    """Refuse combinations that RunPod does not offer. Raises SchedulerError."""
    section, layout = prepared.section, prepared.request.plan.layout
    if section.bid_per_gpu is None:
        return
    if layout.nodes > 1:
        raise SchedulerError("runpod.bid_per_gpu: RunPod's clusters are not interruptible: leave it out")
    if not layout.gpus_per_node:
        raise SchedulerError("runpod.bid_per_gpu: a CPU pod is not interruptible: leave it out")
    if section.registry_id is not None:
        raise SchedulerError("runpod.registry_id: an interruptible pod cannot use a private registry")


def with_prices(prepared: PodPrepared, lines: Sequence[str]) -> PodPrepared:
    return replace(prepared, warnings=(*prepared.warnings, *lines))


def scripts_request(scripts: Path) -> dict[str, object]:
    """Return the rendered create request. Raises SchedulerError."""
    for name in ("create-pod.json", "create-cluster.json"):
        if (scripts / name).is_file():
            body = json.loads((scripts / name).read_text(encoding="utf-8"))
            assert isinstance(body, dict)
            return body
    raise SchedulerError(f"{scripts} holds no create request for RunPod")


@functools.lru_cache(maxsize=2)
def pack(code: snapshot.Snapshot) -> bytes:
    """Pack the job's code as tar.gz. Equal content gives equal bytes. Raises OSError."""
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb", mtime=0, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for entry in code.entries:
            info = tarfile.TarInfo(entry.path)
            info.mode = entry.mode
            if entry.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                tar.addfile(info)
                continue
            data = (code.root / entry.path).read_bytes()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def secret_values(job: Job) -> dict[str, str]:
    """Read the values of the secrets that RunPod does not store. Raises SchedulerError."""
    from launcher.supervise.secrets import SecretError, read_secrets

    try:
        return read_secrets([secret for secret in job.secrets if secret.runpod is None])
    except SecretError as error:
        raise SchedulerError(f"secrets: {error}") from None


def for_offer(
    scripts: Path, section: RunPod, offer: Offer, number: int, secrets: Mapping[str, str], now: float
) -> dict[str, Any]:
    """Complete the rendered request for one offer with its deadline and the secrets, which are in no file.

    `now` is the time by RunPod's clock.
    """
    body: dict[str, Any] = dict(scripts_request(scripts))
    deadline = int(now) + offer.max_seconds
    if section.no_server_limit(offer.need.nodes) is None:
        deadline -= own_end_before(offer.max_seconds)
    body["env"] = {
        **body["env"],
        variables.SUBMISSION: str(number),
        variables.MAX_SECONDS: str(offer.max_seconds),
        variables.DEADLINE: str(deadline),
        variables.SECRETS_BY_NAME: "1",
        **secrets,
    }
    if offer.data_center is not None:
        body["dataCenterIds"] = [offer.data_center]
    if "compute" in body:
        body["compute"] = {**body["compute"], "gpuTypeId": offer.need.gpu_id}
        return body
    body["cloud"] = CLOUD
    if offer.need.gpu_id is not None:
        body["gpu"] = {**body["gpu"], "id": offer.need.gpu_id}
    return body


def own_end_before(seconds: int) -> int:
    """Return the seconds between the start script's deadline and RunPod's own.

    In this time the run records how it ended. The script waits 180 s between SIGTERM and SIGKILL.
    """
    return min(180, seconds // 20)


def mutation(section: RunPod, nodes: int, gpus: int) -> str | None:
    """Return the name of the GraphQL mutation that rents the pod, or None to use REST.

    GraphQL has `terminateAfter`, with which RunPod itself ends the pod, and `minMemoryInGb`. REST has
    neither. Return None if there is no such mutation for this pod, or if the profile does not want the limit.
    """
    if section.no_server_limit(nodes) is not None:
        return None
    if not gpus:
        return "deployCpuPod"
    return "podFindAndDeployOnDemand" if section.bid_per_gpu is None else "podRentInterruptable"


def rent_by_graphql(
    client: Client, section: RunPod, name: str, offer: Offer, body: Mapping[str, Any]
) -> tuple[str, float]:
    """Rent a pod with GraphQL and return (id, USD per hour); the price is 0 if the answer has none.

    `body` is the REST request. Raises ApiError.
    """
    query = f"mutation rent($input: {_INPUTS[name]}!) {{ {name}(input: $input) {{ id costPerHr }} }}"
    try:
        data = client.graphql(query, {"input": _input(section, offer, body, client.now())})
    except LostAnswerError:
        raise
    except ApiError as error:
        if section.bid_per_gpu is None and _refuses_the_request(error):
            raise ApiError(f"{error}; {WITHOUT}", error.status, error.fate, error.wait) from None
        raise
    if data.get(name) is None:
        raise ApiError("RunPod: GraphQL: the answer has neither a pod nor an error", 200, Fate.SKIP)
    created = read(Created, data[name], f"GraphQL {name}")
    return created.id, created.usd_per_hour


def _refuses_the_request(error: ApiError) -> bool:
    """Return whether RunPod refuses every such request: the key lacks GraphQL, or the field is gone."""
    return error.status in (400, 401, 403, 404, 422) or (error.status == 200 and error.fate is Fate.STOP)


def _input(section: RunPod, offer: Offer, body: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Translate the REST request to GraphQL's input."""
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
        "terminateAfter": stamp(now + offer.max_seconds),
        **(_gpu(section, offer, body["gpu"]) if "gpu" in body else _cpu(offer, body["cpu"])),
    }
    return {key: value for key, value in wanted.items() if value is not None}


def _gpu(section: RunPod, offer: Offer, gpu: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "gpuTypeId": gpu["id"],
        "gpuCount": gpu["count"],
        "allowedCudaVersions": gpu.get("allowedCudaVersions"),
        "volumeInGb": 0,
        "bidPerGpu": section.bid_per_gpu,
        "minMemoryInGb": offer.need.host_gb,
    }


def _cpu(offer: Offer, cpu: Mapping[str, Any]) -> dict[str, Any]:
    """Return a CPU pod's `instanceId`: flavor, vCPUs and GB of memory, such as `cpu3c-2-4`."""
    return {"instanceId": f"{cpu['id']}-{cpu['vcpuCount']}-{offer.ram_gb:g}"}
