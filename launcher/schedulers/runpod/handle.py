"""Names of a run and its pods: handles, pod names, paths and the file with which a pod claims a run."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.rundir.layout import RunDir
from launcher.schedulers.rundir import latest_handle
from launcher.spec.events import Event

PREFIX = "runpod:"
POD_NAME = re.compile(r"launcher-(?P<run>.+)-(?P<number>\d+)")
"Matches what `pod_name` returns."


def pod_name(run_id: str, submission: int) -> str:
    """Return the name of a submission's pod or cluster. An unconfirmed pod is found by this name."""
    return f"launcher-{run_id}-{submission}"


def claim(submission: int) -> str:
    """Return the name of the file in the run directory where the pod that begins the run writes its id."""
    return f"runpod-submission-{submission}"


def pod_run_dir(runs: str | None, volume_path: str, run_id: str) -> str:
    """Return the path of a run directory on the pod. `runs` is `paths.runs` of the profile."""
    return posixpath.join(runs or posixpath.join(volume_path, "runs"), run_id)


def api_path(id: str, cluster: bool) -> str:
    """Return the path of a pod or cluster in the API, such as `/pods/ID`."""
    return f"/clusters/{id}" if cluster else f"/pods/{id}"


@dataclass(frozen=True)
class Handle:
    """A run's handle: `runpod:<profile>:<pod>` or `runpod:<profile>:cluster/<id>`.

    While the pod is unknown, it is `runpod:<profile>:run/<run id>`.
    """

    profile: str
    pod: str | None
    run: str = ""
    "Run id, if the pod is unknown."

    @classmethod
    def of(cls, profile: str, id: str, cluster: bool) -> Handle:
        return cls(profile, f"cluster/{id}" if cluster else id)

    @classmethod
    def at(cls, profile: str, path: str) -> Handle:
        """Return the handle for an API path such as `/pods/ID`."""
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
        return api_path(self.id or "", self.cluster)

    @property
    def words(self) -> str:
        return f"{'cluster' if self.cluster else 'pod'} {self.id}"


def handle_of(run: RunDir) -> Handle:
    """Return the handle of the run's latest pod."""
    return handle_in(run.read_events(), run.read_about().cluster.name or "", run.id)


def handle_in(events: Sequence[Event], profile: str, run_id: str) -> Handle:
    """Return the handle of the latest pod in a run's events.

    It has no pod if the answer to the last submission was lost.
    """
    handle = latest_handle(events, PREFIX)
    return Handle(profile, None, run_id) if handle is None else Handle(profile, handle.rpartition(":")[2])
