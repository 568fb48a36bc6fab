"""Routes that RunPod does not have, for tests: read the sandbox's state and inject faults."""

from __future__ import annotations

import json
import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launcher.sandbox import faults
from launcher.sandbox.cloud import Cloud


class Control:
    """The sandbox's own routes."""

    def __init__(self, cloud: Cloud, key: str) -> None:
        self.cloud = cloud
        self.key = key

    def routes(self) -> list[Route]:
        return [
            Route("/sandbox/state", self.state, methods=["GET"]),
            Route("/sandbox/faults", self.set_faults, methods=["PUT"]),
            Route("/sandbox/pods/{id}/interrupt", self.interrupt, methods=["POST"]),
        ]

    async def state(self, request: Request) -> Response:
        if denied := self._denied(request):
            return denied
        return JSONResponse(
            {
                "live": [pod.summary() for pod in self.cloud.pods.values()],
                "gone": self.cloud.gone,
                "clusters": list(self.cloud.clusters),
                "usd": self.cloud.ledger.total(time.time()),
                "faults": self.cloud.dice.record(),
                "fell": self.cloud.dice.counts,
                "isolated": bool(self.cloud.isolation),
            }
        )

    async def set_faults(self, request: Request) -> Response:
        """Set the faults. The body is like the file of `--faults`. Counts and random numbers start again."""
        if denied := self._denied(request):
            return denied
        try:
            new_faults = faults.read(json.loads(await request.body()))
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, 422)
        self.cloud.dice.set(new_faults)
        return JSONResponse(self.cloud.dice.record())

    async def interrupt(self, request: Request) -> Response:
        """Interrupt a spot pod, as RunPod does. Answers when the pod has stopped."""
        if denied := self._denied(request):
            return denied
        pod = self.cloud.pods.get(request.path_params["id"])
        if pod is None:
            return JSONResponse({"detail": "pod not found"}, 404)
        await self.cloud.interrupt(pod)
        return Response(status_code=204)

    def _denied(self, request: Request) -> Response | None:
        if request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"detail": "send RUNPOD_API_KEY as bearer token"}, 401)
