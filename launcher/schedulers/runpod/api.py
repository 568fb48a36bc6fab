"""Client for RunPod's REST API v2. It retries requests that are safe to repeat and validates every answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import tenacity

from launcher import __version__
from launcher.rundir.secret_masking import Masker
from launcher.schedulers.runpod.errors import (
    ApiError,
    Fate,
    HostileAnswerError,
    LostAnswerError,
    SilentError,
    clean,
    fate_of,
)
from launcher.schedulers.runpod.settings import api_key, pause_seconds
from launcher.spec.progress import working
from launcher.spec.variables import RUNPOD_API, RUNPOD_GRAPHQL

BASE = "https://api.runpod.io/v2"
GRAPHQL = "https://api.runpod.io/graphql"
LARGEST = 16 * 2**20
"Maximum bytes of one answer."
SLOWEST = 60.0
"Maximum seconds for one complete answer."
SILENCE = 60.0
"Seconds after which a silent stream is reopened. RunPod does not promise keep-alives."
TRIES = 6
LONGEST_WAIT = 120.0
"Maximum seconds to wait for Retry-After. A longer one is an error, which names it."
LARGEST_SKEW = 10.0
"Seconds that this machine's clock may differ from RunPod's. An answer is as late, and dated to the second."


def secure(url: str, name: str) -> str:
    """Return `url` if keys may be sent to it: over TLS, or to this machine. Raises ApiError."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ApiError(f"{name}: {clean(url)} is not an address: {error}") from None
    if parts.scheme == "https" or (
        parts.scheme == "http" and parts.host in ("127.0.0.1", "::1", "localhost")
    ):
        return url
    raise ApiError(f"{name}: {clean(url)}: RunPod's keys are sent only over https, or to this machine")


