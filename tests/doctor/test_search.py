"""Settings that cure a fault are found, and written into the profile with the reason beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.api.doctor import changed_profile, write_profile
from launcher.doctor.outcome import Outcome
from launcher.doctor.profile_change import changed, own_file
from launcher.doctor.settings import NCCL, Setting, candidates, fastest
from launcher.render.shipped import clusters_dir
from launcher.spec.load import load_cluster
from tests.doctor.nodes import Nodes, sick

PROFILE = """\
# Our cluster.
name: spaces
scheduler: ssh
network:
  interface: eth1   # as the data sheet says
ssh:
  hosts: [n0, n1]
"""


def test_the_cheapest_explanation_is_tried_first() -> None:
    on_one = [one.text for one in candidates("nccl", 1, [])]
    assert on_one[:2] == ["NCCL_SHM_DISABLE=1", "NCCL_P2P_DISABLE=1"]
    assert not any(one.startswith(("NCCL_IB", "NCCL_SOCKET", "NCCL_NET")) for one in on_one)
    on_two = [one.text for one in candidates("nccl", 2, ["ib0", "eth0"], ["mlx5_0"])]
    assert {"NCCL_SOCKET_IFNAME==ib0", "NCCL_IB_HCA==mlx5_0", "NCCL_IB_DISABLE=1"} <= set(on_two)
    assert "NCCL_SHM_DISABLE=1 NCCL_P2P_DISABLE=1" in on_two[len(NCCL) :], "pairs come last"
    assert [one.text for one in candidates("gloo", 2, ["eth0", "eth1"])] == [
        "GLOO_SOCKET_IFNAME=eth0",
        "GLOO_SOCKET_IFNAME=eth1",
    ]
    tuned = {one.text for one in candidates("nccl", 2, [], tune=True)}
    assert {one.text for one in NCCL if one.purpose == "faster"} <= tuned


def test_the_fastest_setting_must_be_clearly_faster() -> None:
    def end(bus: float) -> Outcome:
        return Outcome("ok", sizes=({"bytes": 2**24, "seconds": 1.0, "bus": bus},))

    slow, fast = Setting({"A": "1"}, ""), Setting({"B": "1"}, "")
    assert fastest(end(1e9), [(slow, end(1.05e9)), (fast, end(2e9))]) == (fast, end(2e9))
    assert fastest(end(1e9), [(slow, end(1.05e9)), (fast, Outcome("hang"))]) is None


@pytest.mark.parametrize("name", [file.stem for file in sorted(clusters_dir().glob("*.yaml"))])
def test_a_profile_keeps_its_comments_and_values(name: str, tmp_path: Path) -> None:
    before = (clusters_dir() / f"{name}.yaml").read_text()
    text = changed(before, {"NCCL_IB_DISABLE": "1"}, "launcher doctor: all-reduce hangs without it")
    assert [line for line in before.splitlines() if "#" in line and line not in text.splitlines()] == []
    assert "    # launcher doctor: all-reduce hangs without it\n    NCCL_IB_DISABLE: '1'" in text
    (tmp_path / f"{name}.yaml").write_text(text)
    found, old = load_cluster(tmp_path / f"{name}.yaml"), load_cluster(clusters_dir() / f"{name}.yaml")
    assert found.network.env == {**old.network.env, "NCCL_IB_DISABLE": "1"}
    same: dict[str, Any] = {"network": old.network}
    assert found.model_copy(update=same) == old


def test_a_shipped_profile_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert (
        own_file(clusters_dir() / "local.yaml", clusters_dir()) == tmp_path / "launcher/clusters/local.yaml"
    )
    assert own_file(tmp_path / "mine.yaml", clusters_dir()) == tmp_path / "mine.yaml"


@pytest.mark.slow
def test_an_interface_that_leads_nowhere_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile names eth1, which joins no nodes. The search finds eth0, and writes it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/spaces.yaml").write_text(PROFILE)
    with Nodes(tmp_path) as nodes:
        nodes.second_network()
        env = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
        results = nodes.doctor(cluster={"network": {"interface": "eth1"}}, env={0: env, 1: env})
    found = sick(results)
    assert found["interfaces"].verdict == "broken" and "eth1" in found["interfaces"].cause
    assert found["joined"].verdict == "broken"
    assert found["chosen"].measured == "GLOO_SOCKET_IFNAME=eth0"
    assert {one.check: one.verdict for one in results.findings if one.part == "model"} == {
        "model-alone": "good",
        "model-ddp": "good",
        "model-fsdp": "good",
    }
    change = changed_profile(results, "spaces")
    assert change is not None and "+    GLOO_SOCKET_IFNAME: eth0" in change.difference
    write_profile(change)
    written = tmp_path / "clusters/spaces.yaml"
    assert "interface: eth1   # as the data sheet says" in written.read_text()
    assert load_cluster(written).network.env == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert [file.name for file in (tmp_path / "clusters").iterdir()] == ["spaces.yaml"]


@pytest.mark.slow
def test_the_faster_of_two_networks_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is broken: eth0 reaches 400 Mb/s, and eth1 is not limited."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/spaces.yaml").write_text(PROFILE)
    with Nodes(tmp_path) as nodes:
        nodes.fast_network()
        nodes.on(1, "tc qdisc add dev eth0 root tbf rate 400mbit burst 256kbit latency 400ms")
        results = nodes.doctor(tune=True)
    assert sick(results)["chosen"].measured == "GLOO_SOCKET_IFNAME=eth1"
    tried = {one.subject for one in results.values if one.check == "setting"}
    assert tried == {"GLOO_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=eth1"}
    change = changed_profile(results, "spaces")
    assert change is not None and "+    GLOO_SOCKET_IFNAME: eth1" in change.difference
