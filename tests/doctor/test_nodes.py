"""Faults between nodes are made for real in network namespaces, and found and named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.doctor.outcome import BUS
from launcher.doctor.results import Results
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


def drop_rendezvous_port(nodes: Nodes, node: int) -> None:
    """A firewall that drops one way what comes to the rendezvous port (iptables)."""
    nodes.on(node, "iptables -A INPUT -p tcp --dport 61000:65535 --syn -j DROP")


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
    (drop_rendezvous_port, "rendezvous-port", "broken", "dropped on the way"),
    (drop_half_of_the_range, "ephemeral-port", "broken", "dropped on the way"),
    (mtu_too_large, "mtu", "broken", "above 1500"),
    (lossy, "loss", "broken", "Packets get lost"),
    (slow_link, "bandwidth", "poor", "slow"),
    (wrong_hosts, "name", "poor", "127.0.1.1"),
]
LOSSY = 1 + [fault for fault, *_ in WAY_FAULTS].index(lossy)
CLOCK, READ_ONLY, OTHER_FOLDER, OTHER_LOCKS = range(len(WAY_FAULTS) + 1, len(WAY_FAULTS) + 5)
"Nodes with faults of their own: clock, run folder, folder for checkpoints, file locks."


@pytest.fixture(scope="module")
def many_faults(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Eleven nodes: node 0 is healthy, each other one has one fault. All are examined at the same time."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "locks").mkdir()
    with Nodes(folder, OTHER_LOCKS + 1) as nodes:
        for node, (fault, *_) in enumerate(WAY_FAULTS, 1):
            fault(nodes, node)
        locks = {"LD_PRELOAD": str(stub("local_locks_stub", folder)), "LOCKS": str(folder / "locks")}
        return nodes.doctor(
            "quick",
            env={CLOCK: {"LD_PRELOAD": str(stub("clock_stub", folder))}, OTHER_LOCKS: locks},
            scripts={
                READ_ONLY: f"mount --bind {folder} {folder}; mount -o remount,ro,bind {folder}",
                OTHER_FOLDER: "mkdir $LAUNCHER_RUN_DIR/checkpoints; "
                "mount -t tmpfs tmpfs $LAUNCHER_RUN_DIR/checkpoints",
            },
        )


@pytest.mark.parametrize(
    ("node", "row"),
    [
        # A busy machine may make other ways slow, too.
        pytest.param(node, row, id=row[0].__name__, marks=[pytest.mark.slow] if row[0] is slow_link else [])
        for node, row in enumerate(WAY_FAULTS, 1)
    ],
)
def test_each_of_several_faulty_nodes_is_found_and_named(
    many_faults: Results, node: int, row: tuple[Callable[[Nodes, int], None], str, str, str]
) -> None:
    _, check, verdict, words = row
    found = [one for one in many_faults.findings if one.check == check and one.verdict == verdict]
    ways = [subject.split(" to ") for one in found for subject in one.subjects]
    assert len([way for way in ways if str(node) in way]) >= CLOCK
    assert all({str(node), str(LOSSY)} & {*way} for way in ways), "lost packets may look like other faults"
    assert any(words in one.cause for one in found) and all(one.cure for one in found)
    assert f"node {node}: n{node}" in " ".join(many_faults.page()), "the page tells the host's name"


def test_a_clock_that_is_30_s_ahead(many_faults: Results) -> None:
    found = sick(many_faults)
    [own] = [one for one in many_faults.findings if one.check == "clock" and one.measured.startswith("+30")]
    assert (own.verdict, own.nodes) == ("poor", (CLOCK,))
    assert found["clocks"].verdict == "poor"
    # The node that loses packets may lose the question for the time as well.
    others = set(range(CLOCK)) - {LOSSY}
    assert {f"{other} to {CLOCK}" for other in others} <= set(found["clocks"].subjects)
    assert all(str(CLOCK) in way.split(" to ") for way in found["clocks"].subjects)


def test_a_node_that_cannot_write_the_run_folder_answers_over_the_network(many_faults: Results) -> None:
    finding = sick(many_faults)["run-folder"]
    assert (finding.verdict, finding.nodes) == ("broken", (READ_ONLY,)) and "Read-only" in finding.cause


def test_nodes_with_different_folders_for_checkpoints(many_faults: Results) -> None:
    finding = sick(many_faults)["same-files"]
    assert (finding.verdict, finding.measured) == ("broken", "missing")
    ways = {f"{other} to {OTHER_FOLDER}, checkpoints" for other in range(OTHER_FOLDER) if other != READ_ONLY}
    assert ways <= set(finding.subjects)
    assert not list(many_faults.run.path.rglob(".doctor*"))


def test_locks_that_only_one_node_sees(many_faults: Results) -> None:
    assert "flock" not in sick(many_faults), "on one node they exclude"
    finding = sick(many_faults)["shared-locks"]
    assert (finding.verdict, finding.measured) == ("poor", "excludes nobody")
    assert all(str(OTHER_LOCKS) in re.findall(r"\d+", way) for way in finding.subjects) and finding.subjects


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
        drop_rendezvous_port(nodes, 9)
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
    ("A rank that adds wrong values", "pairs", "broken"),
    ("A slow node of three (tc)", "pairs", "poor"),
    ("An interface in the profile that leads nowhere", "interfaces", "broken"),
    ("A network that breaks in the middle of the examination", "rendezvous-port", "broken"),
    ("A node that dies in the middle of the examination", "alive", "broken"),
    ("A folder that hangs (fdatasync does not return)", "folder", "broken"),
]
"""The tests above make these; `test_search.py` that of the interface, `test_endings.py` the folder."""
