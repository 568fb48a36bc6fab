"""Faults between nodes are made for real in network namespaces, and found and named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.doctor.outcome import BUS
from launcher.doctor.results import Results
from tests.doctor.faulty_host import stub
from tests.doctor.nodes import Nodes, sick


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path) as nodes:
        yield nodes


@pytest.mark.slow
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


def drop_rendezvous_ports(nodes: Nodes, node: int) -> None:
    """A firewall that drops one way what comes to rendezvous ports, but not to the run's own (iptables)."""
    nodes.on(node, "iptables -A INPUT -p tcp --dport 61008:65535 --syn -j DROP")


def drop_half_of_the_range(nodes: Nodes, node: int) -> None:
    """A firewall that drops what comes to the upper half of the ephemeral ports (iptables)."""
    nodes.on(node, "iptables -A INPUT -p tcp --dport 47000:60999 --syn -j DROP")


def mtu_too_large(nodes: Nodes, node: int) -> None:
    """Packets of 9,000 bytes, of which the switch passes 1,500."""
    nodes.on(node, "ip link set eth0 mtu 9000")


def lossy(nodes: Nodes, node: int) -> None:
    """20 % of the packets lost (iptables)."""
    nodes.on(node, "iptables -A INPUT -m statistic --mode random --probability 0.2 -j DROP")


def slow_link(nodes: Nodes, node: int) -> None:
    """A link of 20 Mb/s (tc)."""
    nodes.on(node, "tc qdisc add dev eth0 root tbf rate 20mbit burst 64kbit latency 400ms")


def wrong_hosts(nodes: Nodes, node: int) -> None:
    """A wrong `/etc/hosts`: a node's name is 127.0.1.1."""
    hosts = nodes.folder / "hosts"
    hosts.write_text(hosts.read_text().replace(f"{nodes.address(node)} ", "127.0.1.1 "))


WAY_FAULTS = [
    (drop_rendezvous_ports, "rendezvous-port", "broken", "dropped on the way"),
    (drop_half_of_the_range, "ephemeral-port", "broken", "dropped on the way"),
    (mtu_too_large, "mtu", "broken", "above 1500"),
    (lossy, "loss", "broken", "Packets get lost"),
    (slow_link, "bandwidth", "poor", "slow"),
    (wrong_hosts, "name", "poor", "127.0.1.1"),
]
CLOCK, READ_ONLY, OTHER_FOLDER, OTHER_LOCKS = "clock", "run folder", "folder for checkpoints", "file locks"
"Faults of a node by itself."


class Faulty(NamedTuple):
    """Nodes that have been examined. Node 0 is healthy."""

    count: int
    at: Mapping[Any, int]
    "The node of each fault: a function of WAY_FAULTS, or a text above."
    found: Results


FEW = {
    drop_rendezvous_ports: 1, drop_half_of_the_range: 1, wrong_hosts: 1, CLOCK: 1,
    mtu_too_large: 2, READ_ONLY: 2,
    lossy: 3, OTHER_FOLDER: 3, OTHER_LOCKS: 3,
}  # fmt: skip
MANY = {
    fault: node
    for node, fault in enumerate(
        [*(fault for fault, *_ in WAY_FAULTS), CLOCK, READ_ONLY, OTHER_FOLDER, OTHER_LOCKS], 1
    )
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(FEW, id="four nodes"),
        pytest.param(MANY, id="eleven nodes", marks=pytest.mark.slow),
    ],
)
def faulty_nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    """All faults are there at the same time: several on a node, or each on a node of its own."""
    folder, at = tmp_path_factory.mktemp("nodes"), request.param
    (folder / "locks").mkdir()
    with Nodes(folder, max(at.values()) + 1) as nodes:
        for fault, *_ in WAY_FAULTS:
            if fault in at:
                fault(nodes, at[fault])
        locks = {"LD_PRELOAD": str(stub("local_locks_stub", folder)), "LOCKS": str(folder / "locks")}
        found = nodes.doctor(
            "quick",
            env={at[CLOCK]: {"LD_PRELOAD": str(stub("clock_stub", folder))}, at[OTHER_LOCKS]: locks},
            scripts={
                at[READ_ONLY]: f"mount --bind {folder} {folder}; mount -o remount,ro,bind {folder}",
                at[OTHER_FOLDER]: "mkdir $LAUNCHER_RUN_DIR/checkpoints; "
                "mount -t tmpfs tmpfs $LAUNCHER_RUN_DIR/checkpoints",
            },
        )
        return Faulty(nodes.count, at, found)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row[0].__name__, marks=[pytest.mark.slow] if row[0] not in FEW else [])
        for row in WAY_FAULTS
    ],
)
def test_each_of_several_faulty_nodes_is_found_and_named(
    faulty_nodes: Faulty, row: tuple[Callable[[Nodes, int], None], str, str, str]
) -> None:
    fault, check, verdict, words = row
    if fault not in faulty_nodes.at:
        pytest.skip("a slow link is judged by speeds, which a busy machine has as well: with eleven nodes")
    results, node, lossy_node = faulty_nodes.found, faulty_nodes.at[fault], faulty_nodes.at[lossy]
    found = [one for one in results.findings if one.check == check and one.verdict == verdict]
    ways = [subject.split(" to ") for one in found for subject in one.subjects]
    assert len([way for way in ways if str(node) in way]) >= (faulty_nodes.count - 1) * 2 // 3
    assert all({str(node), str(lossy_node)} & {*way} for way in ways), (
        "lost packets may look like other faults"
    )
    assert any(words in one.cause for one in found) and all(one.cure for one in found)
    assert f"node {node}: n{node}" in " ".join(results.page()), "the page tells the host's name"


