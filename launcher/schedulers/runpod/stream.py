"""Follow a pod's log over Server-Sent Events. After a lost connection, it continues after the last line."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from launcher.schedulers.runpod.api import Client
from launcher.schedulers.runpod.errors import ApiError, Fate, HostileAnswerError, SilentError, clean
from launcher.schedulers.runpod.pods import LogLine, read

TAIL = "5000"
"Number of earlier lines to request; RunPod's maximum."
LONGEST = 2**20
"Maximum characters of one event."
_BLANK = re.compile(r"\n\n|\n\r|\r\r")
"The end of a line and a blank line, for each of the three line endings."


def follow(client: Client, pod: str, done: Callable[[], bool]) -> Iterator[LogLine]:
    """Yield lines until `done`, or until the pod is gone. Raises SchedulerError."""
    try:
        from httpx_sse import EventSource, SSEError
    except ImportError:
        from launcher.schedulers.runpod.volume import NO_EXTRA

        raise ApiError(NO_EXTRA) from None
    last, failures = "", 0
    while True:
        pause = client.pause
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last} if last else {})}
        try:
            with client.stream(f"/pods/{pod}/logs", {"tail": TAIL}, headers) as answer:
                for event in EventSource(_Bounded(answer)).iter_sse():  # type: ignore[arg-type]
                    failures = 0
                    if event.id:
                        last = event.id
                    if event.data:
                        yield _line(event.data, f"GET /pods/{pod}/logs")
        except SSEError as error:
            raise HostileAnswerError(f"RunPod: the log of {pod}: {clean(error)}") from None
        except SilentError:
            failures = 0
        except ApiError as error:
            if error.status == 404:
                return
            failures += 1
            if error.fate not in (Fate.RETRY, Fate.WAIT) or failures > 5:
                raise
            pause = error.wait or pause
        if done():
            return
        time.sleep(pause)


def _line(text: str, what: str) -> LogLine:
    try:
        return read(LogLine, json.loads(text), what)
    except (ValueError, RecursionError):
        raise HostileAnswerError("RunPod: a line of the log is not JSON") from None


class _Bounded:
    """Wraps an answer and limits the length of its events."""

    def __init__(self, answer: Any) -> None:
        self.headers = answer.headers
        self._answer = answer

    def iter_text(self) -> Iterator[str]:
        """Yield the text. Raises HostileAnswerError if an event, which ends at a blank line, is too long."""
        since, last = 0, ""
        for text in self._answer.iter_text():
            first, *others = _BLANK.split(last + text)
            since += len(first) - len(last)
            if max(since, *map(len, others), 0) > LONGEST:
                raise HostileAnswerError(f"RunPod: an event of the log is longer than {LONGEST // 2**20} MiB")
            since = len(others[-1]) if others else since
            last = text[-1:] or last
            yield text