class Client:
    """An HTTP client for one command. Its key is never printed, and its messages hold no secrets."""

    def __init__(self) -> None:
        key = api_key()
        self.base = secure(os.environ.get(RUNPOD_API, BASE).rstrip("/"), RUNPOD_API)
        self.pause = pause_seconds()
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {key}", "User-Agent": f"launcher/{__version__}"},
            timeout=httpx.Timeout(30.0, connect=10.0),
            follow_redirects=False,
        )
        self._secrets = {key}
        self._ahead = 0.0
        "Seconds by which RunPod's clock is ahead of this machine's."

    def now(self) -> float:
        """Return the Unix time by RunPod's clock, or by this machine's before the first answer."""
        return time.time() + self._ahead

    def hide(self, values: Iterable[str]) -> None:
        """Mask these values in messages, because an answer may quote the request."""
        self._secrets |= set(values)

    def get(self, path: str, **params: str) -> Any:
        """Send a GET request and return the JSON answer. Raises ApiError."""
        return self._again("GET", path, params=params)

    def delete(self, path: str) -> None:
        """Send a DELETE request. Do nothing if the object is already gone. Raises ApiError."""
        try:
            self._again("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                raise

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a POST request. It is retried only if the first one certainly had no effect.

        Raises ApiError, or LostAnswerError if the request may have been carried out.
        """
        return self._again("POST", path, body=body)

    @contextmanager
    def stream(self, path: str, params: Mapping[str, str], headers: Mapping[str, str]) -> Iterator[Any]:
        """Open an endless answer. Raises ApiError, or SilentError if an open stream falls silent."""
        timeout, opened = httpx.Timeout(SILENCE, connect=10.0), False
        url = f"{self.base}{path}"
        try:
            with self._http.stream("GET", url, params=params, headers=headers, timeout=timeout) as answer:
                if answer.status_code != 200:
                    raise self._refusal(answer, f"GET {path}")
                opened = True
                yield answer
        except httpx.HTTPError as error:
            if opened and isinstance(error, httpx.ReadTimeout):
                raise SilentError(f"RunPod: GET {path}: silent for {SILENCE:.0f} s") from None
            raise ApiError(f"RunPod: GET {path}: {self._message(error)}", fate=Fate.RETRY) from None

    def graphql(self, query: str, variables: Mapping[str, Any]) -> Any:
        """Send a GraphQL query and return the answer's `data`. Raises ApiError, LostAnswerError.

        GraphQL also reports errors with status 200.
        """
        body = {"query": query, "variables": variables}
        url = secure(os.environ.get(RUNPOD_GRAPHQL, GRAPHQL), RUNPOD_GRAPHQL)
        answer = self._again("POST", url, body=body)
        errors = answer.get("errors") if isinstance(answer, dict) else None
        if errors:
            raise self._graphql_error(errors)
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise LostAnswerError("RunPod: GraphQL: the answer has no `data`")
        return answer["data"]

    def _graphql_error(self, errors: Any) -> ApiError:
        first = errors[0] if isinstance(errors, list) and isinstance(errors[0], dict) else {}
        extensions = first.get("extensions")
        code = extensions.get("code") if isinstance(extensions, dict) else ""
        message = self._shown(str(first.get("message", errors)).encode())
        final = code in ("GRAPHQL_VALIDATION_FAILED", "BAD_USER_INPUT", "UNAUTHENTICATED")
        if "balance" in message.lower() or "credit" in message.lower():
            return ApiError(f"RunPod: GraphQL: {message}: {fate_of(402)[1]}", 402, Fate.STOP)
        return ApiError(f"RunPod: GraphQL: {message}", 200, Fate.STOP if final else Fate.SKIP)

    def _again(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        def worth_it(error: BaseException) -> bool:
            if body is not None:  # retry only requests that certainly had no effect
                return isinstance(error, NotReachedError) or _fate(error) is Fate.WAIT
            return _fate(error) in (Fate.RETRY, Fate.WAIT)

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception(worth_it),
            stop=tenacity.stop_after_attempt(TRIES),
            wait=self._wait,
            reraise=True,
        )
        with working("waiting for RunPod"):
            return tries(self._once, method, path, params, body)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, ApiError) and error.wait is not None:
            return error.wait
        return float(min(self.pause * 2 ** (state.attempt_number - 1), 30.0))

    def _once(
        self, method: str, path: str, params: Mapping[str, str] | None, body: Mapping[str, Any] | None
    ) -> Any:
        what, url = f"{method} {path}", path if "://" in path else f"{self.base}{path}"
        try:
            with self._http.stream(method, url, params=params, json=body) as answer:
                self._compare_clocks(answer)
                if answer.is_redirect:
                    raise HostileAnswerError(
                        f"RunPod: {what}: the answer is a redirect, which RunPod's API never sends; "
                        f"is {clean(self.base)} right (LAUNCHER_RUNPOD_API)?",
                        answer.status_code,
                    )
                if not answer.is_success:
                    raise self._refusal(answer, what)
                data = self._read(answer, what)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            message = f"cannot reach RunPod ({what}): {self._message(error)}"
            raise NotReachedError(message, fate=Fate.RETRY) from None
        except httpx.HTTPError as error:
            raise LostAnswerError(f"RunPod: {what}: {self._message(error)}", fate=Fate.RETRY) from None
        if not data:
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._lost(method, f"RunPod: {what}: the answer is not JSON: {self._shown(data)}") from None

    def _compare_clocks(self, answer: httpx.Response) -> None:
        with suppress(TypeError, ValueError, OverflowError):
            ahead = parsedate_to_datetime(answer.headers.get("Date", "")).timestamp() - time.time()
            self._ahead = ahead if abs(ahead) > LARGEST_SKEW else 0.0

    def _refusal(self, answer: httpx.Response, what: str) -> ApiError:
        status = answer.status_code
        fate, meaning = fate_of(status)
        problem, wait, too_long = self._problem(answer, what), _retry_after(answer), ""
        if fate in (Fate.RETRY, Fate.WAIT) and wait is not None and wait > LONGEST_WAIT:
            fate, too_long = Fate.STOP, f"RunPod asks for a pause of {wait:.0f} s: try again after that"
        if meaning.casefold() in problem.casefold():
            meaning = ""
        message = "; ".join(part for part in (problem, meaning, too_long) if part)
        kind = LostAnswerError if status >= 500 else ApiError
        return kind(f"RunPod: {what}: {status}: {message}", status, fate, wait)

    def _problem(self, answer: httpx.Response, what: str) -> str:
        """Return the error text: RFC 9457 problem details, or else the body or the reason phrase."""
        phrase = self._shown(answer.reason_phrase.encode())
        try:
            data = self._read(answer, what)
        except (ApiError, httpx.HTTPError):
            return phrase
        try:
            problem = json.loads(data)
        except (ValueError, RecursionError):
            return self._shown(data) or phrase
        if not isinstance(problem, dict):
            return self._shown(data)
        errors = problem.get("errors")
        more = [str(one) for one in errors[:5]] if isinstance(errors, list) else []
        parts = [str(problem.get("detail") or problem.get("title") or ""), *more]
        return self._shown("; ".join(part for part in parts if part).encode()) or phrase

    def _read(self, answer: httpx.Response, what: str) -> bytes:
        deadline, data = time.monotonic() + SLOWEST, bytearray()
        for block in answer.iter_bytes():
            data += block
            if len(data) > LARGEST:
                text = f"RunPod: {what}: the answer is larger than {LARGEST // 2**20} MiB"
                raise self._lost(answer.request.method, text)
            if time.monotonic() > deadline:
                raise LostAnswerError(
                    f"RunPod: {what}: no complete answer in {SLOWEST:.0f} s", fate=Fate.RETRY
                )
        return bytes(data)

    def _lost(self, method: str, message: str) -> ApiError:
        """Return the error for an unusable answer. After a POST, the request may have been carried out."""
        return LostAnswerError(message) if method == "POST" else HostileAnswerError(message)

    def _shown(self, data: bytes) -> str:
        secrets = (one.encode(errors="surrogateescape") for one in self._secrets)
        return clean(Masker(secrets).whole(data).decode(errors="replace"))

    def _message(self, error: Exception) -> str:
        return self._shown(str(error).encode()) or type(error).__name__


class NotReachedError(ApiError):
    """The connection failed, so the request was certainly not sent."""


def _fate(error: BaseException) -> Fate | None:
    return error.fate if isinstance(error, ApiError) else None


def _retry_after(answer: httpx.Response) -> float | None:
    """Return Retry-After in seconds. The header holds a number or a date."""
    text = answer.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
