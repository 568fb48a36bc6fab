"""How one rank reaches all others, whatever they are doing, when the attempt is to end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from launcher.train.rank import Rank

LISTENING = timedelta(days=20)
"At a time, then the thread listens again: the store counts milliseconds in 31 bits."
CONNECTING = timedelta(seconds=30)


class Alarm:
    """Connections of its own to torchrun's store, which lives outside all ranks.

    A thread waits there without holding the interpreter: it hears while the main thread is blocked in a
    collective or waits for the GPU. A single rank has nobody to tell, and no thread.
    """

    def __init__(self, rank: Rank) -> None:
        """Raises dist.DistError."""
        self.rank = rank
        self.rung = False
        "By this rank."
        self._talking = self._connect()

    def listen(self, heard: Callable[[str], object]) -> None:
        """`heard` is called on the thread, with the reason, when another rank rings."""
        if self.rank.world > 1:
            arguments = (self._connect(), heard)
            threading.Thread(target=self._listen, args=arguments, name="alarm", daemon=True).start()

    def ring(self, why: str) -> None:
        """Raises dist.DistError when the store is gone."""
        self.rung = True
        self._talking.set("alarm", why)

    def exchange(self, topic: str, mine: Any, seconds: float) -> dict[int, Any]:
        """What every rank said on `topic`, as JSON; after `seconds`, of those that have said something.

        Raises dist.DistError when the store is gone.
        """
        self._talking.set(_key(topic, self.rank.number), json.dumps(mine))
        keys = [_key(topic, number) for number in range(self.rank.world)]
        ranks = list(range(self.rank.world))
        try:
            self._talking.wait(keys, timedelta(seconds=seconds))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:
            ranks = [number for number in ranks if self._talking.check([keys[number]])]
        return {number: json.loads(self._talking.get(keys[number])) for number in ranks}

    def _listen(self, store: Store, heard: Callable[[str], object]) -> None:
        while True:
            try:
                store.wait(["alarm"], LISTENING)
            except dist.DistNetworkError:
                return  # torchrun is gone, and takes the ranks with it
            except dist.DistStoreError:
                continue
            if not self.rung:
                heard(store.get("alarm").decode())
            return

    def _connect(self) -> Store:
        """A client does one thing at a time: whoever waits with it can say nothing meanwhile."""
        if self.rank.world == 1:
            return HashStore()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=CONNECTING)
        return PrefixStore(f"launcher/{self.rank.run.id}/{self.rank.attempt.number}", store)


def _key(topic: str, rank: int) -> str:
    return f"{topic}/{rank}"
