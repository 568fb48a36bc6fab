"""Signs of life: node 0 knows within half a minute that a node has died, whatever the node was asked for.

Every other node writes its pulse into the run directory. Where that stops, node 0 asks the doctor of the node
over the network. Either sign is enough, since a folder may be slow, and the network is what is examined.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from launcher.doctor.measure.network import responds
from launcher.doctor.orders import Orders

BEAT_SECONDS = 1.0
BEATS_PER_SECOND = 50
"Limit for all nodes together. Each beat writes a file, which loads the shared file system."
LOST_BEATS = 15
"A node without a new pulse for so many beats is asked over the network."


@contextmanager
def pulse(orders: Orders, identity: Mapping[str, Any]) -> Iterator[None]:
    """Show that this node is alive. `identity`: how other nodes reach it, as `responds` takes it."""
    numbers = count()

    def beat() -> None:
        with suppress(OSError):  # a node without a pulse has the time limit of each order
            orders.beat({"number": next(numbers), "identity": identity})

    with _at_every_beat(orders.nodes, beat):
        yield


class Watch:
    """The pulses of the other nodes, as node 0 sees them."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._last: dict[int, Mapping[str, Any]] = {}
        self._silent: dict[int, int] = {}
        "Beats since the last new pulse. They are counted here, so that a pause of node 0 does not count."
        self.lost: frozenset[int] = frozenset()
        "Nodes that had a pulse, and show no sign of life any more."

    def look(self) -> None:
        """Read every pulse. It is to be called at every beat."""
        for node, pulse in self._orders.pulses().items():
            silent = pulse == self._last.get(node)
            self._last[node], self._silent[node] = pulse, self._silent.get(node, 0) + 1 if silent else 0
        if late := {node for node, beats in self._silent.items() if beats >= LOST_BEATS} - self.lost:
            with ThreadPoolExecutor(len(late)) as pool:
                alive = pool.map(lambda node: responds(self._last[node]["identity"]), late)
                for node in [node for node, one in zip(late, alive, strict=True) if one]:
                    self._silent[node] = 0
            self.lost |= {node for node in late if self._silent[node]}


@contextmanager
def watched(orders: Orders) -> Iterator[Watch]:
    """Watch the pulses of the other nodes."""
    watch = Watch(orders)
    with _at_every_beat(orders.nodes, watch.look):
        yield watch


@contextmanager
def _at_every_beat(nodes: int, do: Callable[[], None]) -> Iterator[None]:
    end, seconds = threading.Event(), max(BEAT_SECONDS, nodes / BEATS_PER_SECOND)

    def go_on() -> None:
        while not end.is_set():
            do()
            end.wait(seconds)

    threading.Thread(target=go_on, daemon=True).start()
    try:
        yield
    finally:
        end.set()  # the thread is not waited for: a folder may hang
