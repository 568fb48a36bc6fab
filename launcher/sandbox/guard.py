"""Checks around the handler of each request: API key, rate limit, injected faults and RunPod's contract."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from launcher.sandbox.cloud import Cloud
from launcher.sandbox.contract import Contract
from launcher.sandbox.problem import ProblemError
from launcher.sandbox.records import Pod

Model = TypeVar("Model", bound=BaseModel)
Endpoint = Callable[[Request], Awaitable[Response]]


class Broken(Response):
    """A response whose connection breaks in the middle."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"4096")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})


@dataclass
class Guard:
    """Wraps request handlers with these checks."""

    cloud: Cloud
    key: str
    per_minute: int
    contract: Contract | None

    def __post_init__(self) -> None:
        self._minute = 0
        self._requests = 0

    def __call__(self, handler: Endpoint) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            head = self._limits()
            try:
                answer = await self._guarded(request, handler)
            except ProblemError as problem:
                answer = self._conforming(request, problem.response())
            for name, value in head.items():
                answer.headers[name] = value
            return answer

        return endpoint

    async def _guarded(self, request: Request, handler: Endpoint) -> Response:
        dice = self.cloud.dice
        target = f"{request.method} {request.url.path}"
        self._admit(request)
        if self._requests > self.per_minute:
            raise ProblemError(429, "too many requests", headers={"Retry-After": str(self._seconds_left())})
        if (wait := dice.happens("rate-limit", target)) is not None:
            raise ProblemError(429, "too many requests", headers={"Retry-After": f"{wait:g}"})
        if (status := dice.happens("server-error", target)) is not None:
            raise ProblemError(int(status), "injected: the upstream failed")
        if dice.happens("redirect", target) is not None:
            return RedirectResponse("http://elsewhere.invalid" + request.url.path)
        if self.contract is not None:
            query = dict(request.query_params)
            if wrong := self.contract.wrong_query(request.method, request.url.path, query):
                raise ProblemError(422, "invalid query", wrong)
        answer = self._conforming(request, await handler(request))
        if (wait := dice.happens("slow-answer", target)) is not None:
            await asyncio.sleep(wait)
        return self._with_fault(target, answer)

    def _with_fault(self, target: str, answer: Response) -> Response:
        """Return the answer, or an injected fault in its place. The handler has carried out the request."""
        dice = self.cloud.dice
        if dice.happens("lost-response", target) is not None:
            return Broken()
        if dice.happens("gateway-timeout", target) is not None:
            return ProblemError(504, "upstream request timeout").response()
        if dice.happens("wrong-types", target) is not None:
            return JSONResponse(
                {"id": 17, "name": None, "status": ["RUNNING"], "cost": "free", "pods": "none"}
            )
        if dice.happens("not-json", target) is not None:
            return HTMLResponse("<html><body>Welcome to this hotel's network</body></html>")
        if (size := dice.happens("huge-body", target)) is not None:
            return StreamingResponse(_huge(int(size)), media_type="application/json")
        return answer

    def _admit(self, request: Request) -> None:
        """Check the API key. Set `request.state.pod` to the key's pod, or None for the account's key."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ProblemError(401, "missing bearer token")
        request.state.pod = None
        if hmac.compare_digest(key.encode(), self.key.encode()):
            return
        for pod in self.cloud.pods.values():
            if hmac.compare_digest(key.encode(), pod.key.encode()):
                request.state.pod = pod
                return
        raise ProblemError(401, "invalid bearer token")

    def _limits(self) -> dict[str, str]:
        minute = int(time.time() // 60)
        if minute != self._minute:
            self._minute, self._requests = minute, 0
        self._requests += 1
        left = max(0, self.per_minute - self._requests)
        return {
            "RateLimit-Policy": f'"minute";q={self.per_minute};w=60',
            "RateLimit": f'"minute";r={left};t={self._seconds_left()}',
        }

    def _seconds_left(self) -> int:
        return 60 - int(time.time() % 60)

    def _conforming(self, request: Request, answer: Response) -> Response:
        """Return the answer, or an error 500 if the answer breaks RunPod's contract."""
        path = request.url.path
        if self.contract is None or not path.startswith("/v2/") or isinstance(answer, StreamingResponse):
            return answer
        body = json.loads(bytes(answer.body)) if answer.body else None
        problems = self.contract.wrong_answer(request.method, path, answer.status_code, body)
        if not problems:
            return answer
        return ProblemError(
            500, "a defect of the sandbox: its answer breaks the contract", problems
        ).response()

    async def body(self, request: Request, model: type[Model]) -> Model:
        """Read the request's body and check it against the contract. Answers 422 with every error."""
        try:
            record = json.loads(await request.body())
        except ValueError:
            raise ProblemError(400, "the body is not JSON") from None
        if self.contract is not None:
            wrong = self.contract.wrong_body(request.method, request.url.path, record)
            if wrong:
                raise ProblemError(422, "request body does not match the contract", wrong)
        try:
            return model.model_validate(record)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, error_['loc']))}: {error_['msg']}" for error_ in error.errors()]
            raise ProblemError(422, "request body does not match the contract", problems) from None


def require_pod_access(request: Request, pod: Pod) -> None:
    """Refuse another pod's key: a pod's key is valid for that pod only."""
    if request.state.pod is not None and request.state.pod is not pod:
        raise ProblemError(403, "access denied: this key belongs to another pod")


def require_account_key(request: Request) -> None:
    """Refuse a pod's key."""
    if request.state.pod is not None:
        raise ProblemError(403, "access denied: a pod's key is valid for that pod only")


async def _huge(mebibytes: int) -> Any:
    yield b'{"pods": [], "padding": "'
    for _ in range(mebibytes):
        yield b"x" * (1 << 20)
    yield b'"}'
