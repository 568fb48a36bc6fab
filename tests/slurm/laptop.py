"""A user's laptop: its project folder, and a login node of a real cluster behind a real sshd."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from launcher.rundir.layout import RunDir
from tests.schedulers.sshd import Sshd
from tests.slurm.cluster import ROOT, Cluster
from tests.slurm.lab import SlurmLab

# Slow until it goes on from a checkpoint.
MINE = """
import os, pathlib, time
from launcher.tasks.gpt import PydocGPT

FIRST = not list(pathlib.Path(os.environ["LAUNCHER_RUN_DIR"]).glob("checkpoints/step-*"))
print("edition", EDITION, "token of", len(os.environ.get("TOKEN", "")))

class Mine(PydocGPT):
    def loss(self, model, batch):
        time.sleep(float(os.environ.get("PACE", "0")) * FIRST)
        return super().loss(model, batch)
"""


class Laptop(SlurmLab):
    """A laptop: `folder` is a project under git, `there` the cluster's disk."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        if shutil.which("rsync") is None:
            pytest.skip("rsync is not installed")
        self.sshd = Sshd(Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp")))
        super().__init__(folder, cluster)
        for name in ("SLURM_CONF", "PYTHONPATH"):
            del self.environ[name]
        self.environ |= self.sshd.environ() | {"PYTHONPATH": str(ROOT), "TOKEN": "the laptop's own"}
        of_the_cluster = {
            **cluster.env(),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(self.there / "state"),
            "XDG_CACHE_HOME": str(self.there / "cache"),
            "CLUSTER_TOKEN": "sesame-sesame",
        }
        sets = " ".join(f"{name}={shlex.quote(value)}" for name, value in of_the_cluster.items())
        self.sshd.login_shell(f'echo Welcome; export {sets}; exec sh -c "$SSH_ORIGINAL_COMMAND"')
        (folder / ".gitignore").write_text("there/\nstate/\ncache/\nconfig/\n")
        self.git("init", "-q")
        self.edition(1)
        self.git("add", "mine.py")
        self.git("-c", "user.name=me", "-c", "user.email=me@here", "commit", "-qm", "one")

    @property
    def there(self) -> Path:
        return self.folder / "there"

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.folder, check=True)

    def edition(self, number: int) -> None:
        """Of the program, in the working directory."""
        self.script(f"EDITION = {number}\n{MINE}", "mine.py")

    def profile(self, name: str = "lab.yaml", /, runs: str = "runs", **slurm: Any) -> None:
        fields = {
            "name": "lab",
            "scheduler": "slurm",
            "login": self.sshd.host,
            "max_nodes": 9,
            "paths": {"python": sys.executable, "runs": str(self.there / runs)},
            "slurm": {"partition": "main", "gpu_request": "none", "signal_seconds": 30, **slurm},
        }
        YAML().dump(fields, self.folder / name)

    def on_disk(self, run: RunDir) -> RunDir:
        """The run directory on the cluster."""
        return RunDir(self.there / "runs" / run.id)

    def said(self, *arguments: str, code: int = 0, timeout: float = 120) -> str:
        """What a command prints."""
        done = self.cli(*arguments, timeout=timeout)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr
