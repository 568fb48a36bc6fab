"""The four places where one job file runs: this machine, Slurm, RunPod's sandbox, and a host behind ssh."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from launcher.rundir.layout import RunDir
from tests.lab import Lab
from tests.sandbox import server as sandbox
from tests.schedulers.ssh.conftest import on_two_hosts
from tests.slurm.cluster import Cluster, missing
from tests.slurm.lab import SlurmLab
from tests.slurm.shape import Shape


@dataclass
class Place:
    lab: Lab
    profile: str
    "After `-c`."
    there: Callable[[RunDir], RunDir]
    "Where the run really lies, which the CLI may know a copy of."
    not_ours: tuple[Path, ...] = ()
    "Folders of the scheduler itself, which must know secrets."


def _same(run: RunDir) -> RunDir:
    return run


@contextlib.contextmanager
def local(folder: Path) -> Iterator[Place]:
    yield Place(Lab(folder), "local", _same)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Place]:
    if why := missing():
        pytest.skip(f"no Slurm: {why}")
    cluster = Cluster(folder / "cluster")
    cluster.folder.mkdir()
    cluster.start(Shape(nodes=1))
    project = folder / "project"
    project.mkdir()
    try:
        yield Place(SlurmLab(project, cluster), "lab.yaml", _same)
    finally:
        cluster.stop()


@contextlib.contextmanager
def runpod(folder: Path) -> Iterator[Place]:
    pytest.importorskip("starlette")
    pytest.importorskip("boto3")
    project = folder / "project"
    project.mkdir()
    with sandbox.start(folder / "sandbox") as server:
        lab = Lab(project)
        lab.environ |= server.environ
        profile = {
            "name": "pods",
            "scheduler": "runpod",
            "container": {"runtime": "runpod", "image": "sandbox/image"},
            "paths": {"python": sys.executable},
            "runpod": {"cpu_id": "cpu3c", "vcpu": 2, "volume_id": sandbox.VOLUME, "max_hours": 1},
        }
        YAML().dump(profile, project / "pods.yaml")
        yield Place(
            lab, "pods.yaml", lambda run: RunDir(server.volume / "runs" / run.id), (folder / "sandbox",)
        )


@contextlib.contextmanager
def ssh(folder: Path) -> Iterator[Place]:
    with on_two_hosts(folder) as laptop:
        yield Place(laptop, "one.yaml", laptop.on_disk)


PLACES = {"local": local, "slurm": slurm, "runpod": runpod, "ssh": ssh}
