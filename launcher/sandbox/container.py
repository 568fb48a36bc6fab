"""The process of a pod: started, ended, its output as lines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

from launcher.sandbox.isolation import Isolation, first_process, kill_marked
from launcher.sandbox.podlog import LONGEST, PodLog
from launcher.sandbox.records import Pod

MARK = "RUNPOD_POD_ID"
_KEPT = ("LANG", "LC_ALL", "TZ", "PYTHONPATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
"Of this server's environment; a pod gets no other variable of it."


NVIDIA_SMI = """\
#!/bin/sh
# The sandbox's, as this machine has no GPU: what looks for cards finds them listed, nothing computes.
[ "$1" = -L ] || { echo "nvidia-smi of the sandbox: only -L" >&2; exit 9; }
{cards}"""


def environment(pod: Pod, home: str, volume: str | None, api: str) -> dict[str, str]:
    """RunPod's variables, those of the request over them; its secrets from this server's environment."""
    env = {name: os.environ[name] for name in _KEPT if name in os.environ}
    env |= {
        # The image: this machine, with the Python that runs the server first.
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
        "LAUNCHER_RUNPOD_API": api,
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
    """Start it once, wait for its end, start a new one: as a container runtime does."""

    def __init__(
        self, pod: Pod, folder: Path, isolation: Isolation, log: PodLog, volumes: list[tuple[str, Path, str]]
    ) -> None:
        """`volumes`: id, folder here, path in the pod."""
        self.pod = pod
        self.folder = folder
        self.isolation = isolation
        self.log = log
        self.volumes = volumes
        self.process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Future[asyncio.subprocess.Process] | None = None

    async def run(self, api: str) -> int:
        """Runs the command once; its exit code."""
        disk = self.folder / "disk"
        (disk / "tmp").mkdir(parents=True, exist_ok=True)
        self._play_gpus(disk)
        args = self.pod.args or "sleep infinity"
        home = "/pod"
        if not self.isolation:
            home = str(disk)
            args = args.replace("/tmp/", f"{disk}/tmp/")
        mounts = [(source, target) for _, source, target in self.volumes]
        package = Path(__file__).parents[4]
        visible = [package, Path(sys.prefix), Path(sys.base_prefix)]
        argv = self.isolation.argv(self.folder, shlex.split(args), mounts, visible)
        volume = self.volumes[0][0] if self.volumes else None
        # A task of its own: who ends the pod meanwhile waits until there is a process to end.
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

    def _play_gpus(self, disk: Path) -> None:
        if self.pod.gpu is None or shutil.which("nvidia-smi"):
            return
        gpu = self.pod.gpu
        cards = [f"echo 'GPU {i}: {gpu['id']} (UUID: GPU-sandbox-{i})'\n" for i in range(gpu["count"])]
        smi = disk / "bin" / "nvidia-smi"
        smi.parent.mkdir(exist_ok=True)
        smi.write_text(NVIDIA_SMI.replace("{cards}", "".join(cards)))
        smi.chmod(0o755)

    async def stop(self, grace: float) -> None:
        """SIGTERM to the first process, as container runtimes do; SIGKILL to all after `grace` seconds."""
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
            # Not process.kill(): it polls, and takes the exit code away from asyncio's watcher.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._sweep()
        await process.wait()

    def _sweep(self) -> None:
        """What the command left behind where it had no process namespace, or one that was not ready yet."""
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
