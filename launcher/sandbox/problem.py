"""Errors in the format of RunPod's REST API (application/problem+json)."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse


class ProblemError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, detail: str, errors: list[str] | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = errors or []
        self.headers = headers or {}

    def response(self) -> JSONResponse:
        body: dict[str, object] = {
            "title": HTTPStatus(self.status).phrase, "status": self.status, "detail": self.detail
        }  # fmt: skip
        if self.errors:
            body["errors"] = self.errors
        return JSONResponse(body, self.status, self.headers, "application/problem+json")
