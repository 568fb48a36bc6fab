"""The process of a pod: start it, end it and log its output line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import launcher
from launcher.sandbox.isolation import Isolation, first_process, kill_marked
from launcher.sandbox.podlog import LONGEST, PodLog
from launcher.sandbox.records import Pod
from launcher.spec import variables

MARK = "RUNPOD_POD_ID"
_KEPT = ("LANG", "LC_ALL", "TZ", "PYTHONPATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
"Variables that a pod gets from this server's environment. It gets no others."


NVIDIA_SMI = """\
#!/bin/sh
# The sandbox's nvidia-smi for a machine without a GPU: it lists GPUs, but nothing can compute on them.
[ "$1" = -L ] || { echo "nvidia-smi of the sandbox: only -L" >&2; exit 9; }
{gpus}"""


def environment(pod: Pod, home: str, volume: str | None, api: str) -> dict[str, str]:
    """Return RunPod's variables with those of the request. Secrets come from this server's environment."""
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env |= {
        # In place of the image: this machine, with the Python that runs the server first in PATH.
        "PATH": f"{home}/bin:{Path(sys.executable).parent}:{os.defpath}:/usr/local/bin:/usr/sbin:/sbin",
        "HOME": home,
        "RUNPOD_POD_ID": pod.id,
        "RUNPOD_API_KEY": pod.key,
        "RUNPOD_DC_ID": pod.centre,
        "RUNPOD_POD_HOSTNAME": f"{pod.id}-sandbox",
        "RUNPOD_GPU_COUNT": str((pod.gpu or {}).get("count", 0)),
        "RUNPOD_CPU_COUNT": str((pod.cpu or {}).get("vcpuCount", os.cpu_count() or 1)),
        "RUNPOD_PUBLIC_IP": "127.0.0.1",
        "CUDA_VERSION": "12.8",
        variables.RUNPOD_API: api,
    }
    if volume is not None:
        env["RUNPOD_VOLUME_ID"] = volume
    if pod.seat is not None:
        seat = pod.seat
        trainers = (pod.gpu or {}).get("count", 1)
        env |= {
            "NODE_RANK": str(seat.rank),
            "NUM_NODES": str(seat.nodes),
            "NUM_TRAINERS": str(trainers),
            "WORLD_SIZE": str(trainers * seat.nodes),
            "NODE_ADDR": seat.address,
            "PRIMARY_ADDR": seat.primary,
            "MASTER_ADDR": seat.primary,
            "PRIMARY_PORT": "29400",
            "MASTER_PORT": "29400",
            "HOST_NODE_ADDR": f"{seat.primary}:29400",
        }
    for name, value in pod.env.items():
        inner = value.strip().removeprefix("{{").removesuffix("}}").strip()
        if value.strip().startswith("{{") and inner.startswith("RUNPOD_SECRET_"):
            value = os.environ.get(inner, "")
        env[name] = value
    return env


class Container:
    """A pod's container: `run` starts the command and waits for its end. It may run again afterwards."""

    def __init__(
        self, pod: Pod, folder: Path, isolation: Isolation, log: PodLog, volumes: list[tuple[str, Path, str]]
    ) -> None:
        """`volumes`: (id, folder on this machine, path in the pod)."""
        self.pod = pod
        self.folder = folder
        self.isolation = isolation
        self.log = log
        self.volumes = volumes
        self.process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Future[asyncio.subprocess.Process] | None = None

    async def run(self, api: str) -> int:
        """Run the command once. Return its exit code."""
        disk = self.folder / "disk"
        (disk / "tmp").mkdir(parents=True, exist_ok=True)
        self._fake_nvidia_smi(disk)
        args = self.pod.args or "sleep infinity"
        home = "/pod"
        if not self.isolation:
            home = str(disk)
            args = args.replace("/tmp/", f"{disk}/tmp/")
        mounts = [(source, target) for _, source, target in self.volumes]
        visible = [Path(launcher.__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix)]
        argv = self.isolation.argv(self.folder, shlex.split(args), mounts, visible)
        volume = self.volumes[0][0] if self.volumes else None
        # Starting is a task of its own, so that `stop` can wait until there is a process to end.
        self._starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *argv,
                env=environment(self.pod, home, volume, api),
                cwd=disk,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        )
        try:
            self.process = await asyncio.shield(self._starting)
        except OSError as error:
            self.log.add("system", f"cannot start the command: {error.strerror}")
            return 127
        reading = asyncio.ensure_future(self._read(self.process))
        try:
            code = await self.process.wait()
        finally:
            self._sweep()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reading, 5)
        return code

    def _fake_nvidia_smi(self, disk: Path) -> None:
        if self.pod.gpu is None or shutil.which("nvidia-smi"):
            return
        gpu = self.pod.gpu
        gpus = [f"echo 'GPU {i}: {gpu['id']} (UUID: GPU-sandbox-{i})'\n" for i in range(gpu["count"])]
        smi = disk / "bin" / "nvidia-smi"
        smi.parent.mkdir(exist_ok=True)
        smi.write_text(NVIDIA_SMI.replace("{gpus}", "".join(gpus)))
        smi.chmod(0o755)

    async def stop(self, grace: float) -> None:
        """Send SIGTERM to the first process, as container runtimes do, and SIGKILL to all after `grace` s."""
        if self._starting is None:
            return
        try:
            process = await asyncio.shield(self._starting)
        except OSError:
            return
        if process.returncode is not None:
            return
        if grace > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first_process(process.pid), signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(process.wait()), grace)
        if process.returncode is None:
            # process.kill() would poll and take the exit code away from asyncio's watcher.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._sweep()
        await process.wait()

    def _sweep(self) -> None:
        """Kill processes that the command left without a process namespace, or before it was ready."""
        kill_marked(f"{MARK}={self.pod.id}")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self.log.add("container", line.decode(errors="replace"))
            if len(rest) > LONGEST:
                self.log.add("container", rest.decode(errors="replace"))
                rest = b""
        if rest:
            self.log.add("container", rest.decode(errors="replace"))
