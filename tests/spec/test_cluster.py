"""Profiles: what belongs to which scheduler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ValidationError

from launcher.spec.cluster import Cluster
from launcher.spec.errors import SpecError
from launcher.spec.load import load_cluster
from launcher.spec.plugins import with_section
from launcher.spec.scheduler_section import Section

LAB: dict[str, Any] = {"name": "lab", "scheduler": "ssh", "ssh": {"hosts": ["tensor01", "me@tensor02"]}}


def test_there_are_as_many_nodes_as_hosts_unless_fewer_are_wanted() -> None:
    assert Cluster.model_validate(LAB).max_nodes == 2
    assert Cluster.model_validate({**LAB, "max_nodes": 1}).max_nodes == 1
    assert Cluster.model_validate(Cluster.model_validate(LAB).model_dump(mode="json")).max_nodes == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ssh": None}, "scheduler: ssh needs an `ssh:` section"),
        ({"ssh": {"hosts": []}}, "at least 1 item"),
        ({"ssh": {"hosts": ["a", "b", "a"]}}, "a is listed twice"),
        ({"ssh": {"hosts": ["-oProxyCommand=id"]}}, "'-oProxyCommand=id' is not a host: write user@host"),
        ({"ssh": {"hosts": ["a b"]}}, "'a b' is not a host"),
        ({"ssh": {"hosts": ["ssh://host:22"]}}, "a name of your ssh config"),
        ({"max_nodes": 3}, "max_nodes: is 3, but ssh.hosts names 2"),
        ({"scheduler": "local"}, "ssh: is given but scheduler is local"),
        ({"login": "della"}, "login: is given but scheduler is ssh"),
        ({"node": {"memory": 500}}, "500 bytes are too few; write the unit, for example 500GiB"),
        ({"node": {"gpu": {"type": "A100", "count": 1, "memory": "80"}}}, "80 bytes are too few"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Cluster.model_validate({**LAB, **fields})


def test_a_job_is_in_one_of_a_sites_clusters() -> None:
    slurm = {"name": "site", "scheduler": "slurm", "slurm": {"clusters": "all"}}
    with pytest.raises(ValidationError, match="name one cluster"):
        Cluster.model_validate(slurm)
    assert Cluster.model_validate({**slurm, "slurm": {"clusters": "gpu"}}).name == "site"


def test_a_profile_tells_of_its_scheduler_without_naming_it() -> None:
    gpu = {"type": "A", "count": 1, "memory": "80GiB"}
    rented = {"gpu_id": "A", "other_gpus": {"B": "96GiB"}, "volume_id": "v"}
    clusters = {
        "local": Cluster.model_validate({"name": "c", "scheduler": "local"}),
        "slurm": Cluster.model_validate({"name": "c", "scheduler": "slurm", "slurm": {}}),
        "login": Cluster.model_validate({"name": "c", "scheduler": "slurm", "login": "node"}),
        "ssh": Cluster.model_validate(LAB),
        "runpod": Cluster.model_validate(
            {"name": "c", "scheduler": "runpod", "node": {"gpu": gpu}, "runpod": rented}
        ),
    }
    elsewhere = {name for name, cluster in clusters.items() if cluster.runs_elsewhere}
    assert elsewhere == {"login", "ssh", "runpod"}
    assert {name for name, cluster in clusters.items() if cluster.rents} == {"runpod"}
    assert {name for name, c in clusters.items() if c.section and c.section.assigns_gpus} == {"slurm"}
    assert clusters["runpod"].section is not None
    (other,) = clusters["runpod"].section.alternatives(clusters["runpod"])
    assert other.node.gpu is not None and (other.node.gpu.type, other.node.gpu.memory) == ("B", 96 * 2**30)


class Spool(Section):
    """As another package may write it."""

    rents: ClassVar[bool] = True
    hosts: int

    def contradictions(self, cluster: Cluster) -> Iterator[tuple[tuple[str, ...], str]]:
        if cluster.max_nodes > self.hosts:
            yield ("max_nodes",), f"is above spool.hosts ({self.hosts})"


def test_the_section_of_another_package_is_asked_as_well() -> None:
    model = with_section("spool", Spool)
    profile = {"name": "c", "scheduler": "spool", "spool": {"hosts": 2}}
    assert model.model_validate(profile).rents
    with pytest.raises(ValidationError, match=r"max_nodes: is above spool\.hosts \(2\)"):
        model.model_validate({**profile, "max_nodes": 3})


def test_all_contradictions_of_a_profile_are_told_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"

    def said(text: str) -> list[str]:
        file.write_text(text)
        with pytest.raises(SpecError) as error:
            load_cluster(file)
        return [line.removeprefix(str(file)) for line in str(error.value).splitlines()]

    several = "name: c\nscheduler: ssh\nlogin: della\nslurm: {}\nmax_nodes: 3\nssh: {hosts: [a]}\n"
    assert said(several) == [
        ":3: login: is given but scheduler is ssh",
        ":4: slurm: is given but scheduler is ssh",
        ":5: max_nodes: is 3, but ssh.hosts names 1",
    ]
    assert said(several.replace("max_nodes: 3", "max_nodes: x")) == [
        ":3: login: is given but scheduler is ssh",
        ":4: slurm: is given but scheduler is ssh",
        ":5: max_nodes: must be a whole number, not 'x'",
    ]


def test_a_section_may_be_left_out_if_none_of_its_fields_is_required() -> None:
    """Of another package as well: such a section arrives with its defaults."""

    class Fifo(BaseModel):
        nice: int = 0

    profile = {"name": "c", "scheduler": "spool"}
    assert with_section("spool", Fifo).model_validate(profile).model_dump()["spool"] == {"nice": 0}
    with pytest.raises(ValidationError, match="scheduler: spool needs a `spool:` section with hosts"):
        with_section("spool", Spool).model_validate(profile)


def test_the_schedulers_are_not_imported_before_a_profile_is_read() -> None:
    code = (
        "import sys; from launcher.spec.cluster import Cluster\n"
        "assert not [name for name in sys.modules if name.startswith('launcher.schedulers')]\n"
        "Cluster(name='c', scheduler='slurm')\n"
        "print(*sorted(name for name in sys.modules if name.startswith('launcher.schedulers.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = ("runpod", "slurm", "ssh")
    names = [f"launcher.schedulers.{room}{module}" for room in rooms for module in ("", ".profile")]
    assert done.stdout.split() == names
