"""Where a run on RunPod is: its handle, its volume, its copy here."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.rundir.layout import RunDir
from launcher.schedulers.rundir import copies

PREFIX = "runpod:"


@dataclass(frozen=True)
class Handle:
    """`runpod:<profile>:<pod>` or `runpod:<profile>:cluster/<id>`; where no answer has come yet,
    `runpod:<profile>:run/<run id>`."""

    profile: str
    pod: str | None
    run: str = ""
    "Of a pod that is not known."

    @classmethod
    def at(cls, profile: str, path: str) -> Handle:
        """Of a path below the API's address."""
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


def handle_of(run: RunDir) -> Handle:
    """Of the run's latest pod. Its id is not known where the answer to the last submission was lost."""
    profile = str(run.read_about().get("cluster", {}).get("name", ""))
    refused = False
    for event in reversed(run.read_events()):
        name = str(event.get("handle", ""))
        if name.startswith(PREFIX) and not name.endswith(":"):
            return Handle(profile, name.rpartition(":")[2])
        if event.get("event") == "submitting" and not refused:
            break
        refused = event.get("event") == "refused"
    return Handle(profile, None, run.id)


def claim(submission: int) -> str:
    """The file in the run directory in which the pod that has begun the run puts its id."""
    return f"runpod-submission-{submission}"


def submissions(run: RunDir) -> int:
    return sum(event.get("event") == "submitting" for event in run.read_events())


def folder_on_volume(section: Mapping[str, Any], there: str) -> str | None:
    """The key of a folder of a pod; None where it is not on the volume."""
    mount = posixpath.normpath(str(section["volume_path"]))
    below = posixpath.relpath(posixpath.normpath(there), mount)
    return None if below.startswith("..") else f"{below}/"


def copies_of(section: Mapping[str, Any], runs: str) -> Path:
    return copies(f"runpod-{section['volume_id']}", runs)
