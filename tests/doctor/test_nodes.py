"""Faults between nodes are made for real in network namespaces, and found and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.doctor.outcome import BUS
from tests.doctor.nodes import Nodes, sick
from tests.doctor.sick import stub


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path) as nodes:
        yield nodes


def test_two_healthy_nodes(nodes: Nodes) -> None:
    found = nodes.doctor()
    assert sick(found, "all-reduce") == {}
    by_check = {one.check: one for one in found.findings}
    assert {
        "name",
        "rendezvous-port",
        "mtu",
        "loss",
        "bandwidth",
        "joined",
        "all-to-all",
        "model-fsdp",
    } <= set(by_check)
    assert by_check["mtu"].measured == by_check["mtu"].expected
    assert by_check["interfaces"].measured == "eth0 to eth0"
    assert by_check["same-files"].measured == "seen" and by_check["shared-locks"].measured == "excludes"
    assert not list(nodes.folder.rglob(".doctor*"))


def drop_rendezvous_port(nodes: Nodes) -> None:
    """A firewall that drops one way what comes to the rendezvous port (iptables)."""
    nodes.on(1, "iptables -A INPUT -p tcp --dport 61000:65535 --syn -j DROP")


def mtu_too_large(nodes: Nodes) -> None:
    """Packets of 9,000 bytes, of which the switch passes 1,500."""
    nodes.on(0, "ip link set eth0 mtu 9000")
    nodes.on(1, "ip link set eth0 mtu 9000")


def lossy(nodes: Nodes) -> None:
    """20 % of the packets lost (iptables)."""
    nodes.on(1, "iptables -A INPUT -m statistic --mode random --probability 0.2 -j DROP")


def slow_link(nodes: Nodes) -> None:
    """A link of 20 Mb/s (tc)."""
    nodes.on(1, "tc qdisc add dev eth0 root tbf rate 20mbit burst 64kbit latency 400ms")


def wrong_hosts(nodes: Nodes) -> None:
    """A wrong `/etc/hosts`: the other node's name is 127.0.1.1."""
    hosts = nodes.folder / "hosts"
    hosts.write_text(hosts.read_text().replace(nodes.address(1), "127.0.1.1"))


WAY_FAULTS = [
    (drop_rendezvous_port, "rendezvous-port", "broken", "0 to 1"),
    (mtu_too_large, "mtu", "broken", "above 1500"),
    (lossy, "loss", "broken", "Packets get lost"),
    (slow_link, "bandwidth", "poor", "slow"),
    (wrong_hosts, "name", "poor", "127.0.1.1"),
]


