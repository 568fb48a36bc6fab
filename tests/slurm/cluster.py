"""A real Slurm cluster on this machine: slurmctld, slurmdbd and MariaDB, and a slurmd for each node.

Each node has host name, address, processes and /dev/shm of its own (Linux namespaces), so it can be killed
as a whole. All of it lies in one folder; nothing of the machine's own Slurm is touched.

    python -m tests.slurm.cluster start FOLDER [--nodes 4]
    python -m tests.slurm.cluster crash FOLDER n2
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from tests.slurm import shape as conf
from tests.slurm.shape import Shape

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sacct", "slurmdbd", "mariadbd", "ip", "unshare")
SBIN = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
CGROUP = Path("/sys/fs/cgroup/memory")
WAIT = 120.0
ROOT = Path(__file__).resolve().parents[2]

# The node's init: waits for its network cable, then runs slurmd and reaps what jobs leave behind.
NODE = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs -o mode=1777 tmpfs /dev/shm
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set lo up; ip addr add "$3/16" dev eth0; ip link set eth0 up
shift 3; "$@" & sleep infinity & wait
"""


def missing() -> str:
    """Why no cluster can be started here; "" when it can."""
    absent = [name for name in NEEDED if shutil.which(name, path=SBIN) is None]
    if absent:
        return f"no {', '.join(absent)}: bash tests/slurm/install.sh"
    if os.geteuid() != 0 and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode != 0:
        return "a cluster needs root, or sudo without a password"
    trial = [*_root(), "unshare", "--uts", "--net", "--mount", "--pid", "--fork", "true"]
    if subprocess.run(trial, capture_output=True).returncode != 0:
        return "namespaces are forbidden here"
    return ""


def _root() -> list[str]:
    return [] if os.geteuid() == 0 else ["sudo", "-n"]


class ClusterError(Exception):
    """A daemon did not come up; the message holds the end of its log."""


