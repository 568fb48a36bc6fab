"""Nodes that are network namespaces of this machine, joined by a switch, and the doctor on all of them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.doctor.options import Options
from launcher.doctor.results import Results, results_of
from launcher.doctor.values import Finding
from launcher.rundir.layout import RunDir
from tests.doctor.faulty_host import needs_root
from tests.lab import wait_for

SECONDS = 300.0
"After which a doctor that hangs is ended, and the test fails."
INTERFACE = "from launcher.supervise.interface import main; main()"


def ip(*arguments: str, inside: str | None = None) -> None:
    subprocess.run(["ip", *(["-n", inside] if inside else []), *arguments], check=True, capture_output=True)


def wait_for_ends(processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]) -> list[str]:
    """Wait until all have ended, and return what they printed. If one hangs, the test fails."""
    deadline = time.monotonic() + SECONDS
    try:
        for one in processes:
            one.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for one in processes:
            one.kill()
            one.wait()
        texts = [file.read_text(errors="replace") for file in outputs]
        print(*texts, sep="\n")
    return texts


class Nodes:
    """Nodes `n0`, `n1` ... with an interface `eth0` each. Use it as a context manager."""

    def __init__(self, folder: Path, count: int = 2, ranks_per_node: int = 1) -> None:
        needs_root("ip", "tc", "iptables", "nsenter")
        self.folder, self.count, self.per_node = folder, count, ranks_per_node
        self._prefix = f"ld{os.getpid()}"
        self._network = f"10.{os.getpid() % 200 + 20}.0"
        self.output: dict[int, str] = {}
        self.seconds = 0.0

    def address(self, node: int) -> str:
        return f"{self._network}.{node + 1}"

    def space(self, node: int) -> str:
        return f"{self._prefix}-{node}"

    def __enter__(self) -> Nodes:
        switch = f"{self._prefix}-s"
        ip("netns", "add", switch)
        ip("link", "add", "br0", "type", "bridge", inside=switch)
        ip("link", "set", "br0", "up", inside=switch)
        for node in range(self.count):
            space = self.space(node)
            ip("netns", "add", space)
            ip(
                "link",
                "add",
                f"p{node}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
                inside=switch,
            )
            ip("link", "set", f"p{node}", "master", "br0", "up", inside=switch)
            ip("addr", "add", f"{self.address(node)}/24", "dev", "eth0", inside=space)
            ip("link", "set", "eth0", "up", inside=space)
            ip("link", "set", "lo", "up", inside=space)
        names = "".join(f"{self.address(node)} n{node}\n" for node in range(self.count))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        return self

    def __exit__(self, *_: object) -> None:
        for space in (*map(self.space, range(self.count)), f"{self._prefix}-s"):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def network(self, number: int, *, joined: bool = True) -> None:
        """Give every node an interface `eth{number}`; one that joins no nodes if not `joined`."""
        switch, name = f"{self._prefix}-s", f"eth{number}"
        if joined:
            ip("link", "add", f"br{number}", "type", "bridge", inside=switch)
            ip("link", "set", f"br{number}", "up", inside=switch)
        for node in range(self.count):
            far = f"e{number}-{node}"
            place = ("peer", "name", far, *(("netns", switch) if joined else ()))
            ip("link", "add", name, "type", "veth", *place, inside=self.space(node))
            if joined:
                ip("link", "set", far, "master", f"br{number}", "up", inside=switch)
            else:
                ip("link", "set", far, "up", inside=self.space(node))
            ip("addr", "add", f"192.168.{76 + number}.{node + 1}/24", "dev", name, inside=self.space(node))
            ip("link", "set", name, "up", inside=self.space(node))

    def on(self, node: int, script: str) -> None:
        """Run a shell script in the network of a node, or of the switch for -1."""
        space = f"{self._prefix}-s" if node < 0 else self.space(node)
        subprocess.run(["ip", "netns", "exec", space, "bash", "-ec", script], check=True)

    def processes(self, node: int) -> list[int]:
        """The pids of all processes of a node."""
        done = subprocess.run(["ip", "netns", "pids", self.space(node)], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self, node: int) -> None:
        """End all processes of a node with SIGKILL."""
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def doctor(
        self,
        level: str = "standard",
        *,
        tune: bool = False,
        scripts: Mapping[int, str] | None = None,
        env: Mapping[int, Mapping[str, str]] | None = None,
        cluster: Mapping[str, Any] | None = None,
        midway: Callable[[], None] | None = None,
    ) -> Results:
        """Run the doctor on every node. `scripts` run before it, in the mounts of a node.

        `midway` is called when the tests of ranks begin.
        """
        run = self.prepare(level, cluster or {}, tune)
        began = time.monotonic()
        started = {
            node: self._start(run, node, (scripts or {}).get(node, ""), (env or {}).get(node, {}))
            for node in range(self.count)
        }
        if midway is not None:
            orders = run.attempt(0).path / "doctor"
            wait_for(
                lambda: [one for one in orders.glob("order-*.json") if '"tests"' in one.read_text()],
                "test of ranks",
            )
            midway()
        outputs = [self._output(node) for node in range(self.count)]
        self.output = dict(enumerate(wait_for_ends(list(started.values()), outputs)))
        self.seconds = time.monotonic() - began
        found = results_of(run)
        assert found is not None
        print("\n".join(found.page()))
        return found

    def prepare(self, level: str, cluster: Mapping[str, Any], tune: bool = False) -> RunDir:
        run = RunDir(self.folder / f"run-{time.monotonic_ns()}")
        run.attempt(0).path.mkdir(parents=True)
        job = {"name": "doctor", "command": Options(level, tune).command}  # type: ignore[arg-type]
        about = {"id": run.id, "job": job, "cluster": {"name": "spaces", **cluster}}
        run.submitted.write_text(json.dumps(about))
        layout = {"nodes": self.count, "ranks_per_node": self.per_node, "gpus_per_node": 0}
        (run.path / "plan.json").write_text(json.dumps({"layout": layout}))
        return run

    def _start(self, run: RunDir, node: int, script: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        python, find = shlex.quote(sys.executable), shlex.quote(INTERFACE)
        inside = f"""
            hostname n{node}
            mount --bind {shlex.quote(str(self.folder / "hosts"))} /etc/hosts
            {script}
            if [[ -z ${{GLOO_SOCKET_IFNAME:-}} ]]; then
              read -r _ GLOO_SOCKET_IFNAME _ <<<"$({python} -c {find} {self.address(0)} 61000)"
              export GLOO_SOCKET_IFNAME
            fi
            exec {python} -m launcher.doctor
        """
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("LAUNCHER_")},
            "OMP_NUM_THREADS": "1",
            "LAUNCHER_RUN_DIR": str(run.path),
            "LAUNCHER_ATTEMPT": "0",
            "LAUNCHER_NODE_RANK": str(node),
            "LAUNCHER_NODES": str(self.count),
            "LAUNCHER_RENDEZVOUS_HOST": self.address(0),
            "LAUNCHER_RENDEZVOUS_PORT": "61007",
            **env,
        }
        command = ["nsenter", f"--net=/run/netns/{self.space(node)}", "unshare", "--mount", "--uts"]
        with open(self._output(node), "wb") as output:
            return subprocess.Popen(
                [*command, "--propagation", "private", "bash", "-ec", inside],
                env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _output(self, node: int) -> Path:
        return self.folder / f"output-{node}"


def sick(results: Results, *leave_out: str) -> dict[str, Finding]:
    """The findings that are not good, by check. That the run's ranks never started is left out, as is what a
    busy machine decides."""
    ignored = {"ranks", "free-memory", "write", "read", "latency", "space", "compute", "load", *leave_out}
    return {one.check: one for one in results.findings if one.verdict != "good" and one.check not in ignored}
