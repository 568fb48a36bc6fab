"""A signal from one rank to all others that the attempt must end. It reaches ranks that are blocked."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from launcher.train.rank import Rank

LISTENING = timedelta(days=20)
"Timeout of one wait, after which the thread waits again: the store counts milliseconds in 31 bits."
CONNECTING = timedelta(seconds=30)
ENDING_SECONDS = 0.2
"Time for the other ranks to stop listening. A rank that has ended does not answer."


class Alarm:
    """Separate connections to the ranks' store, which torchrun serves on several nodes, and rank 0 on one.

    A thread waits on the store without holding the interpreter lock, so the signal arrives while the main
    thread is blocked in a collective or waits for the GPU. A single rank needs no thread.
    """

    def __init__(self, rank: Rank) -> None:
        """Raises dist.DistError."""
        self.rank = rank
        self.rung = False
        "This rank has rung the alarm."
        self._store = self._connect()

    def listen(self, on_alarm: Callable[[str], object]) -> None:
        """Start the thread. It calls `on_alarm` with the reason if another rank rings."""
        if self.rank.world > 1:
            arguments = (self._connect(), on_alarm)
            threading.Thread(target=self._listen, args=arguments, name="alarm", daemon=True).start()

    def ring(self, why: str) -> None:
        """Signal all other ranks. Raises dist.DistError if the store is gone."""
        self.rung = True
        self._store.set("alarm", why)

    def end(self) -> None:
        """Make all ranks stop listening before rank 0 exits, if it serves the store.

        A rank that still waits on the store would print a C++ stack trace. Raises dist.DistError if the
        store is gone.
        """
        if not self._first_serves:
            return
        if self.rank.first and not self._store.check(["alarm"]):
            self._store.set("alarm", "")
            self._release()
        else:
            self._store.set(_key("quiet", self.rank.number), "")

    def leave(self, seconds: float) -> None:
        """After `ring`, wait until all ranks leave, but at most `seconds`. Raises dist.DistError if the store
        is gone."""
        self.meet("leaving", True, seconds)
        if self._first_serves:
            self._release()

    @property
    def _first_serves(self) -> bool:
        """Whether the store ends with the first rank."""
        return self.rank.world > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)

    def _release(self) -> None:
        """Note that this rank no longer uses the store. The first rank waits for the notes of the others."""
        self._store.set(_key("quiet", self.rank.number), "")
        if not self.rank.first:
            return
        all_quiet = [_key("quiet", number) for number in range(self.rank.world)]
        deadline = time.monotonic() + ENDING_SECONDS
        while not self._store.check(all_quiet) and time.monotonic() < deadline:
            time.sleep(0.002)  # a wait on the store that times out would print a warning

    def exchange(self, topic: str, value: Any, seconds: float) -> dict[int, Any]:
        """Return each rank's value for `topic`, by rank. Ranks without one after `seconds` are left out.

        `value` must fit into JSON. Raises dist.DistError if the store is gone.
        """
        ranks = self.meet(topic, value, seconds)
        return {number: json.loads(self._store.get(_key(topic, number))) for number in ranks}

    def meet(self, topic: str, value: Any, seconds: float) -> list[int]:
        """Set this rank's value for `topic`, wait as `exchange` does, and return the ranks that have one."""
        self._store.set(_key(topic, self.rank.number), json.dumps(value))
        keys = [_key(topic, number) for number in range(self.rank.world)]
        ranks = list(range(self.rank.world))
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:
            ranks = [number for number in ranks if self._store.check([keys[number]])]
        return ranks

    def _listen(self, store: Store, on_alarm: Callable[[str], object]) -> None:
        while True:
            try:
                store.wait(["alarm"], LISTENING)
            except dist.DistNetworkError:
                return  # the process that served the store is gone, and the ranks are being ended
            except dist.DistStoreError:
                continue
            if self.rung:
                return
            if why := store.get("alarm").decode():
                on_alarm(why)
            else:
                store.set(_key("quiet", self.rank.number), "")
            return

    def _connect(self) -> Store:
        """Return a new connection. A connection that waits cannot send at the same time."""
        if self.rank.world == 1:
            return HashStore()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=CONNECTING)
        return PrefixStore(f"launcher/{self.rank.run.id}/{self.rank.attempt.number}", store)


def _key(topic: str, rank: int) -> str:
    return f"{topic}/{rank}"
