"""Profiles: what belongs to which scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from launcher.spec.cluster import Cluster

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
        ({"max_nodes": 3}, "max_nodes is 3, but ssh.hosts names 2"),
        ({"scheduler": "local"}, "`ssh:` is given but scheduler is local"),
        ({"login": "della"}, "`login:` is given but scheduler is ssh"),
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
