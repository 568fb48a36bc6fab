"""Node 0 of a doctor's run: it gives orders one after the other, depending on the answers so far."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from launcher.doctor.checks.collectives import LARGE, WORDS, least_bandwidth, rate
from launcher.doctor.examine import examine, worst
from launcher.doctor.interpret import PAIRS, Answers, outcomes, values_of
from launcher.doctor.measure.group import IMPORT_SECONDS
from launcher.doctor.measure.network import common_adapters, common_interfaces, partners
from launcher.doctor.measure.shared_files import SEEN_SECONDS
from launcher.doctor.on_node import OnNode
from launcher.doctor.order_files import END, LOOK, MARK, NOTE, REACH, TESTS, TRAIN, Orders
from launcher.doctor.outcome import BUS, STOPPED, Outcome, pair_rounds
from launcher.doctor.rank_test import RankTest
from launcher.doctor.settings import NO_SETTING, Setting, Where, candidates, fastest, gain
from launcher.doctor.values import Measured
from launcher.supervise.ports import RENDEZVOUS_PORTS

SIZES = {
    "gloo": (8, 2**16, 2**20, 2**24),
    "nccl": (8, 2**16, 2**20, 2**24, 2**28),
}
"Message sizes of the collectives in bytes, by backend."
THOROUGH_SIZES = tuple(2**power for power in range(3, 31, 3))
"8 bytes to 1 GiB."
CONNECT_SECONDS, COLLECTIVE_SECONDS, THOROUGH_SECONDS = 10.0, 12.0, 40.0
"Time limits of one test. A rank that hangs uses all of it."
TRY_SECONDS = 8.0
"Time limit of a test that tries a setting."
PARALLEL_SETTINGS = 4
"Number of settings tried at the same time. A hang costs TRY_SECONDS, and each setting takes GPU memory."
CONNECT_SECONDS_PER_RANK = 0.05
PAIR_SECONDS, PAIR_BYTES = 10.0, 2**20
TRAIN_SECONDS = 120.0
"Time limit for training the tiny model. It takes seconds, or a minute on a very busy machine."
SLOW_SIZES = (8, 2**20)
"Message sizes in bytes after a slow collective."
BROKEN_SECONDS, BROKEN_SIZES = 8.0, (8, 2**16)
"Time limit and message sizes of the collectives if the network is broken or a collective has hung."
REACH_SECONDS, REACH_SECONDS_EACH = 30.0, 10.0
"""How much later than node 0 another node may finish examining its connections: a constant, and an allowance
for each connection, because data that does not get through takes that long."""
TURNS = 2
"How often the fastest setting is compared with the default."
LATE_SECONDS = 15.0
"How long after its ranks' time limit a node's answer may arrive."
FREE_PART = 0.1
"Maximum fraction of a node's free memory used for the buffers of a thorough test."


class NodeGoneError(Exception):
    """A node no longer answers."""


class Coordinator:
    """Node 0 of a doctor's run."""

    def __init__(self, on_node: OnNode, orders: Orders) -> None:
        self.on_node, self.orders = on_node, orders
        self.place, self.expected = on_node.place, on_node.place.expected
        assert on_node.place.options is not None
        self.options = on_node.place.options
        self._grace_seconds = IMPORT_SECONDS
        self.env: dict[str, str] = {}
        "Settings that the collectives need to work."
        self._network_is_broken = False
        self._number = 0
        self._gone: dict[int, str] = {}
        "Nodes that no longer answer, and what they were asked for."
        self._all_ranks = tuple(range(self.expected.ranks))
        self._identities: dict[int, Mapping[str, Any]] = {}

    def examine(self, first: Answers) -> None:
        """Give all orders. `first` holds what each node measured by itself."""
        self._identities = {
            node: answer["identity"] for node, answer in first.items() if answer.get("identity")
        }
        silent = set(range(self.expected.nodes)) - first.keys()
        self._gone = dict.fromkeys(silent, "its own values")
        if self.expected.nodes > 1:
            self._reach()
            if self.expected.shared:
                self._files()
        with suppress(NodeGoneError):
            if self.options.level != "quick" and not self._gone:
                self._tests(first)
        if died := sorted(self._gone.keys() - (silent - set(self.on_node.lost()))):
            errors = {node: f"It was asked for {self._gone[node]} and did not answer." for node in died}
            self._note(*(Measured("alive", node, None, error=text) for node, text in errors.items()))
        self.orders.give(self._number + 1, {"do": END})

    def _reach(self, suffix: str = "") -> None:
        """Let every node measure its connections to the others. Append `suffix` to each value's subject."""
        order = {"do": REACH, "peers": self._identities, "words": suffix}
        partners_each = len(partners(0, self.expected.nodes))
        answers = self.give(
            order, REACH_SECONDS + REACH_SECONDS_EACH * partners_each, "the ways to other nodes"
        )
        values = values_of([(order, answers)])
        self._network_is_broken = worst(examine(values, self.expected)) == "broken"

    def _tests(self, first: Answers) -> None:
        """Run the tests of ranks. Raises NodeGoneError."""
        self.test("compute", [self.new_test("compute", self._all_ranks, COLLECTIVE_SECONDS)])
        # If the collectives fail, training is known to fail.
        if self.expected.ranks == 1 or self._collectives(self._sizes(first)):
            self._tiny_model()

    def _files(self) -> None:
        """Let every node create a file and look for the other nodes' files."""
        answers = self.give({"do": MARK}, LATE_SECONDS, "its files")
        marks = {node: answer.get("marks", {}) for node, answer in answers.items()}
        self.give({"do": LOOK, "marks": marks}, SEEN_SECONDS + LATE_SECONDS, "the files of other nodes")

    def give(self, order: Mapping[str, Any], seconds: float, what: str) -> Answers:
        """Give an order, carry it out on this node, too, and return the answers of all nodes that answer.

        `seconds` is how much later than this node another one may answer. `what` describes the order.
        """
        self._number += 1
        self.orders.give(self._number, order)
        self.orders.answer(self._number, self.on_node.carry_out(order))
        answers = self.orders.wait_for_answers(self._number, seconds, self._lost)
        for node in set(range(self.expected.nodes)) - answers.keys():
            self._gone.setdefault(node, what)
        return answers

    def _lost(self) -> set[int]:
        return {*self._gone, *self.on_node.lost()}

    def test(self, check: str | Sequence[str], tests: Sequence[RankTest], **extra: Any) -> list[Outcome]:
        """Run tests at the same time and return their outcomes. `check` names the check of all or of each."""
        order = {"do": TESTS, "check": check, "tests": [asdict(test) for test in tests], **extra}
        return outcomes(order, self._give_all(order, check if isinstance(check, str) else check[0]))

    def _give_all(self, order: Mapping[str, Any], name: str) -> Answers:
        """Give an order that all nodes must carry out. Raises NodeGoneError."""
        answers = self.give(order, self._grace_seconds, name)
        self._grace_seconds = LATE_SECONDS
        if self._gone:
            raise NodeGoneError
        return answers

    def new_test(
        self,
        what: str,
        ranks: Sequence[int],
        seconds: float,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> RankTest:
        """Return a test whose first rank serves the store on a port that is probably free."""
        all_options = {"gpus": self.expected.gpus_per_node > 0, **options}
        identity = self._identities.get(ranks[0] // self.expected.ranks_per_node, {})
        known_ports = identity.get("ports", {}).get("rendezvous", ())
        port = random.choice([port for port in RENDEZVOUS_PORTS if port not in known_ports])
        host = identity.get("address") or self.place.host
        return RankTest(what, all_options, tuple(ranks), host, port, seconds, env or {})

    def _collectives(self, sizes: Sequence[int]) -> bool:
        """Test the collectives, and search for settings if they fail. Return whether they work in the end."""
        seconds = CONNECT_SECONDS + CONNECT_SECONDS_PER_RANK * self.expected.ranks
        [joined] = self.test("joined", [self.new_test("connect", self._all_ranks, seconds)])
        outcomes_by_name: dict[str, Outcome] = {}
        broken, slow = self._network_is_broken, False
        seconds = THOROUGH_SECONDS if self.options.thorough else COLLECTIVE_SECONDS
        remaining = [*BUS] if joined.ok else []
        while remaining and not broken:
            name = remaining.pop(0)
            [result] = self.test(name, [self._collective(name, seconds, SLOW_SIZES if slow else sizes)])
            outcomes_by_name[name] = result
            broken, slow = result.kind == "hang", slow or self._slow(result)
        if remaining:  # run the rest at the same time, because only whether they work matters now
            tests = [self._collective(name, BROKEN_SECONDS, BROKEN_SIZES) for name in remaining]
            outcomes_by_name |= zip(remaining, self.test(remaining, tests), strict=True)
        failed = [name for name, result in outcomes_by_name.items() if not result.ok] if joined.ok else [*BUS]
        if failed:
            ended = [*outcomes_by_name.values(), joined]
            hangs = any(result.kind == "hang" for result in ended)
            if hangs and self.expected.nodes > 1 and not self._network_is_broken:
                self._reach(", after a hang")
            pairs = self._pairs(slow=False)
            if any(result.state in STOPPED for result in ended):
                return False  # no setting resumes a stopped process
            what, before = (failed[0], outcomes_by_name[failed[0]]) if joined.ok else ("connecting", joined)
            most = SIZES[self.expected.backend][-1]
            small = [size for size in sizes if size <= most]
            self._search(failed, f"{what} {WORDS[before.kind]}", small, self._where(pairs))
        elif any(map(self._slow, outcomes_by_name.values())):
            self._pairs(slow=True)
        if self.options.tune and joined.ok and not failed:
            self._tune(sizes)
        return bool(self.env) or (joined.ok and not failed)

    def _collective(
        self, name: str, seconds: float, sizes: Sequence[int], env: Mapping[str, str] | None = None
    ) -> RankTest:
        return self.new_test("collective", self._all_ranks, seconds, env, name=name, sizes=sizes)

    def _search(self, failed: Sequence[str], before: str, sizes: Sequence[int], where: Where) -> None:
        """Try settings until one fixes all `failed` collectives. `before` describes the failure."""
        settings, at_once = self._candidates(where), 1
        while settings:
            # Try the first one alone, because it often helps and is then quick.
            batch, settings = settings[:at_once], settings[at_once:]
            at_once = PARALLEL_SETTINGS
            # Run the cheapest test first, because most settings do not help.
            connects = self.test(
                "setting",
                [self.new_test("connect", self._all_ranks, TRY_SECONDS, setting.env) for setting in batch],
                subject=[setting.text for setting in batch],
            )
            for setting in [setting for setting, result in zip(batch, connects, strict=True) if result.ok]:
                if self._works_with(setting, failed, sizes):
                    self._choose(setting, before, "works")
                    return
        self._note(Measured("chosen", 0, {"env": None}))

    def _works_with(self, setting: Setting, names: Sequence[str], sizes: Sequence[int]) -> bool:
        tests = [self._collective(name, TRY_SECONDS, sizes, setting.env) for name in names]
        results = self.test("setting", tests, subject=[f"{setting.text}, {name}" for name in names])
        return all(result.ok for result in results)

    def _tune(self, sizes: Sequence[int]) -> None:
        """Measure all settings, and choose the fastest if it is faster than none each time."""

        def measure(setting: Setting) -> Outcome:
            test = self._collective("all-reduce", TRY_SECONDS, sizes, setting.env)
            return self.test("setting", [test], subject=setting.text or "none")[0]

        tried = [(setting, measure(setting)) for setting in self._candidates(self._where())]
        if (best := fastest(tried)) is not None:
            # A busy machine may slow down a single test, so the best setting must win repeatedly.
            turns = [(measure(NO_SETTING), measure(best)) for _ in range(TURNS)]
            if (speeds := gain(turns)) is not None:
                self._choose(best, *(f"all-reduce {rate(speed)}" for speed in speeds))
                return
        self._note(Measured("chosen", 0, {"env": {}}))

    def _candidates(self, where: Where) -> list[Setting]:
        identities = list(self._identities.values())
        settings = candidates(
            self.expected.backend, where, common_interfaces(identities), common_adapters(identities),
            several=self.expected.nodes > 1, tune=self.options.tune,
        )  # fmt: skip
        # Those that are set already have been tested.
        return [setting for setting in settings if not setting.env.items() <= os.environ.items()]

    def _choose(self, setting: Setting, before: str, after: str) -> None:
        """Record the setting and use it for the tests that follow."""
        self.env = dict(setting.env)
        explains = setting.explains if after == "works" or setting.purpose == "faster" else "It is faster."
        value = {"env": self.env, "explains": explains, "before": before, "after": after}
        self._note(Measured("chosen", 0, value))

    def _note(self, *values: Measured) -> None:
        """Add conclusions to the measured values. Other nodes have nothing to do, so none is awaited."""
        self._number += 1
        self.orders.give(self._number, {"do": NOTE, "values": [asdict(value) for value in values]})
        self.orders.answer(self._number, {})

    def _tiny_model(self) -> None:
        """Train the tiny model in all ways of TRAININGS at the same time, with the chosen setting."""
        options = {"run_dir": "", "per_node": self.expected.ranks_per_node}
        tests = [
            self.new_test("train", members, TRAIN_SECONDS, self.env, **options)
            for members in ((0,), self._all_ranks, self._all_ranks)
        ]
        self._give_all({"do": TRAIN, "tests": [asdict(one) for one in tests]}, "the tiny model")

    def _slow(self, outcome: Outcome) -> bool:
        least = least_bandwidth(self.expected)
        return (
            least is not None
            and bool(outcome.sizes)
            and outcome.sizes[-1]["bytes"] >= LARGE
            and outcome.sizes[-1]["bus"] < least
        )

    def _pairs(self, *, slow: bool) -> dict[tuple[int, ...], Outcome]:
        """Test pairs of ranks, many at a time."""
        outcomes_by_pair: dict[tuple[int, ...], Outcome] = {}
        nodes, per_node = self.expected.nodes, self.expected.ranks_per_node
        for pairs in pair_rounds(nodes, per_node) if self.expected.ranks > 2 else ():
            tests = [
                self.new_test("collective", pair, PAIR_SECONDS, name="all-reduce", sizes=[8, PAIR_BYTES])
                for pair in pairs
            ]
            ended = self.test(PAIRS, tests, slow=slow, per_node=per_node)
            outcomes_by_pair |= zip(pairs, ended, strict=True)
        return outcomes_by_pair

    def _where(self, pairs: Mapping[tuple[int, ...], Outcome] | None = None) -> Where:
        """Return where collectives fail: between nodes, inside nodes, or anywhere."""
        ranks_per_node = self.expected.ranks_per_node
        if self.expected.nodes == 1:
            return "inside"
        if ranks_per_node == 1:
            return "between"
        bad = {
            pair[0] // ranks_per_node != pair[1] // ranks_per_node
            for pair, outcome in (pairs or {}).items()
            if not outcome.ok
        }
        return "anywhere" if len(bad) != 1 else "between" if bad.pop() else "inside"

    def _sizes(self, first: Answers) -> list[int]:
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
