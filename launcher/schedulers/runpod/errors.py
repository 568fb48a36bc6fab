"""RunPod's errors, and what to do after each: retry, try the next offer, or stop."""

from __future__ import annotations

import re
from enum import Enum

from launcher.schedulers.base import SchedulerError


class Fate(Enum):
    """What to do after an error."""

    RETRY = "send the same request again after a pause"
    WAIT = "send the same request again after the time in Retry-After"
    SKIP = "try the next offer"
    STOP = "stop: no other offer will succeed"


TABLE: dict[int, tuple[Fate, str]] = {
    400: (Fate.SKIP, "the request is invalid or nothing is in stock: RunPod gives the same error for both"),
    401: (Fate.STOP, "RunPod rejects the API key: make another one under Settings, API Keys"),
    402: (Fate.STOP, "the balance is too low: add credit"),
    403: (Fate.SKIP, "the account or the API key may not do this"),
    404: (Fate.STOP, "it does not exist, or no longer exists"),
    408: (Fate.RETRY, ""),
    409: (Fate.STOP, "its state does not allow this"),
    422: (Fate.STOP, "the request is wrong: correct the profile or the job"),
    429: (Fate.WAIT, "too many requests"),
}
"Status codes of `POST /v2/pods` in RunPod's documentation. Other requests have no next offer."


def fate_of(status: int) -> tuple[Fate, str]:
    if status in TABLE:
        return TABLE[status]
    if status >= 500:
        return Fate.RETRY, "RunPod has an internal error"
    return Fate.STOP, ""


class ApiError(SchedulerError):
    """RunPod did not carry out a request. `status` is 0 if no answer came."""

    def __init__(self, message: str, status: int = 0, fate: Fate = Fate.STOP, wait: float | None = None):
        super().__init__(message)
        self.status, self.fate, self.wait = status, fate, wait


class LostAnswerError(ApiError):
    """No usable answer came, so the request may have been carried out."""


class SilentError(ApiError):
    """An open stream has sent nothing for a while."""


class HostileAnswerError(ApiError):
    """An answer that RunPod's API never gives: too large, of another form, or a redirect."""


class UnendedError(SchedulerError):
    """An unwanted pod could not be ended and keeps costing money."""

    def __init__(
        self, message: str, path: str, usd_per_hour: float | None = None, limit: float | None = None
    ):
        super().__init__(message)
        self.path, self.usd_per_hour, self.limit = path, usd_per_hour, limit


SHOWN = 400
"Maximum characters of foreign text in one of our messages."


def clean(text: object) -> str:
    """Return the text on one line, without control characters, cut to SHOWN characters."""
    flat = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", str(text)).strip()
    return flat if len(flat) <= SHOWN else f"{flat[:SHOWN]}..."
