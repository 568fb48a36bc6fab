"""What node 0 orders, one after the other, and what it makes depend on the answers so far."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from launcher.doctor.board import Board
from launcher.doctor.checks.collectives import LARGE, least_bandwidth
from launcher.doctor.interpret import PAIRS, TESTS, Answers, outcomes
from launcher.doctor.on_node import END, REACH, OnNode
from launcher.doctor.outcome import BUS, Outcome, rounds
from launcher.doctor.rank_test import RankTest
from launcher.supervise.ports import RENDEZVOUS_PORTS

SIZES = {
    "gloo": (8, 2**16, 2**20, 2**24),
    "nccl": (8, 2**16, 2**20, 2**24, 2**28),
}
"Bytes of the collectives, by backend."
THOROUGH_SIZES = tuple(2**power for power in range(3, 31, 3))
"8 bytes to 1 GiB."
CONNECT_SECONDS, COLLECTIVE_SECONDS, THOROUGH_SECONDS = 15.0, 12.0, 60.0
"Time limits of one test. A rank that hangs costs that much."
PAIR_SECONDS, PAIR_BYTES = 10.0, 2**20
HURRIED_SECONDS = 6.0
"Time limit of a collective after another one has hung."
REACH_SECONDS = 60.0
"How much later than node 0 another node may have examined its ways to the others."
LATE_SECONDS = 15.0
"How much later than its ranks' time limit the answer of a node may come."
FREE_PART = 0.1
"A thorough test uses buffers of at most this part of a node's free host memory, or GPU memory, per rank."


class Lead:
    """Node 0 of a doctor's run."""

    def __init__(self, on_node: OnNode, board: Board) -> None:
        self.on_node, self.board = on_node, board
        self.place, self.expected = on_node.place, on_node.place.expected
        self.options = on_node.place.options
        assert self.options is not None
        self._number = 0
        self._hosts: dict[int, str] = {}

    def examine(self, first: Answers) -> None:
        """Give all orders. `first` has what each node measured by itself."""
        peers = {node: answer["identity"] for node, answer in first.items() if answer.get("identity")}
        self._hosts = {node: peer["address"] for node, peer in peers.items()}
        assert self.options is not None
        if self.expected.nodes > 1:
            self.give({"do": REACH, "peers": peers}, REACH_SECONDS)
        if self.options.level != "quick" and self.expected.ranks > 1:
            self._collectives(first)
        self.board.order(self._number + 1, {"do": END})

    def give(self, order: Mapping[str, Any], seconds: float) -> Answers:
        """Give an order, carry it out here as well, and return the answers of all nodes that answer."""
        self._number += 1
        self.board.order(self._number, order)
        self.board.answer(self._number, self.on_node.carry_out(order))
        return self.board.wait_for_answers(self._number, seconds)

    def test(self, check: str, tests: Sequence[RankTest], **more: Any) -> list[Outcome]:
        """Run tests at the same time, and return how each ended."""
        order = {"do": TESTS, "check": check, "tests": [asdict(one) for one in tests], **more}
        return outcomes(order, self.give(order, LATE_SECONDS))

    def new_test(
        self,
        what: str,
        ranks: Sequence[int],
        seconds: float,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> RankTest:
        """A test whose first rank serves the store at a port that is probably free."""
        given = {"gpus": self.expected.gpus_per_node > 0, **options}
        node = ranks[0] // self.expected.ranks_per_node
        host = self._hosts.get(node) or self.place.host
        return RankTest(what, given, tuple(ranks), host, random.choice(RENDEZVOUS_PORTS), seconds, env or {})

    def _collectives(self, first: Answers) -> None:
        everyone = tuple(range(self.expected.ranks))
        [joined] = self.test("joined", [self.new_test("connect", everyone, CONNECT_SECONDS)])
        if not joined.ok:
            self._pairs(slow=False)
            return
        found: list[Outcome] = []
        sizes = self._sizes(first)
        seconds = THOROUGH_SECONDS if self.options and self.options.thorough else COLLECTIVE_SECONDS
        for name in BUS:
            hurried = any(one.kind == "hang" for one in found)
            limit = HURRIED_SECONDS if hurried else seconds
            test = self.new_test("collective", everyone, limit, name=name, sizes=sizes)
            found += self.test(name, [test])
        if any(not one.ok for one in found):
            self._pairs(slow=False)
        elif any(map(self._slow, found)):
            self._pairs(slow=True)

    def _slow(self, one: Outcome) -> bool:
        least = least_bandwidth(self.expected)
        return least is not None and one.sizes[-1]["bytes"] >= LARGE and one.sizes[-1]["bus"] < least

    def _pairs(self, *, slow: bool) -> None:
        """Test pairs of ranks, many at a time: all in one node, and one rank of each of two nodes."""
        if self.expected.ranks <= 2:
            return
        per, nodes = self.expected.ranks_per_node, self.expected.nodes
        many = self.expected.ranks > 16
        groups = [range(0, nodes * per, per)] if many else [range(nodes * per)]
        if many:
            groups += [range(node * per, (node + 1) * per) for node in range(nodes)]
        for members in groups:
            for pairs in rounds(list(members)):
                tests = [
                    self.new_test("collective", pair, PAIR_SECONDS, name="all-reduce", sizes=[8, PAIR_BYTES])
                    for pair in pairs
                ]
                self.test(PAIRS, tests, slow=slow, per_node=per)

    def _sizes(self, first: Answers) -> list[int]:
        assert self.options is not None
        if not self.options.thorough:
            return list(SIZES[self.expected.backend])
        if self.expected.gpus_per_node:
            return list(THOROUGH_SIZES)
        free = [
            value["value"]["free"]
            for answer in first.values()
            for value in answer["values"]
            if value["check"] == "free-memory" and value["value"]
        ]
        most = FREE_PART * min(free, default=0) / self.expected.ranks_per_node
        return [size for size in THOROUGH_SIZES if size <= max(most, LARGE)]
