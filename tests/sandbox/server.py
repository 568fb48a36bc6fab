"""The real sandbox: a process of its own, started by the real CLI."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.lab import PATIENCE, wait_for

VOLUME = "sandbox"
ROOT = Path(__file__).parents[2]
OPENAPI = Path(os.environ.get("RUNPOD_OPENAPI", ROOT.parent / "shared" / "facts" / "runpod_openapi_v2.json"))


@dataclass
class Sandbox:
    folder: Path
    process: subprocess.Popen[bytes]
    environ: dict[str, str]
    "What a shell that uses it needs: addresses and throw-away keys."

    @property
    def volume(self) -> Path:
        """The network volume's folder on this machine."""
        return self.folder / "volumes" / VOLUME

    def ask(self, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        """`path` below /v2, or from the server's root with two slashes."""
        base = self.environ["LAUNCHER_RUNPOD_API"]
        url = base.removesuffix("/v2") + path[1:] if path.startswith("//") else base + path
        headers = {
            "Authorization": f"Bearer {key or self.environ['RUNPOD_API_KEY']}",
            **more.pop("headers", {}),
        }
        assert self.process.poll() is None, f"the sandbox has ended: {self.process.returncode}"
        return httpx.request(method, url, headers=headers, timeout=240, **more)

    def state(self) -> dict[str, Any]:
        found = self.ask("GET", "//sandbox/state").json()
        assert isinstance(found, dict)
        return found

    def faults(self, **faults: Any) -> None:
        """Replaces those that were set; `-` of a name is written `_`."""
        done = self.ask(
            "PUT", "//sandbox/faults", json={name.replace("_", "-"): v for name, v in faults.items()}
        )
        assert done.status_code == 200, done.text

    def interrupt(self, pod: str) -> None:
        assert self.ask("POST", f"//sandbox/pods/{pod}/interrupt").status_code == 204

    def create(self, args: str = "sleep 1000", **fields: Any) -> dict[str, Any]:
        """A CPU pod on the volume."""
        done = self.ask("POST", "/pods", json={**body(args), **fields})
        assert done.status_code == 201, done.text
        found = done.json()
        assert isinstance(found, dict)
        return found

    def pod(self, id: str) -> dict[str, Any]:
        found = self.ask("GET", f"/pods/{id}").json()
        assert isinstance(found, dict)
        return found

    def wait(self, id: str, status: str) -> dict[str, Any]:
        wait_for(lambda: self.pod(id)["status"] == status, f"pod {id} {status}")
        return self.pod(id)

    def processes(self, pod: str = "") -> list[int]:
        """The processes of all its pods, or of one, whoever started them."""
        mark = f"LAUNCHER_RUNPOD_API={self.environ['LAUNCHER_RUNPOD_API']}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                parts = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
                if mark in parts and any(part.startswith(f"RUNPOD_POD_ID={pod}".encode()) for part in parts):
                    found.append(int(entry.name))
        return found

    def end(self, with_signal: int = signal.SIGINT) -> None:
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
            self.process.wait(240)


def body(args: str) -> dict[str, Any]:
    return {
        "name": "test",
        "image": "sandbox/image",
        "cpu": {"id": "cpu3c", "vcpuCount": 2},
        "mounts": {"network": [{"volumeId": VOLUME, "path": "/workspace"}]},
        "args": args,
    }


def launch(folder: Path, *options: str, environ: dict[str, str] | None = None, **faults: Any) -> Sandbox:
    """Listening when this returns; without delays unless `options` say otherwise. The caller ends it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    (folder / "env.sh").unlink(missing_ok=True)
    given, printed = (folder.with_name(f"{folder.name}.{name}") for name in ("faults", "log"))
    given.write_text(json.dumps({name.replace("_", "-"): value for name, value in faults.items()}))
    if OPENAPI.is_file():
        options = ("--openapi", str(OPENAPI), *options)
    pace = (
        "--provisioning",
        "0",
        "--pull",
        "0",
        "--restart",
        "0.2",
        "--grace",
        "1",
        "--per-minute",
        "100000",
    )
    with open(printed, "ab") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "launcher", "runpod", "sandbox", "--folder", str(folder), "--port", "0",
                "--faults", str(given), *pace, *options,
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={"OMP_NUM_THREADS": "1", **os.environ, **(environ or {})},
        )  # fmt: skip
    deadline = time.monotonic() + PATIENCE
    while not (folder / "env.sh").exists() or "SECRET" not in (folder / "env.sh").read_text():
        assert process.poll() is None, printed.read_text()
        assert time.monotonic() < deadline, "the sandbox does not start"
        time.sleep(0.05)
    lines = (folder / "env.sh").read_text().splitlines()
    variables = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    return Sandbox(folder, process, {name: value.strip("'") for name, value in variables.items()})


@contextlib.contextmanager
def start(
    folder: Path, *options: str, environ: dict[str, str] | None = None, **faults: Any
) -> Iterator[Sandbox]:
    sandbox = launch(folder, *options, environ=environ, **faults)
    try:
        yield sandbox
    finally:
        sandbox.end()
        left = sandbox.processes()
        assert not left, f"processes of pods outlive the server: {left}"
