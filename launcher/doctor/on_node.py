"""Carry out the orders of node 0 on one node."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launcher.doctor.interpret import TRAININGS, tests_of
from launcher.doctor.leftovers import Leftovers
from launcher.doctor.measure.adapters import measure_adapters
from launcher.doctor.measure.folders import (
    LEAST_BYTES,
    QUICK_BYTES,
    THOROUGH_BYTES,
    folders_of_run,
    measure_folders,
)
from launcher.doctor.measure.gdr import measure_gdr
from launcher.doctor.measure.gpus import measure_gpus
from launcher.doctor.measure.group import Group
from launcher.doctor.measure.guarded import guarded, reason_of
from launcher.doctor.measure.host import measure_host
from launcher.doctor.measure.in_child import in_child
from launcher.doctor.measure.network import measure_ways, partners, send_answer
from launcher.doctor.measure.shared_files import SEEN_SECONDS, Mark, code_files, look
from launcher.doctor.measure.tiny_model import error_of, steps_of, tiny_run
from launcher.doctor.node_rank import Place
from launcher.doctor.order_files import END, LOOK, MARK, NOTE, REACH, TESTS, TRAIN, Orders
from launcher.doctor.rank_test import RankTest
from launcher.doctor.values import Measured

ORDER_SECONDS = 300.0
"How long a node waits for the next order. It is longer than any order takes on another node."
DRIVER_SECONDS = 20.0
"How long NVML may take for one answer. Without persistence mode, it starts the driver first."

Answer = dict[str, Any]


def measure_node(place: Place, leftovers: Leftovers) -> list[Measured]:
    """Measure this node by itself."""
    values = list(measure_host(place.node, place.run.path))
    if place.expected.gpus_per_node:
        result = in_child(lambda: measure_gpus(place.node), DRIVER_SECONDS)
        values += result.values
        values += [Measured("gpus", place.node, None, error=result.error)] if result.error else []
        values += measure_gdr(place.node)
    values += measure_adapters(place.node)
    size = QUICK_BYTES
    if place.between_attempts:
        size = LEAST_BYTES
    elif place.options is not None and place.options.thorough:
        size = THOROUGH_BYTES
    folders = folders_of_run(place.run.path, place.expected.nvme_dir)
    values += measure_folders(place.node, folders, size, leftovers.add)
    if place.options is not None and place.expected.nodes > 1:
        values.append(guarded("workdir", place.node, lambda: code_files(Path.cwd())))
    if place.options is not None and place.options.job is not None:
        from launcher.doctor.measure.job import measure_job  # its imports take a while, and few runs need it

        values += measure_job(place.node, place.options.job, place.run.path)
    return values


class OnNode:
    """Carries out orders on one node."""

    def __init__(self, place: Place, group: Group, leftovers: Leftovers) -> None:
        self.place, self.group, self.leftovers = place, group, leftovers
        self.lost: Callable[[], Collection[int]] = lambda: ()
        "Returns the nodes that no longer show a sign of life, as far as this node watches them."
        self._mark: Mark | None = None
        self._actions: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
            TESTS: lambda order: self._run(tests_of(order)),
            TRAIN: self._train,
            REACH: self._reach,
            MARK: self._mark_files,
            LOOK: self._look,
            NOTE: lambda _: {},
        }

    def carry_out(self, order: Mapping[str, Any]) -> Answer:
        """Carry out an order and return the answer. A failure becomes the answer's `error`."""
        try:
            return self._actions[order["do"]](order)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {reason_of(error)}"}

    def follow(self, orders: Orders) -> None:
        """Carry out orders until node 0 gives the last one, or gives none for ORDER_SECONDS."""
        number = 1
        while (order := orders.wait_for_order(number, ORDER_SECONDS)) is not None and order["do"] != END:
            self.answer(orders, number, self.carry_out(order))
            number += 1

    def answer(self, orders: Orders, number: int, answer: Mapping[str, Any]) -> None:
        """Write an answer, or send it to node 0 if it cannot be written. Raises OSError."""
        try:
            orders.answer(number, answer)
        except OSError as error:
            if self.place.leads:
                raise
            unwritable = Measured("run-folder", self.place.node, None, error=reason_of(error))
            extra = {"values": [*answer.get("values", ()), *([] if number else [asdict(unwritable)])]}
            message = {"number": number, "node": self.place.node, "answer": {**answer, **extra}}
            send_answer(self.place.host, self.place.port, message)

    def _run(self, tests: Sequence[RankTest]) -> Answer:
        """Run this node's ranks of these tests at the same time."""
        reports = self.group.run(tests, self.place.local_ranks, self.lost)
        return {"told": [[asdict(report) for report in ranks] for ranks in reports]}

    def _reach(self, order: Mapping[str, Any]) -> Answer:
        node, peers = self.place.node, {int(other): peer for other, peer in order["peers"].items()}
        others = {
            other: peers[other] for other in partners(node, self.place.expected.nodes) if other in peers
        }
        values = (
            replace(value, subject=value.subject + order["words"]) for value in measure_ways(node, others)
        )
        return {"values": [asdict(value) for value in values]}

    def _mark_files(self, order: Mapping[str, Any]) -> Answer:
        self._mark = Mark(self.place.node, self.place.run.path, self.leftovers.add)
        return {"marks": self._mark.content}

    def _look(self, order: Mapping[str, Any]) -> Answer:
        node, marks = self.place.node, {int(other): mark for other, mark in order["marks"].items()}
        others = [other for other in partners(node, self.place.expected.nodes) if other in marks]
        until = time.monotonic() + SEEN_SECONDS
        values = [value for other in others for value in look(node, other, marks[other], until)]
        return {"values": [asdict(value) for value in values]}

    def _train(self, order: Mapping[str, Any]) -> Answer:
        ranks, gpus = self.place.expected.ranks, self.place.expected.gpus_per_node
        with tempfile.TemporaryDirectory(prefix="launcher-doctor-") as folder:
            self.leftovers.add(folder)
            runs, tests = [], []
            for test, sharding in zip(tests_of(order), TRAININGS.values(), strict=True):
                nodes = self.place.expected.nodes if len(test.ranks) > 1 else 1
                run = tiny_run(Path(folder), sharding, len(test.ranks), ranks, gpus, nodes)
                runs.append(run)
                tests.append(replace(test, options={**test.options, "run_dir": str(run.path)}))
            answer = self._run(tests)
            return {**answer, "steps": [*map(steps_of, runs)], "exceptions": [*map(error_of, runs)]}
