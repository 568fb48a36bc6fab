"""Heartbeats, by which node 0 notices within half a minute that another node has died.

Every other node writes heartbeats into the run directory. If they stop, node 0 connects to the node's doctor
over the network. One sign of life is enough, because the folder may be slow and the network may be broken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from launcher.doctor.measure.network import responds
from launcher.doctor.order_files import Orders

BEAT_SECONDS = 1.0
BEATS_PER_SECOND = 50
"Limit for all nodes together. Each beat writes a file, which loads the shared file system."
LOST_BEATS = 15
"Missed heartbeats after which node 0 tries to reach the node over the network."


@contextmanager
def heartbeat(orders: Orders, identity: Mapping[str, Any]) -> Iterator[None]:
    """Write this node's heartbeats. `identity` tells other nodes how to reach it (see `responds`)."""
    numbers = count()

    def beat() -> None:
        with suppress(OSError):  # a node without heartbeats still has the time limit of each order
            orders.beat({"number": next(numbers), "identity": identity})

    with _at_every_beat(orders.nodes, beat):
        yield


class HeartbeatMonitor:
    """Node 0's view of the other nodes' heartbeats."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._last: dict[int, Mapping[str, Any]] = {}
        self._silent: dict[int, int] = {}
        "Checks since the last new heartbeat. Counting checks, not time, ignores a pause of node 0 itself."
        self.lost: frozenset[int] = frozenset()
        "Nodes that once sent heartbeats and no longer show any sign of life."

    def check(self) -> None:
        """Read all heartbeats. Call this once per beat."""
        for node, latest in self._orders.pulses().items():
            silent = latest == self._last.get(node)
            self._last[node], self._silent[node] = latest, self._silent.get(node, 0) + 1 if silent else 0
        if late := {node for node, beats in self._silent.items() if beats >= LOST_BEATS} - self.lost:
            with ThreadPoolExecutor(len(late)) as pool:
                alive = pool.map(lambda node: responds(self._last[node]["identity"]), late)
                for node in [node for node, responded in zip(late, alive, strict=True) if responded]:
                    self._silent[node] = 0
            self.lost |= {node for node in late if self._silent[node]}


@contextmanager
def monitored(orders: Orders) -> Iterator[HeartbeatMonitor]:
    """Check the heartbeats of the other nodes in the background."""
    monitor = HeartbeatMonitor(orders)
    with _at_every_beat(orders.nodes, monitor.check):
        yield monitor


@contextmanager
def _at_every_beat(nodes: int, action: Callable[[], None]) -> Iterator[None]:
    end, seconds = threading.Event(), max(BEAT_SECONDS, nodes / BEATS_PER_SECOND)

    def loop() -> None:
        while not end.is_set():
            action()
            end.wait(seconds)

    threading.Thread(target=loop, daemon=True).start()
    try:
        yield
    finally:
        end.set()  # do not join the thread: the folder may hang
