"""What each of RunPod's errors means for who asked."""

from __future__ import annotations

import re
from enum import Enum

from launcher.schedulers.base import SchedulerError


class Fate(Enum):
    """What to do after an error."""

    RETRY = "the same again, after a pause"
    WAIT = "the same again, after what Retry-After says"
    SKIP = "the next candidate"
    STOP = "nothing: no candidate will succeed"


TABLE: dict[int, tuple[Fate, str]] = {
    400: (Fate.SKIP, "a rule is broken, or there is no room for it: RunPod has one answer for both"),
    401: (Fate.STOP, "RunPod does not take the API key: make another one under Settings, API Keys"),
    402: (Fate.STOP, "the balance is too low: add credit"),
    403: (Fate.SKIP, "the account or the API key may not do this"),
    404: (Fate.STOP, "it does not exist (any more)"),
    408: (Fate.RETRY, ""),
    409: (Fate.STOP, "its state does not allow this"),
    422: (Fate.STOP, "the request is wrong: correct the profile or the job"),
    429: (Fate.WAIT, "too many requests"),
}
"The status codes of `POST /v2/pods`, by RunPod's documents; other requests have no next candidate."


def fate_of(status: int) -> tuple[Fate, str]:
    if status in TABLE:
        return TABLE[status]
    if status >= 500:
        return Fate.RETRY, "RunPod has an internal error"
    return Fate.STOP, ""


class ApiError(SchedulerError):
    """RunPod did not do what was asked. `status` is 0 where no answer came."""

    def __init__(self, message: str, status: int = 0, fate: Fate = Fate.STOP, wait: float | None = None):
        super().__init__(message)
        self.status, self.fate, self.wait = status, fate, wait


class LostAnswerError(ApiError):
    """It may have been done: the answer did not come, or was not one."""


class SilentError(ApiError):
    """A stream that was opened, and over which nothing comes for a while."""


class HostileAnswerError(ApiError):
    """An answer that RunPod's API does not give: too large, of another form, from somewhere else."""


class UnendedError(SchedulerError):
    """A pod that is not wanted could not be ended, and goes on costing money."""

    def __init__(
        self, message: str, path: str, usd_per_hour: float | None = None, limit: float | None = None
    ):
        super().__init__(message)
        self.path, self.usd_per_hour, self.limit = path, usd_per_hour, limit


SHOWN = 400
"Characters of somebody else's text in one of our messages."


def clean(text: object) -> str:
    """The text in one line, without control characters."""
    flat = re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", str(text)).strip()
    return flat if len(flat) <= SHOWN else f"{flat[:SHOWN]}..."
