from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.lab import SlurmLab
from tests.slurm.laptop import Laptop
from tests.slurm.shape import PARTITIONS, Shape

# Nodes of their own for what would disturb others.
NODES = {
    **PARTITIONS,
    "main": PARTITIONS["main"].replace("ALL", "n[1-4]"),
    "short": PARTITIONS["short"].replace("ALL", "n[1-4]"),
    "urgent": PARTITIONS["main"].replace("Default=YES ", "").replace("ALL", "n[5-6],n12"),
    "scavenge": PARTITIONS["scavenge"].replace("ALL", "n5"),
    "scavenge-cancel": PARTITIONS["scavenge-cancel"].replace("ALL", "n6"),
    "scavenge-at-once": PARTITIONS["scavenge"].replace("ALL", "n12").replace("GraceTime=10", "GraceTime=0"),
    "fragile": "Nodes=n[7-9] MaxTime=60 PreemptMode=OFF",
    "fragile-too": "Nodes=n[10-11] MaxTime=60 PreemptMode=OFF",
}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Twelve nodes with accounting, started once; each takes its own name for 127.0.1.1."""
    shape = Shape(nodes=12, partitions=tuple(NODES.items()), own_name_is_loopback=True)
    yield from started(tmp_path_factory, shape)


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


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a site has answered is kept for an hour, and not for other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


AT_ONCE = 5
"More would keep each other from starting within a time limit, on two cores."

Story = Callable[[SlurmLab], Any]


@pytest.fixture
def it(request: pytest.FixtureRequest, told: dict[Story, Future[Any]]) -> Any:
    """What the test's story came to."""
    return told[request.param].result()


@pytest.fixture(scope="module")
def lab_in(cluster: Cluster) -> Callable[[Path], SlurmLab]:
    """Where a story takes place."""
    return lambda folder: SlurmLab(folder, cluster)


@pytest.fixture(scope="module")
def laptops(cluster: Cluster) -> Iterator[Callable[[Path], Laptop]]:
    """Each with a login node of its own."""
    made: list[Laptop] = []

    def laptop(folder: Path) -> Laptop:
        made.append(Laptop(folder, cluster))
        return made[-1]

    yield laptop
    for one in made:
        one.sshd.close()


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest,
    lab_in: Callable[[Path], SlurmLab],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[Story, Future[Any]]]:
    """The stories of the tests that were asked for, side by side: most of their time is Slurm's."""
    tests = [item for item in request.session.items if item.parent is request.node]
    stories: list[Story] = [test.callspec.params["it"] for test in tests]  # type: ignore[attr-defined]
    labs = {story: lab_in(tmp_path_factory.mktemp(story.__name__)) for story in stories}
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        yield {story: pool.submit(story, lab) for story, lab in labs.items()}
    for lab in labs.values():
        clean_up(lab)
