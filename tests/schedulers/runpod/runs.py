"""Runs on a sandbox whose pods start no supervisor: a small script says what one would say, at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.api.prepare import Limits, prepared
from launcher.rundir.layout import RunDir
from launcher.schedulers import registry
from launcher.schedulers.base import Status
from launcher.schedulers.runpod.request import PodPrepared
from launcher.schedulers.runpod.scheduler import RunPodScheduler
from launcher.schedulers.wanted_files import Wanted
from launcher.spec.records import ClusterRecord
from tests.lab import PATIENCE, wait_for
from tests.sandbox.server import VOLUME, Sandbox

A5000, A6000 = "NVIDIA RTX A5000", "NVIDIA RTX A6000"
SUPERVISOR = r"""#!/bin/bash
# -m launcher.supervise RUN_DIR [...] --stop-file FILE: ends when it is told, or when the file `go` is there.
run=$3 stop=${*: -1} now=$(date -u +%Y-%m-%dT%H:%M:%S.000000Z)
state() {
  printf '{"state": "%s", "failure": %s, "reason": "%s", "time": "'"$now"'"}\n' "$@" \
    >"$run/.state.$BASHPID" && mv "$run/.state.$BASHPID" "$run/state.json"
}
end() {
  state "$1" "$2" "$3"
  printf '{"time": "'"$now"'", "event": "finished", "state": "%s", "failure": %s}\n' "$1" "$2" \
    >>"$run/events.jsonl"
  exit "$4"
}
echo "[launcher] supervisor ${NODE_RANK:-0} of ${PRIMARY_ADDR:-none} begins; secret ${#CANARY}" >&2
state running null ''
trap 'told=yes' TERM
while [[ ! -e $run/go ]]; do
  if [[ -e $run/cancel ]]; then end cancelled '"cancelled"' 'asked to' 18; fi
  if [[ -s $stop ]]; then end interrupted "\"$(<"$stop")\"" 'told to' 15; fi
  sleep 0.05
done
end succeeded null well 0
"""


class Lab:
    """A shell with the sandbox's addresses, a project and a profile."""

    def __init__(self, sandbox: Sandbox, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sandbox, self.folder = sandbox, folder
        for name, value in sandbox.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LAUNCHER_RUNPOD_PAUSE", "0.02")
        for kind in ("STATE", "CONFIG", "CACHE"):
            monkeypatch.setenv(f"XDG_{kind}_HOME", str(folder / kind.lower()))
        monkeypatch.chdir(folder)
        registry.opened.clear()
        sandbox.volume.mkdir(parents=True, exist_ok=True)
        (sandbox.volume / "python").write_text(SUPERVISOR)  # a pod has a /tmp of its own
        (sandbox.volume / "python").chmod(0o755)
        (folder / "code").mkdir()
        (folder / "code" / "train.py").write_text("print(1)\n")

    @property
    def scheduler(self) -> RunPodScheduler:
        profile = ClusterRecord(scheduler="runpod", runpod={"volume_id": VOLUME})
        return cast(RunPodScheduler, registry.of_record(profile))

    def profile(self, gpu: bool = False, **section: Any) -> Path:
        what: dict[str, Any] = {"cpu_id": "cpu3c", "vcpu": 2}
        node: dict[str, Any] = {}
        if gpu:
            what = {"gpu_id": A5000}
            node = {"gpu": {"type": A5000, "count": 1, "memory": "23.6GiB"}}
        profile = {
            "name": "box",
            "scheduler": "runpod",
            "max_nodes": 4,
            "node": node,
            "container": {"runtime": "runpod", "image": "sandbox/image"},
            "paths": {"python": "/workspace/python"},
            "runpod": {**what, "volume_id": VOLUME, "disk_gb": 10, "max_hours": 1, **section},
        }
        (self.folder / "box.yaml").write_text(json.dumps(profile))
        return self.folder / "box.yaml"

    def prepare(
        self,
        gpu: bool = False,
        limits: Limits | None = None,
        job: dict[str, Any] | None = None,
        **section: Any,
    ) -> PodPrepared:
        written = {
            "name": "tiny",
            "workdir": "code",
            "command": ["true"],
            "batch": {"global": 8},
            "resources": {} if gpu else {"gpus_per_node": 0},
            **(job or {}),
        }
        (self.folder / "job.yaml").write_text(json.dumps(written))
        ready = prepared(self.folder / "job.yaml", str(self.profile(gpu, **section)), [], limits=limits)[1]
        assert isinstance(ready, PodPrepared)
        return ready

    def submit(self, ready: PodPrepared) -> RunDir:
        self.scheduler.check(ready)
        return self.scheduler.submit(ready)

    def there(self, run: RunDir) -> Path:
        """The run directory as its pod sees it."""
        return self.sandbox.volume / "runs" / run.id

    def go(self, run: RunDir) -> None:
        (self.there(run) / "go").touch()

    def look(self, run: RunDir) -> Status:
        self.scheduler.fetch(run, Wanted(logs=True))
        return self.scheduler.status(run)

    def handle(self, run: RunDir) -> str:
        from launcher.schedulers.runpod.handle import handle_of

        return str(handle_of(run))

    def until(self, run: RunDir, *states: str, seconds: float = PATIENCE) -> Status:
        found: list[Status] = []

        def there() -> bool:
            found.append(self.look(run))
            return found[-1].state in states

        wait_for(there, f"{run.id} {states}", seconds)
        return found[-1]

    def pods(self, run: RunDir) -> list[dict[str, Any]]:
        """Of this run that live."""
        found = self.sandbox.ask("GET", "/pods").json()["pods"]
        return [pod for pod in found if run.id in pod["name"] and pod["status"] != "EXITED"]

    def no_pods(self, run: RunDir) -> None:
        wait_for(lambda: not self.pods(run), "no pod is left")

    def bill(self, run: RunDir) -> int:
        """How many pods the run ever had."""
        state = self.sandbox.state()
        return len({pod["id"] for pod in [*state["live"], *state["gone"]] if run.id in pod["name"]})
