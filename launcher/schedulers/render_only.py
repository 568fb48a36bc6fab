"""RunPod as far as it goes today: everything is rendered, nothing is sent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from launcher.render.render import notes, pod_run_dir, pod_workdir, render_run
from launcher.schedulers.base import Capabilities, Prepared, Request, SchedulerError, Status
from launcher.schedulers.prepare import about, target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.runs.layout import RunDir
    from launcher.schedulers.over_ssh.exchange import Wanted

DEFAULT_PYTHON = "python3"


class RenderOnly:
    """Refuses every verb but `prepare`, and says what to do instead."""

    capabilities = Capabilities(submit=False)
    by_hand = ""
    "How a person sends what was rendered; `DIR` stands for the folder of `launcher render --out`."

    def check(self, prepared: Prepared) -> tuple[str, ...]:
        raise self._refusal(prepared.request.cluster.scheduler)

    def submit(self, prepared: Prepared) -> str:
        raise self._refusal(prepared.request.cluster.scheduler)

    def resume(self, handle: str, again: Prepared | None = None) -> str:
        raise self._refusal(handle)

    def status(self, handle: str) -> Status:
        raise self._refusal(handle)

    def logs(self, handle: str, since: int) -> bytes:
        raise self._refusal(handle)

    def cancel(self, handle: str) -> None:
        raise self._refusal(handle)

    def fetch(self, run: RunDir, wanted: Wanted | None = None) -> None:
        pass

    def where(self, run: RunDir) -> str:
        return str(run.path)

    def remove(self, runs: Sequence[RunDir]) -> None:
        raise self._refusal(runs[0].id)

    def list(self) -> list[Status]:
        return []

    def _refusal(self, what: str) -> SchedulerError:
        return SchedulerError(
            f"{what.partition(':')[0]}: rendering works, submitting does not yet; "
            f"write everything with `launcher render JOB -c CLUSTER --out DIR`, then {self.by_hand}"
        )


class RunPodScheduler(RenderOnly):
    """The pod carries its run directory in its start script and keeps it on the network volume."""

    capabilities = Capabilities(submit=False, multi_node=True)
    by_hand = "send DIR/scripts/create-pod.json (or create-cluster.json) to the RunPod REST v2 API"

    def prepare(self, request: Request) -> Prepared:
        run_dir = pod_run_dir(request.cluster, request.run_id)
        workdir = pod_workdir(request.cluster, request.job, run_dir, str(request.workdir))
        record = {**about(request), "workdir": workdir}
        carried = {
            "run.json": json.dumps(record, ensure_ascii=False),
            "plan.json": json.dumps(request.plan.model_dump(mode="json"), ensure_ascii=False),
        }
        where = target(request, run_dir, workdir, request.cluster.paths.python or DEFAULT_PYTHON, carried)
        several = request.plan.layout.nodes > 1
        return Prepared(
            request=request,
            run_dir=run_dir,
            files=render_run(where),
            target=where,
            command=("POST", "/v2/clusters" if several else "/v2/pods"),
            about=record,
            warnings=(*request.plan.warnings, *notes(where)),
        )
