from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.lab import SlurmLab, free_ports
from tests.slurm.shape import PARTITIONS, Shape

T = TypeVar("T")

# Nodes of their own for what would disturb others.
NODES = {
    **PARTITIONS,
    "main": PARTITIONS["main"].replace("ALL", "n[1-4]"),
    "short": PARTITIONS["short"].replace("ALL", "n[1-4]"),
    "urgent": PARTITIONS["main"].replace("Default=YES ", "").replace("ALL", "n[5-6]"),
    "scavenge": PARTITIONS["scavenge"].replace("ALL", "n5"),
    "scavenge-cancel": PARTITIONS["scavenge-cancel"].replace("ALL", "n6"),
    "fragile": "Nodes=n[7-9] MaxTime=60 PreemptMode=OFF",
}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Nine nodes with accounting, started once."""
    yield from started(tmp_path_factory, Shape(nodes=9, partitions=tuple(NODES.items()), **free_ports()))


def started(tmp_path_factory: pytest.TempPathFactory, shape: Shape) -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(f"no Slurm: {why}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.start(shape)
    yield cluster
    cluster.stop()


@pytest.fixture
def slurm_lab(tmp_path: Path, cluster: Cluster) -> Iterator[SlurmLab]:
    lab = SlurmLab(tmp_path, cluster)
    yield lab
    clean_up(lab)


def clean_up(lab: SlurmLab) -> None:
    """No job of a failed test stays; jobs of other folders are others'."""
    for line in lab.slurm("squeue", "-h", "-o", "%A %Z").splitlines():
        job, _, folder = line.partition(" ")
        if folder.startswith(str(lab.folder)):
            lab.slurm("scancel", job)


Story = Callable[[SlurmLab], T]


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Story[Any]], Any]]:
    """What a story of the module's STORIES came to. They run side by side: most of their time is Slurm's."""
    stories: list[Story[Any]] = request.module.STORIES
    labs = {story: SlurmLab(tmp_path_factory.mktemp(story.__name__), cluster) for story in stories}
    with ThreadPoolExecutor(max_workers=len(stories)) as pool:
        futures: dict[Story[Any], Future[Any]] = {
            story: pool.submit(story, lab) for story, lab in labs.items()
        }
        yield lambda story: futures[story].result()
        for future in futures.values():
            future.cancel()
    for lab in labs.values():
        clean_up(lab)