class Cluster:
    """Verbs of an administrator. Those of a user are Slurm's own, with `env()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def shape(self) -> Shape:
        return Shape.load(self.folder / "shape.json")

    def start(self, shape: Shape) -> None:
        """Everything, in a new or a stopped folder. Raises ClusterError."""
        if os.geteuid() != 0:
            options = [f"--{field.name}={_word(getattr(shape, field.name))}" for field in fields(shape)]
            self._as_root("start", *options)
            return
        shape = self._take_octet(shape)
        try:
            self._write(shape)
            self._plug_switch(shape)
            self._munge()
            if shape.accounting:
                self._database(shape)
                self.start_accounting()
                self._sacctmgr("add", "cluster", conf.CLUSTER)
            self.start_controller()
            for node in shape.names:
                self.start_node(node)
            self.wait_idle(shape.nodes)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """All daemons and jobs; files stay. Does nothing where nothing runs."""
        if os.geteuid() != 0:
            self._as_root("stop")
            return
        if not (self.folder / "shape.json").exists():
            return
        shape = self.shape
        for node in shape.names:
            self.crash_node(node)
        for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
            self._end(name)
        # The namespace alone would take the cable with it some time after the answer.
        _quiet("ip", "link", "del", _switch(shape))
        _quiet("ip", "netns", "del", _switch(shape))
        for node in shape.names:
            for path in sorted((CGROUP / f"slurm_{node}").glob("**/"), reverse=True):
                with contextlib.suppress(OSError):
                    path.rmdir()

    def start_node(self, node: str) -> None:
        if os.geteuid() != 0:
            self._as_root("start-node", node)
            return
        shape = self.shape
        inside = ["bash", "-c", NODE, "node", node, str(self.folder / f"hosts-{node}"), shape.address(node)]
        spaces = ["--uts", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        slurmd = [self._bin("slurmd"), "-D", "-N", node, "-d", self._bin("slurmstepd")]
        command = ["unshare", *spaces, "--propagation", "private", *inside, *slurmd]
        pid = self._spawn(f"node-{node}", command)
        _wait(lambda: _namespace(pid) != _namespace(os.getpid()), f"network namespace of {node}")
        switch = _switch(shape)
        cable = ["link", "add", node, "type", "veth", "peer", "name", "eth0", "netns", str(pid)]
        _run("ip", "-n", switch, *cable)
        _run("ip", "-n", switch, "link", "set", node, "master", "switch", "up")

    def crash_node(self, node: str) -> None:
        """The whole node dies at once, its jobs and its cable too."""
        if os.geteuid() != 0:
            self._as_root("crash", node)
            return
        self._end(f"node-{node}", signal.SIGKILL)

    def start_controller(self) -> None:
        if os.geteuid() != 0:
            self._as_root("start-controller")
            return
        self._spawn("slurmctld", [self._bin("slurmctld"), "-D", "-i"])
        _wait(lambda: _answers("scontrol", "ping", env=self._environ()), "slurmctld", self._log("slurmctld"))

    def stop_controller(self) -> None:
        if os.geteuid() != 0:
            self._as_root("stop-controller")
            return
        self._end("slurmctld")

    def freeze_controller(self) -> None:
        """It takes connections and requests, and answers none."""
        if os.geteuid() != 0:
            self._as_root("freeze-controller")
            return
        os.kill(self._pid("slurmctld"), signal.SIGSTOP)

    def thaw_controller(self) -> None:
        if os.geteuid() != 0:
            self._as_root("thaw-controller")
            return
        os.kill(self._pid("slurmctld"), signal.SIGCONT)

    def start_accounting(self) -> None:
        if os.geteuid() != 0:
            self._as_root("start-accounting")
            return
        shape = self.shape
        self._spawn("slurmdbd", ["slurmdbd", "-D"], cwd=self.folder)
        _wait(lambda: _listens(shape.head, shape.port + 1), "slurmdbd", self._log("slurmdbd"))

    def stop_accounting(self) -> None:
        if os.geteuid() != 0:
            self._as_root("stop-accounting")
            return
        self._end("slurmdbd")

    def freeze_accounting(self) -> None:
        """slurmdbd takes connections and requests, and answers none."""
        if os.geteuid() != 0:
            self._as_root("freeze-accounting")
            return
        os.kill(self._pid("slurmdbd"), signal.SIGSTOP)

    def thaw_accounting(self) -> None:
        if os.geteuid() != 0:
            self._as_root("thaw-accounting")
            return
        os.kill(self._pid("slurmdbd"), signal.SIGCONT)

    def wait_idle(self, nodes: int) -> None:
        command = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]

        def idle() -> bool:
            done = subprocess.run(command, capture_output=True, text=True, env=self._environ())
            return len(set(done.stdout.split())) >= nodes

        _wait(idle, f"{nodes} idle nodes", self._log("slurmctld"), WAIT + nodes / 2)

    # -- how

    def _as_root(self, verb: str, *arguments: str) -> None:
        command = ["sudo", "-n", "env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.slurm.cluster"]
        done = subprocess.run([*command, verb, str(self.folder), *arguments], capture_output=True, text=True)
        if done.returncode != 0:
            raise ClusterError(done.stderr.strip())

    def _write(self, shape: Shape) -> None:
        for name in ("bin", "munge", "state", "spool", "run", "log", "dev"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name in ("state", "spool", "log"):  # ids begin anew, and so must what belongs to them
            shutil.rmtree(self.folder / name)
            (self.folder / name).mkdir()
        for node in shape.names:
            (self.folder / "spool" / node).mkdir()
        # slurmctld and slurmstepd look at their own name, which Debian's alternatives change.
        for name in ("slurmctld", "slurmd", "slurmstepd"):
            found = next(path for path in (Path(f"/usr/sbin/{name}-wlm"), _which(name)) if path.exists())
            link = self.folder / "bin" / name
            link.unlink(missing_ok=True)
            link.symlink_to(found)
        for i in range(shape.gpus_per_node):
            device = self.folder / "dev" / f"gpu{i}"
            if not device.exists():
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        cgroups = (CGROUP / "memory.limit_in_bytes").exists() and os.access(CGROUP, os.W_OK)
        user = getpass.getuser()
        shape.save(self.folder / "shape.json")
        texts = {
            **{f"hosts-{node}": conf.hosts(shape, node) for node in shape.names},
            "slurm.conf": conf.slurm_conf(shape, self.folder, user, cgroups),
            "gres.conf": conf.gres_conf(shape, self.folder),
            "cgroup.conf": conf.cgroup_conf(cgroups, slurm_version()),
            "plugstack.conf": "",
        }
        for name, text in texts.items():
            (self.folder / name).write_text(text)
        database = self.folder / "slurmdbd.conf"  # slurmdbd refuses one that others can read
        database.touch(0o600)
        database.write_text(conf.slurmdbd_conf(shape, self.folder, user))

    def _take_octet(self, shape: Shape) -> Shape:
        """The first address range whose namespace and cable can be made: each is made by one at a time.

        Either alone keeps nobody out: names of namespaces are files, which a container has of its own,
        while it may share the network, and with it the cables, with this host.
        """
        for octet in [shape.octet] if shape.octet else conf.OCTETS:
            taken = replace(shape, octet=octet)
            switch = _switch(taken)
            if any(_listens("127.0.0.1", taken.port + i) for i in range(3)):
                continue
            if not _answers("ip", "netns", "add", switch):
                continue
            if _answers("ip", "link", "add", switch, "type", "veth", "peer", "name", "host", "netns", switch):
                return taken
            _quiet("ip", "netns", "del", switch)
        raise ClusterError("every address range is taken: see `ip netns list` and `ip link`")

    def _plug_switch(self, shape: Shape) -> None:
        """A bridge in a namespace of its own: no firewall rule of this machine applies to it."""
        switch = _switch(shape)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        _run("ip", "-n", switch, "link", "set", "host", "master", "switch", "up")
        _run("ip", "addr", "add", f"{shape.head}/16", "dev", switch)
        _run("ip", "link", "set", switch, "up")

    def _munge(self) -> None:
        # --force: a temporary folder may belong to the user who runs the tests.
        key, socket_ = self.folder / "munge" / "key", self.folder / "munge" / "socket"
        if not key.exists():
            key.touch(0o600)
            key.write_bytes(os.urandom(1024))
        own = [f"--{name}={self.folder}/munge/{name}" for name in ("pid-file", "log-file", "seed-file")]
        self._spawn(
            "munged", ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_}", *own]
        )
        _wait(lambda: _answers("munge", "-n", f"--socket={socket_}"), "munged", self._log("munged"))

    def _database(self, shape: Shape) -> None:
        data, scratch = self.folder / "db", self.folder / "db-scratch"
        # Two databases that are made at the same time would take each other's temporary tables.
        scratch.mkdir(exist_ok=True)
        options = [f"--datadir={data}", f"--tmpdir={scratch}", "--user=root", "--innodb-log-file-size=8M"]
        if not data.exists():
            install = ["mariadb-install-db", "--no-defaults", *options, "--skip-test-db"]
            _run(*install, "--auth-root-authentication-method=normal")
        start = self.folder / "run" / "init.sql"
        start.write_text(  # a statement on each line
            "drop database if exists slurm_acct_db;\n"
            "create database slurm_acct_db;\n"
            "create user if not exists 'slurm'@'%' identified by 'slurm';\n"
            "grant all on slurm_acct_db.* to 'slurm'@'%';\n"
        )
        own = [f"--socket={self.folder}/run/db.socket", f"--pid-file={self.folder}/run/db.own-pid"]
        where = ["--bind-address=127.0.0.1", f"--port={shape.port + 2}", f"--init-file={start}"]
        # What is lost in a crash is only a test's.
        fast = ["--innodb-flush-log-at-trx-commit=0", "--skip-log-bin", "--skip-name-resolve"]
        limits = ["--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900"]
        self._spawn("mariadbd", ["mariadbd", "--no-defaults", *options, *own, *where, *fast, *limits])
        _wait(lambda: _listens("127.0.0.1", shape.port + 2), "mariadbd", self._log("mariadbd"))

    def _sacctmgr(self, *words: str) -> None:
        subprocess.run(["sacctmgr", "-iQ", *words], env=self._environ(), capture_output=True, timeout=120)

    def _environ(self) -> dict[str, str]:
        return {**os.environ, **self.env(), "PATH": SBIN}

    def _bin(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def _log(self, name: str) -> Path:
        own = self.folder / "log" / f"{name}.log"
        return own if own.exists() else self.folder / "log" / f"{name}.out"

    def _spawn(self, name: str, command: Sequence[str], cwd: Path | None = None) -> int:
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self._environ(), cwd=cwd, start_new_session=True,
            )  # fmt: skip
        record = {"pid": process.pid, "started": _started(process.pid)}
        (self.folder / "run" / f"{name}.pid").write_text(json.dumps(record))
        return process.pid

    def _pid(self, name: str) -> int:
        return int(json.loads((self.folder / "run" / f"{name}.pid").read_text())["pid"])

    def _end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """By pid, and only the process that was started here: a pid may belong to another by now."""
        file = self.folder / "run" / f"{name}.pid"
        if not file.exists():
            return
        record = json.loads(file.read_text())
        pid = int(record["pid"])
        deadline = time.monotonic() + 10
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            while _started(pid) == record["started"]:
                os.kill(pid, how if time.monotonic() < deadline else signal.SIGKILL)
                _reap(pid)
                time.sleep(0.05)
        file.unlink()


def slurm_version() -> tuple[int, ...]:
    said = subprocess.run([_which("slurmctld"), "-V"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", said)[:3])


def _switch(shape: Shape) -> str:
    return f"launcher{shape.octet}"


def _which(name: str) -> Path:
    return Path(shutil.which(name, path=SBIN) or name)


def _word(value: object) -> str:
    return json.dumps(value)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


def _quiet(*command: str) -> None:
    subprocess.run(command, capture_output=True)


def _answers(*command: str, env: dict[str, str] | None = None) -> bool:
    return subprocess.run(command, capture_output=True, env=env).returncode == 0


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def _started(pid: int) -> str | None:
    """Tells a process from a later one with the same pid; None for one that is gone or a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] == "Z" else words[19]


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _wait(condition: Callable[[], bool], what: str, log: Path | None = None, seconds: float = WAIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-2000:] if log is not None and log.exists() else ""
            raise ClusterError(f"no {what} after {seconds:.0f} s\n{said}")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = {
        "start": None, "stop": Cluster.stop,
        "start-node": Cluster.start_node, "crash": Cluster.crash_node,
        "start-controller": Cluster.start_controller, "stop-controller": Cluster.stop_controller,
        "freeze-controller": Cluster.freeze_controller, "thaw-controller": Cluster.thaw_controller,
        "start-accounting": Cluster.start_accounting, "stop-accounting": Cluster.stop_accounting,
        "freeze-accounting": Cluster.freeze_accounting, "thaw-accounting": Cluster.thaw_accounting,
    }  # fmt: skip
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("folder", type=Path)
    parser.add_argument("node", nargs="*")
    for field in fields(Shape):
        parser.add_argument(f"--{field.name}", type=json.loads, default=field.default)
    options = parser.parse_args()
    cluster = Cluster(options.folder)
    try:
        if options.verb == "start":
            given = {field.name: getattr(options, field.name) for field in fields(Shape)}
            cluster.start(Shape(**given))
        else:
            verbs[options.verb](cluster, *options.node)  # type: ignore[operator]
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
