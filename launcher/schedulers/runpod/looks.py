"""How one process looks at runs and their pods: seldom enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import Status
from launcher.schedulers.over_ssh.exchange import Wanted
from launcher.schedulers.runpod.place import Handle
from launcher.schedulers.runpod.watch import Seen, ask, look_at, pace

if TYPE_CHECKING:
    from launcher.schedulers.runpod.api import Client
    from launcher.schedulers.runpod.mirror import Copy

POD_SECONDS = 10.0
"Between two questions about its pod: RunPod answers about sixty in a minute."


class Looks:
    """`client` and `copy` raise SchedulerError where there is no key, or no volume."""

    def __init__(self, client: Callable[[], Client], copy: Callable[[RunDir], Copy]) -> None:
        self._client, self.copy = client, copy
        self.wanted = Wanted()
        "What of a run directory comes here."
        self._seen: dict[tuple[Path, str], tuple[float, Seen]] = {}

    @property
    def client(self) -> Client:
        return self._client()

    def state(self, run: RunDir) -> Status:
        """What is rented for it is held against its limits; nothing else is."""
        return look_at(run, self)

    def fetch(self, run: RunDir) -> str | None:
        """Why a state was not taken. Raises SchedulerError."""
        return self.copy(run).fetch(self.wanted)

    def pod(self, run: RunDir, handle: Handle) -> Seen:
        """Raises ApiError."""
        at, seen = self._seen.get((run.path, str(handle)), (float("-inf"), None))
        if seen is None or not seen.living or time.monotonic() > at + POD_SECONDS * pace():
            seen = ask(self.client, handle)
            self._seen[run.path, str(handle)] = (time.monotonic(), seen)
        return seen

    def end(self, handle: Handle) -> None:
        """Raises SchedulerError."""
        from launcher.schedulers.runpod.twins import end

        if handle.id is not None:
            end(self.client, handle.path)