def test_a_clock_that_is_30_s_ahead(faulty_nodes: Faulty) -> None:
    node, found = faulty_nodes.at[CLOCK], faulty_nodes.found
    [own] = [one for one in found.findings if one.check == "clock" and one.measured.startswith("+30")]
    assert (own.verdict, own.nodes) == ("poor", (node,))
    between = sick(found)["clocks"]
    assert between.verdict == "poor"
    # The node that loses packets may lose the question for the time as well.
    others = set(range(node)) - {faulty_nodes.at[lossy]}
    assert {f"{other} to {node}" for other in others} <= set(between.subjects)
    assert all(str(node) in way.split(" to ") for way in between.subjects)


def test_a_node_that_cannot_write_the_run_folder_answers_over_the_network(faulty_nodes: Faulty) -> None:
    finding = sick(faulty_nodes.found)["run-folder"]
    assert (finding.verdict, finding.nodes) == ("broken", (faulty_nodes.at[READ_ONLY],))
    assert "Read-only" in finding.cause


def test_nodes_with_different_folders_for_checkpoints(faulty_nodes: Faulty) -> None:
    finding, node = sick(faulty_nodes.found)["same-files"], faulty_nodes.at[OTHER_FOLDER]
    assert (finding.verdict, finding.measured) == ("broken", "missing")
    others = set(range(node)) - {faulty_nodes.at[READ_ONLY]}
    assert {f"{other} to {node}, checkpoints" for other in others} <= set(finding.subjects)
    assert not list(faulty_nodes.found.run.path.rglob(".doctor*"))


def test_locks_that_only_one_node_sees(faulty_nodes: Faulty) -> None:
    assert "flock" not in sick(faulty_nodes.found), "on one node they exclude"
    finding, node = sick(faulty_nodes.found)["shared-locks"], faulty_nodes.at[OTHER_LOCKS]
    assert (finding.verdict, finding.measured) == ("poor", "excludes nobody")
    assert all(str(node) in re.findall(r"\d+", way) for way in finding.subjects) and finding.subjects


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
def test_a_network_that_breaks_in_the_middle_is_found(nodes: Nodes) -> None:
    """It is good when it is examined, and an interface goes down before the collectives."""
    found = nodes.doctor(midway=lambda: nodes.on(1, "ip link set eth0 down"))
    late = [one for one in found.findings if one.check == "rendezvous-port" and one.verdict == "broken"]
    assert {way for one in late for way in one.subjects} == {"0 to 1, after a hang", "1 to 0, after a hang"}
    assert any("Network is unreachable" in one.cause and "ip route" in one.cure for one in late)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["its processes are killed", "it loses power"])
def test_a_node_that_dies_in_the_middle_is_named(nodes: Nodes, how: str) -> None:
    def die() -> None:
        if how == "it loses power":  # nobody closes its connections
            nodes.on(1, "ip link set eth0 down")
        nodes.kill(1)

    found = nodes.doctor(midway=die)
    assert nodes.seconds < 60, "the goal"
    finding = sick(found)["alive"]
    assert (finding.verdict, finding.nodes) == ("broken", (1,)) and finding.cure
    assert not [one for one in found.values if one.check == "setting"], "no setting wakes it"


@pytest.mark.slow
def test_seventeen_nodes_try_some_ways_only(tmp_path: Path) -> None:
    with Nodes(tmp_path, 17) as nodes:
        drop_rendezvous_ports(nodes, 9)
        found = nodes.doctor("quick")
    finding = sick(found)["rendezvous-port"]
    assert all(subject.endswith(" to 9") for subject in finding.subjects)
    tried = {one.subject for one in found.values if one.check == "rendezvous-port"}
    assert len(tried) == 17 * 8, "1, 2, 4 and 8 nodes away, in both directions"
    assert "8 ways to node 9" in " ".join(" ".join(found.page()).split())


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
    ("A setting with which a rank stops, and one whose interface leads nowhere", "setting", "poor"),
    ("A rank that adds wrong values", "pairs", "broken"),
    ("A slow node of three (tc)", "pairs", "poor"),
    ("An interface in the profile that leads nowhere", "interfaces", "broken"),
    ("A network that breaks in the middle of the examination", "rendezvous-port", "broken"),
    ("A node that dies in the middle of the examination", "alive", "broken"),
    ("A folder that hangs (fdatasync does not return)", "folder", "broken"),
]
"""The tests above make these; `test_search.py` those of interfaces, `test_endings.py` that of the folder."""
