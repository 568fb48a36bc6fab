"""Start the supervisors of a run: the other nodes' first, node 0's last."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.rundir.layout import RunDir
from launcher.schedulers.base import SchedulerError
from launcher.schedulers.over_ssh.remote_store import RemoteStore
from launcher.schedulers.ssh.choose import Chosen, local_secrets, python_of
from launcher.schedulers.ssh.hosts import ask_host, in_parallel, results_or_raise
from launcher.schedulers.ssh.no_shared_folder import send_to_all

START_SECONDS = 240.0
"Timeout for one host, which may wait for its disk, processes of an earlier start and a cold interpreter."


@dataclass(frozen=True)
class Start:
    """One start of all supervisors of a run.

    `stores` are those on the chosen hosts. Round trips of node 0's also send and fetch the run directory.
    """

    run: RunDir
    chosen: Chosen
    stores: Sequence[RemoteStore]
    event: str
    handle: str
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    "Token by which these supervisors recognise each other."

    def start_all(self) -> None:
        """Start all supervisors, node 0's last.

        If one cannot be started, end the others and raise SchedulerError.
        """
        gpus: dict[str, list[int]] = {}
        others = range(1, len(self.stores))
        if self.chosen.separate_folders:
            send_to_all(self.run, self.stores)
        elif others:
            self.stores[0].run(":")  # sends the run directory
        answers = in_parallel(self._start, others)
        try:
            for rank, answer in zip(others, results_or_raise(answers), strict=True):
                gpus[self.stores[rank].name] = answer["gpus"]
            self._start(0, gpus)
        except SchedulerError:
            started = [rank for rank, answer in zip(others, answers, strict=True) if isinstance(answer, dict)]
            in_parallel(self._stop, started)
            raise

    def _start(self, rank: int, gpus: Mapping[str, list[int]] | None = None) -> dict[str, Any]:
        """Start one supervisor. `gpus` maps the other hosts to their GPUs."""
        about, store, rendezvous = self.run.read_about(), self.stores[rank], self.chosen.rendezvous
        run_dir, python = store.path(self.run, self.run.path), python_of(about)
        command = [python, "-m", "launcher.supervise", run_dir]
        event = {"event": self.event, "handle": self.handle, "command": command}
        request = {
            "do": "start",
            "run_dir": run_dir,
            "rank": rank,
            "host": store.name,
            # The supervisor of a sweep's run waits for GPUs by itself.
            "gpus": about.gpus_per_node if about.sweep is None else 0,
            "place": rendezvous.options(rank, len(self.stores)) if rendezvous is not None else (),
            "event": event if rank == 0 else None,
            "others_gpus": gpus,
            "secrets": local_secrets(about),
            "token": self.token,
        }
        return ask_host(store if rank == 0 else store.login, python, request, timeout=START_SECONDS)

    def _stop(self, rank: int) -> dict[str, Any]:
        store = self.stores[rank]
        request = {"do": "stop", "run_dir": store.path(self.run, self.run.path), "rank": rank}
        return ask_host(store.login, python_of(self.run.read_about()), request)
