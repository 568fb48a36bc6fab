"""What node 0 orders, one after the other, and what it makes depend on the answers so far."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from launcher.doctor.board import Board
from launcher.doctor.checks.collectives import LARGE, least_bandwidth, rate
from launcher.doctor.checks.search import WORDS
from launcher.doctor.examine import examine, worst
from launcher.doctor.interpret import NOTE, PAIRS, TESTS, TRAIN, Answers, outcomes
from launcher.doctor.measure.network import common_adapters, common_interfaces
from launcher.doctor.on_node import END, LOOK, MARK, REACH, OnNode
from launcher.doctor.outcome import BUS, STOPPED, Outcome, rounds
from launcher.doctor.rank_test import RankTest
from launcher.doctor.settings import Setting, candidates, fastest
from launcher.doctor.values import Measured
from launcher.supervise.ports import RENDEZVOUS_PORTS

SIZES = {
    "gloo": (8, 2**16, 2**20, 2**24),
    "nccl": (8, 2**16, 2**20, 2**24, 2**28),
}
"Bytes of the collectives, by backend."
THOROUGH_SIZES = tuple(2**power for power in range(3, 31, 3))
"8 bytes to 1 GiB."
CONNECT_SECONDS, COLLECTIVE_SECONDS, THOROUGH_SECONDS = 10.0, 12.0, 60.0
"Time limits of one test. A rank that hangs costs that much."
TRY_SECONDS = 8.0
"Time limit of a test with a setting that is tried."
AT_ONCE = 4
"Settings with which the ranks connect at the same time. A hang costs TRY_SECONDS, and each takes GPU memory."
CONNECT_SECONDS_PER_RANK = 0.05
PAIR_SECONDS, PAIR_BYTES = 10.0, 2**20
TRAIN_SECONDS = 40.0
"Time limit of a training of the tiny model."
SLOW_SIZES = (8, 2**20)
"Bytes of the collectives after a slow one."
BROKEN_SECONDS, BROKEN_SIZES = 8.0, (8, 2**16)
"Time limit and bytes of the collectives if the network is broken, or after one has hung."
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
        self.env: dict[str, str] = {}
        "Settings without which the collectives fail."
        self._network_is_broken = False
        self._number = 0
        self._everyone = tuple(range(self.expected.ranks))
        self._identities: dict[int, Mapping[str, Any]] = {}

    def examine(self, first: Answers) -> None:
        """Give all orders. `first` has what each node measured by itself."""
        peers = {node: answer["identity"] for node, answer in first.items() if answer.get("identity")}
        self._identities = peers
        assert self.options is not None
        if self.expected.nodes > 1:
            ways = self.give({"do": REACH, "peers": peers}, REACH_SECONDS)
            values = [Measured(**value) for answer in ways.values() for value in answer.get("values", ())]
            if self.expected.shared:
                self._files()
            self._network_is_broken = worst(examine(values, self.expected)) == "broken"
        several = self.options.level != "quick" and self.expected.ranks > 1
        if several and self._collectives(first):  # otherwise training is known to fail
            self._tiny_model()
        self.board.order(self._number + 1, {"do": END})

    def _files(self) -> None:
        """Have every node make a file, and look for those of the others."""
        answers = self.give({"do": MARK}, LATE_SECONDS)
        self.give(
            {"do": LOOK, "marks": {node: one.get("marks", {}) for node, one in answers.items()}}, LATE_SECONDS
        )

    def give(self, order: Mapping[str, Any], seconds: float) -> Answers:
        """Give an order, carry it out here as well, and return the answers of all nodes that answer."""
        self._number += 1
        self.board.order(self._number, order)
        self.board.answer(self._number, self.on_node.carry_out(order))
        return self.board.wait_for_answers(self._number, seconds)

    def test(self, check: str | Sequence[str], tests: Sequence[RankTest], **more: Any) -> list[Outcome]:
        """Run tests at the same time, and return how each ended. `check`: of all, or of each of them."""
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
        host = self._identities.get(node, {}).get("address") or self.place.host
        return RankTest(what, given, tuple(ranks), host, random.choice(RENDEZVOUS_PORTS), seconds, env or {})

    def _collectives(self, first: Answers) -> bool:
        """Test the collectives, and look for settings if they fail. Return whether they work in the end."""
        sizes = self._sizes(first)
        self.test("compute", [self.new_test("compute", self._everyone, COLLECTIVE_SECONDS)])
        [joined] = self.test("joined", [self.new_test("connect", self._everyone, self._connect_seconds)])
        found: dict[str, Outcome] = {}
        assert self.options is not None
        broken, slow = self._network_is_broken, False
        seconds = THOROUGH_SECONDS if self.options.thorough else COLLECTIVE_SECONDS
        left = [*BUS] if joined.ok else []
        while left and not broken:
            name = left.pop(0)
            [end] = self.test(name, [self._collective(name, seconds, SLOW_SIZES if slow else sizes)])
            found[name] = end
            broken, slow = end.kind == "hang", slow or self._slow(end)
        if left:  # all at the same time: only whether they work is of interest now
            tests = [self._collective(name, BROKEN_SECONDS, BROKEN_SIZES) for name in left]
            found |= zip(left, self.test(left, tests), strict=True)
        failed = [name for name, one in found.items() if not one.ok]
        if not joined.ok or failed:
            self._pairs(slow=False)
            if any(one.state in STOPPED for one in found.values()):
                return False  # no setting wakes a stopped process
            self._search(failed or ["all-reduce"], found.get((failed or [""])[0], joined), sizes)
        elif any(map(self._slow, found.values())):
            self._pairs(slow=True)
        if self.options.tune and joined.ok and not failed:
            self._tune(found["all-reduce"], sizes)
        return bool(self.env) or (joined.ok and not failed)

    @property
    def _connect_seconds(self) -> float:
        return CONNECT_SECONDS + CONNECT_SECONDS_PER_RANK * self.expected.ranks

    def _collective(
        self, name: str, seconds: float, sizes: Sequence[int], env: Mapping[str, str] | None = None
    ) -> RankTest:
        return self.new_test("collective", self._everyone, seconds, env, name=name, sizes=list(sizes))

    def _search(self, failed: Sequence[str], before: Outcome, sizes: Sequence[int]) -> None:
        """Try settings until one makes everything work that failed."""
        settings, at_once = self._candidates(), 1
        while settings:
            # The first one alone: it often helps, and takes no time then.
            some, settings = settings[:at_once], settings[at_once:]
            at_once = AT_ONCE
            # What takes least comes first: most settings do not help.
            connects = self.test(
                "setting", [self._try("connect", one) for one in some], subject=[one.text for one in some]
            )
            for setting in [one for one, end in zip(some, connects, strict=True) if end.ok]:
                if all(self._works_with(setting, name, sizes) for name in failed):
                    self._choose(setting, f"{failed[0]} {WORDS[before.kind]}", "works")
                    return
        self._note("chosen", {"env": None})

    def _works_with(self, setting: Setting, name: str, sizes: Sequence[int]) -> bool:
        test = self._try("collective", setting, name=name, sizes=list(sizes))
        [end] = self.test("setting", [test], subject=f"{setting.text}, {name}")
        return end.ok

    def _tune(self, base: Outcome, sizes: Sequence[int]) -> None:
        """Measure all settings, and choose the fastest if it is faster than none."""
        tried = []
        for setting in self._candidates():
            test = self._try("collective", setting, name="all-reduce", sizes=list(sizes))
            [end] = self.test("setting", [test], subject=setting.text)
            tried.append((setting, end))
        best = fastest(base, tried)
        if best is None:
            self._note("chosen", {"env": {}})
            return
        speeds = [f"all-reduce {rate(one.sizes[-1]['bus'])}" for one in (base, best[1])]
        self._choose(best[0], *speeds)

    def _candidates(self) -> list[Setting]:
        assert self.options is not None
        identities = list(self._identities.values())
        return candidates(
            self.expected.backend, self.expected.nodes, common_interfaces(identities),
            common_adapters(identities), tune=self.options.tune,
        )  # fmt: skip

    def _try(self, what: str, setting: Setting, **options: Any) -> RankTest:
        return self.new_test(what, self._everyone, TRY_SECONDS, setting.env, **options)

    def _choose(self, setting: Setting, before: str, after: str) -> None:
        """Note the setting, and use it for the tests that follow."""
        self.env = dict(setting.env)
        value = {"env": self.env, "explains": setting.explains, "before": before, "after": after}
        self._note("chosen", value)

    def _note(self, check: str, value: Mapping[str, Any]) -> None:
        """Add a conclusion to the measured values."""
        self.give({"do": NOTE, "values": [Measured(check, 0, value).as_json()]}, LATE_SECONDS)

    def _tiny_model(self) -> None:
        """Train a tiny model as TRAININGS says, all at the same time, with the setting that was chosen."""
        options = {"run_dir": "", "per_node": self.expected.ranks_per_node}
        tests = [
            self.new_test("train", members, TRAIN_SECONDS, self.env, **options)
            for members in ((0,), self._everyone, self._everyone)
        ]
        self.give({"do": TRAIN, "tests": [asdict(one) for one in tests]}, LATE_SECONDS)

    def _slow(self, one: Outcome) -> bool:
        least = least_bandwidth(self.expected)
        return (
            least is not None
            and bool(one.sizes)
            and one.sizes[-1]["bytes"] >= LARGE
            and one.sizes[-1]["bus"] < least
        )

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