@pytest.mark.parametrize(
    ("fault", "check", "verdict", "words"),
    WAY_FAULTS,
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_faulty_network_is_found_and_named(
    nodes: Nodes, fault: Callable[[Nodes], None], check: str, verdict: str, words: str
) -> None:
    fault(nodes)
    found = sick(nodes.doctor("quick"))
    assert found[check].verdict == verdict and found[check].cure
    assert words in f"{found[check].subjects} {found[check].cause}"


def test_a_clock_that_is_30_s_ahead(nodes: Nodes) -> None:
    found = sick(nodes.doctor("quick", env={1: {"LD_PRELOAD": str(stub("clock_stub", nodes.folder))}}))
    assert found["clocks"].verdict == "poor"
    assert found["clocks"].subjects == ("0 to 1",) and found["clock"].nodes == (1,)
    assert "+30" in found["clock"].measured


def test_a_node_that_cannot_write_the_run_folder_answers_over_the_network(nodes: Nodes) -> None:
    folder = nodes.folder
    found = nodes.doctor(
        "quick", scripts={1: f"mount --bind {folder} {folder}; mount -o remount,ro,bind {folder}"}
    )
    finding = sick(found)["run-folder"]
    assert (finding.verdict, finding.nodes) == ("broken", (1,)) and "Read-only" in finding.cause


def test_nodes_with_different_folders_for_checkpoints(nodes: Nodes) -> None:
    other = "mkdir $LAUNCHER_RUN_DIR/checkpoints; mount -t tmpfs tmpfs $LAUNCHER_RUN_DIR/checkpoints"
    finding = sick(nodes.doctor("quick", scripts={1: other}))["same-files"]
    assert (finding.verdict, finding.subjects) == ("broken", ("0 to 1, checkpoints",))
    assert finding.measured == "missing" and not list(nodes.folder.rglob(".doctor*"))


def test_locks_that_only_one_node_sees(nodes: Nodes) -> None:
    (nodes.folder / "locks").mkdir()
    library = stub("local_locks_stub", nodes.folder)
    env = {"LD_PRELOAD": str(library), "LOCKS": str(nodes.folder / "locks")}
    found = nodes.doctor("quick", env={1: env})
    assert "flock" not in sick(found), "on one node they exclude"
    finding = sick(found)["shared-locks"]
    assert (finding.verdict, finding.measured) == ("poor", "excludes nobody")
    assert len(finding.subjects) == 2


PATCH = """
import importlib.abc, importlib.util, os, signal, sys

def patch(dist):
    original = dist.all_reduce
    def all_reduce(tensor, *arguments, **more):
        if {fault}
        return result
    dist.all_reduce = all_reduce

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
STOPS = PATCH.replace(
    "{fault}", "tensor.numel() > 2:\n            os.kill(os.getpid(), signal.SIGSTOP)\n"
    "        result = original(tensor, *arguments, **more)"
)  # fmt: skip
ADDS = PATCH.replace(
    "{fault}", "tensor.numel() > 2:\n            tensor[0] += 1\n"
    "        result = original(tensor, *arguments, **more)"
)  # fmt: skip


def faulty(folder: Path, text: str) -> dict[str, str]:
    """The environment of a node whose torch has a fault."""
    (folder / "faulty").mkdir()
    (folder / "faulty/sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(folder / "faulty")}


@pytest.mark.slow
def test_a_rank_that_stops_is_named(nodes: Nodes) -> None:
    found = sick(nodes.doctor(env={1: faulty(nodes.folder, STOPS)}))
    assert "rank 1 (node 1) is stopped (SIGSTOP, state T)" in found["all-reduce"].cause
    assert found["all-reduce"].verdict == "broken"
    assert set(found) == {"all-reduce"}


@pytest.mark.slow
def test_a_rank_that_adds_wrong_values_is_found_by_the_pairs(tmp_path: Path) -> None:
    with Nodes(tmp_path, 3) as nodes:
        found = sick(nodes.doctor(env={2: faulty(tmp_path, ADDS)}))
        assert found["all-reduce"].measured == "wrong values"
        assert "Every pair with rank 2 (node 2) fails" in found["pairs"].cause
        assert found["pairs"].verdict == "broken"


@pytest.mark.slow
def test_the_slow_node_of_three_is_named(tmp_path: Path) -> None:
    with Nodes(tmp_path, 3) as nodes:
        nodes.on(2, "tc qdisc add dev eth0 root tbf rate 20mbit burst 64kbit latency 400ms")
        found = sick(nodes.doctor())
        assert "Every pair with rank 2 (node 2) is slow" in found["pairs"].cause
        assert found["pairs"].verdict == "poor"


@pytest.mark.slow
def test_two_healthy_nodes_are_examined_thoroughly(nodes: Nodes) -> None:
    found = nodes.doctor("thorough")
    ends = {one.check: one.value for one in found.values if one.check in BUS}
    assert {name: end["kind"] for name, end in ends.items()} == dict.fromkeys(BUS, "ok")
    for end in ends.values():
        assert end["sizes"][0]["bytes"] == 8 and end["sizes"][-1]["bytes"] >= 2**24
    assert sick(found, *BUS, "bandwidth", "pairs") == {}
    assert nodes.seconds < 300, "the goal for two nodes"


RANK_FAULTS = [
    ("A clock that is 30 s ahead of the other node's", "clocks", "poor"),
    ("A run folder that one node cannot write (read-only mount)", "run-folder", "broken"),
    ("Checkpoints in another folder on one node (tmpfs)", "same-files", "broken"),
    ("Locks that only one node sees (by a preloaded library)", "shared-locks", "poor"),
    ("A rank that stops (SIGSTOP)", "all-reduce", "broken"),
    ("A rank that adds wrong values", "pairs", "broken"),
    ("A slow node of three (tc)", "pairs", "poor"),
    ("An interface in the profile that leads nowhere", "interfaces", "broken"),
]
"""The tests above, and that of `test_search.py` for the interface, make these."""
