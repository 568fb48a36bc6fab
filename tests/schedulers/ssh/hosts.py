"""A user's laptop, and hosts without a batch system, each behind a real sshd with keys of its own."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from launcher.rundir.layout import RunDir
from launcher.supervise.gpus import FOLDER
from tests.lab import Lab, wait_for
from tests.schedulers.sshd import REAL_SSH, Sshd

ROOT = Path(__file__).parents[3]
NAMES = ("tensor01", "tensor02")
ENDED = ("succeeded", "failed", "cancelled", "interrupted")

# As nvidia-smi prints it with --format=csv,noheader,nounits, and with -L. Which GPUs there are and who
# computes on them stands in files beside it.
NVIDIA_SMI = """#!/bin/sh
here=$(dirname "$0")
case "$1" in
  -L) sed 's/^\\([0-9]*\\), \\([^,]*\\), \\([^,]*\\),.*/GPU \\1: \\3 (UUID: \\2)/' "$here/gpus" ;;
  --query-gpu=index,uuid,name,memory.total,memory.used) cat "$here/gpus" ;;
  --query-gpu=name,memory.total) cut -d, -f3,4 "$here/gpus" | sed 's/^ //' ;;
  --query-compute-apps=gpu_uuid,pid,process_name,used_memory) cat "$here/apps" ;;
  *) echo "Field \\"$1\\" is not a valid field to query."; exit 2 ;;
esac
"""


class Host:
    """One machine, as far as a user can tell: own home, own GPUs, own sshd."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp"))
        self.sshd = Sshd(self.folder, host=name, address=address)
        self.home, self.programs = self.folder / "home", self.folder / "programs"
        self.home.mkdir()
        self.programs.mkdir()
        (self.programs / "nvidia-smi").write_text(NVIDIA_SMI)
        (self.programs / "nvidia-smi").chmod(0o755)
        self.gpus(0)
        # nvidia-smi is in the PATH of login shells only.
        (self.home / ".bash_profile").write_text(f"echo noise; export PATH={self.programs}:$PATH\n")
        sets = {
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
        }
        words = " ".join(f"{key}={shlex.quote(value)}" for key, value in sets.items())
        self.sshd.login_shell(f'echo Welcome to {name}; export {words}; exec sh -c "$SSH_ORIGINAL_COMMAND"')

    def gpus(self, count: int, used: Sequence[int] = ()) -> None:
        """A6000s; of each, MiB in use."""
        rows = [
            f"{index}, {self.uuid(index)}, NVIDIA RTX A6000, 49140, {used[index] if used else 4}\n"
            for index in range(count)
        ]
        (self.programs / "gpus").write_text("".join(rows))
        (self.programs / "apps").write_text("")

    def busy(self, *indexes: int, pid: int = 1) -> None:
        rows = [f"{self.uuid(index)}, {pid}, /opt/env/bin/python, 20480\n" for index in indexes]
        (self.programs / "apps").write_text("".join(rows))

    def uuid(self, index: int) -> str:
        digest = hashlib.sha256(os.fsencode(self.folder)).hexdigest()
        return f"GPU-5d1e0a3{index}-8a9f-2b7c-91d4-{digest[:12]}"

    def close(self) -> None:
        for index in range(8):
            (FOLDER / self.uuid(index)).unlink(missing_ok=True)
        self.sshd.close()


class Laptop(Lab):
    """`folder` is a project; `disk` is what the hosts share."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("rsync") is None:
            pytest.skip("rsync is not installed")
        super().__init__(folder)
        self.hosts = [Host(name, f"127.0.0.{number}") for number, name in enumerate(NAMES, 2)]
        self.disk = folder / "disk"
        self.home = Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp"))
        programs = self.home / "bin"
        programs.mkdir()
        config = self.home / "config"
        config.write_text("".join((host.folder / "config").read_text() for host in self.hosts))
        (programs / "ssh").write_text(f'#!/bin/sh\nexec {REAL_SSH} -F {config} "$@"\n')
        (programs / "ssh").chmod(0o755)
        self.environ |= {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(self.home),
            "PYTHONPATH": str(ROOT),
        }
        (folder / ".gitignore").write_text("disk/\nstate/\ncache/\nconfig/\nweights*/\n")
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        self.profile("one.yaml", NAMES[:1])
        self.profile("both.yaml", NAMES)

    @property
    def runs(self) -> Path:
        """There."""
        return self.disk / "runs"

    def profile(self, file: str, hosts: Sequence[str], **fields: Any) -> None:
        paths = {"python": sys.executable, "runs": str(self.runs)}
        base = {
            "name": file.partition(".")[0],
            "scheduler": "ssh",
            "ssh": {"hosts": list(hosts)},
            "paths": paths,
        }
        YAML().dump(base | fields, self.folder / file)

    def on_disk(self, run: RunDir) -> RunDir:
        return RunDir(self.runs / run.id)

    def said(self, *arguments: str, code: int = 0, timeout: float = 120) -> str:
        done = self.cli(*arguments, timeout=timeout)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def wait(self, run: RunDir, *states: str, timeout: float = 120) -> dict[str, Any]:
        """Until it has ended by its own records there; then asked."""
        there, wanted = self.on_disk(run), states or ENDED
        wait_for(lambda: there.read_state().state in wanted, f"{wanted} of {run.id}", timeout)
        return self.status(run)

    def weights(self, run: RunDir) -> bytes:
        """Of the last checkpoint, exported where it lies."""
        to = self.folder / f"weights-{run.id}"
        (file,) = self.json("export", str(self.on_disk(run).path), "--to", str(to))["files"]
        return Path(file).read_bytes()

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        shutil.rmtree(self.home, ignore_errors=True)
