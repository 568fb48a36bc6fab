"""The sandbox server: routes, files, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import uvicorn
from starlette.applications import Starlette

from launcher.rundir.files import replace_text, try_lock
from launcher.sandbox.cloud import Cloud, Pace
from launcher.sandbox.contract import Contract
from launcher.sandbox.control import Control
from launcher.sandbox.faults import Dice, Fault
from launcher.sandbox.graphql import GraphQL
from launcher.sandbox.guard import Guard
from launcher.sandbox.isolation import find_isolation
from launcher.sandbox.records import Volume
from launcher.sandbox.rest import Rest
from launcher.sandbox.s3 import S3
from launcher.spec import variables

VOLUME = "sandbox"
"Id of the network volume that exists from the start."
CENTRE = "EU-RO-1"


PROFILE = """\
# Pods of `launcher runpod sandbox`: processes of this machine, with its GPUs if it has any.
name: runpod-sandbox
description: RunPod as `launcher runpod sandbox` simulates it on this machine
scheduler: runpod
max_nodes: 4
node:
  gpu: {{type: NVIDIA RTX A5000, count: 2, memory: 23.6GiB}}
network:
  interface: lo
container:
  runtime: runpod
  image: sandbox/any   # any name will do: the pods see this machine's files
paths:
  python: {python}
runpod:
  gpu_id: NVIDIA RTX A5000
  cpu_id: cpu3c        # pods of jobs with gpus_per_node: 0
  vcpu: 4
  volume_id: {volume}
  volume_path: {path}
  data_centers: [{centre}]
  max_hours: 1
"""


@dataclass(frozen=True)
class Options:
    """Options of the server."""

    folder: Path
    port: int
    openapi: Path | None
    pace: Pace
    per_minute: int
    seed: int
    faults: dict[str, Fault] = field(default_factory=dict)


@dataclass(frozen=True)
class Keys:
    """The keys that the server accepts."""

    api: str
    s3_access: str
    s3_secret: str


def serve(options: Options, ready: Callable[[Path, dict[str, str]], None]) -> None:
    """Serve until SIGINT or SIGTERM, then end every pod. `ready` gets the variables for the user's shell."""
    contract = Contract(options.openapi) if options.openapi is not None else None
    is_new = not options.folder.exists() or not any(options.folder.iterdir())
    options.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = options.folder.resolve()
    listening = _listen(options.port)
    lock = _lock(folder)
    if is_new:  # if the folder is in a project, exclude it from the job's code
        (folder / ".gitignore").write_text("*\n")
    cloud = Cloud(folder, find_isolation(), Dice(options.seed, options.faults), options.pace)
    if VOLUME not in cloud.volumes:
        cloud.add_volume(Volume(VOLUME, VOLUME, 100, CENTRE))
    keys = _keys(folder / "keys.json")
    guard = Guard(cloud, keys.api, options.per_minute, contract)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        keep_alive = asyncio.ensure_future(_keep_alive(cloud))
        yield
        keep_alive.cancel()
        await cloud.close()

    parts = (
        Rest(cloud, guard),
        GraphQL(cloud, guard),
        S3(cloud, keys.s3_access),
        Control(cloud, keys.api),
    )
    routes = [route for part in parts for route in part.routes()]
    app = Starlette(routes=routes, lifespan=lifespan)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=options.port, log_level="critical", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    cloud.api = f"{base}/v2"
    environment = {
        variables.RUNPOD_API: f"{base}/v2",
        variables.RUNPOD_GRAPHQL: f"{base}/graphql",
        variables.RUNPOD_S3: f"{base}/s3",
        variables.RUNPOD_PAUSE: "0.1",
        "RUNPOD_API_KEY": keys.api,
        "RUNPOD_S3_ACCESS_KEY": keys.s3_access,
        "RUNPOD_S3_SECRET_KEY": keys.s3_secret,
    }
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    replace_text(folder / "env.sh", exports, 0o600)
    volume_path = "/workspace" if cloud.isolation else str(cloud.volume_folder(VOLUME))
    profile = PROFILE.format(
        python=json.dumps(sys.executable), volume=VOLUME, path=json.dumps(volume_path), centre=CENTRE
    )
    (folder / "runpod-sandbox.yaml").write_text(profile)
    ready(folder, environment)
    with listening, lock:
        server.run(sockets=[listening])


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ValueError(f"127.0.0.1:{port}: {error.strerror}; `--port 0` takes any free port") from None


def _lock(folder: Path) -> IO[str]:
    """Return a lock held until the process ends. A second server would end the pods of the first."""
    file = open(folder / "lock", "a")  # noqa: SIM115
    if not try_lock(file):
        raise ValueError(f"a sandbox is running in {folder}; use another --folder for a second one")
    return file


async def _keep_alive(cloud: Cloud) -> None:
    while True:
        await asyncio.sleep(1)
        cloud.ledger.keep_alive()


def _keys(file: Path) -> Keys:
    """Return the keys. They are created once and stay valid when the server restarts."""
    if not file.exists():
        keys = Keys(
            f"rpa_sandbox_{secrets.token_hex(16)}",
            f"user_{secrets.token_hex(8)}",
            f"rps_{secrets.token_hex(16)}",
        )
        replace_text(file, json.dumps(vars(keys)), 0o600)
    return Keys(**json.loads(file.read_text()))
