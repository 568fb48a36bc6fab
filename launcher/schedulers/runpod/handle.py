"""How a run and its pods are called: the handle, the names of pods, the claim on the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.rundir.layout import RunDir

PREFIX = "runpod:"
POD_NAME = re.compile(r"launcher-(?P<run>.+)-(?P<number>\d+)")
"The form of `pod_name`."


def pod_name(run_id: str, submission: int) -> str:
    """The name of the pod or cluster of one submission: by it an unconfirmed pod is found."""
    return f"launcher-{run_id}-{submission}"


def claim(submission: int) -> str:
    """The file in the run directory in which the pod that has begun the run puts its id."""
    return f"runpod-submission-{submission}"


@dataclass(frozen=True)
class Handle:
    """`runpod:<profile>:<pod>` or `runpod:<profile>:cluster/<id>`; `runpod:<profile>:run/<run id>` while the
    pod is unknown."""

    profile: str
    pod: str | None
    run: str = ""
    "The run, where its pod is unknown."

    @classmethod
    def of(cls, profile: str, id: str, cluster: bool) -> Handle:
        return cls(profile, f"cluster/{id}" if cluster else id)

    @classmethod
    def at(cls, profile: str, path: str) -> Handle:
        """The handle of a path below the API's address."""
        return cls(profile, path.removeprefix("/pods/").replace("/clusters/", "cluster/"))

    def __str__(self) -> str:
        return f"{PREFIX}{self.profile}:{self.pod or f'run/{self.run}'}"

    @property
    def cluster(self) -> bool:
        return self.pod is not None and self.pod.startswith("cluster/")

    @property
    def id(self) -> str | None:
        return self.pod.removeprefix("cluster/") if self.pod is not None else None

    @property
    def path(self) -> str:
        """Below the API's address."""
        return f"/{self.pod}".replace("/cluster/", "/clusters/") if self.cluster else f"/pods/{self.id}"

    @property
    def words(self) -> str:
        return f"{'cluster' if self.cluster else 'pod'} {self.id}"


def handle_of(run: RunDir) -> Handle:
    """The handle of the run's latest pod."""
    return handle_in(run.read_events(), str(run.read_about().get("cluster", {}).get("name", "")), run.id)


def handle_in(events: Sequence[Mapping[str, Any]], profile: str, run_id: str) -> Handle:
    """Without a pod if the answer to the last submission was lost."""
    refused = False
    for event in reversed(events):
        name = str(event.get("handle", ""))
        if name.startswith(PREFIX) and not name.endswith(":"):
            return Handle(profile, name.rpartition(":")[2])
        if event.get("event") == "submitting" and not refused:
            break
        refused = event.get("event") == "refused"
    return Handle(profile, None, run_id)
