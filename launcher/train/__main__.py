"""`python -m launcher.train`: one rank of one attempt. The environment and the run directory say which."""

# ruff: noqa: E402
from __future__ import annotations

import gc

# The imports make 400,000 objects that stay. To look for garbage among them is a fifth of the time they take,
# makes each later look longer, and copies memory that DataLoader workers share.
gc.disable()

import os
import signal
import time

from launcher.spec import variables

BEGAN = time.monotonic()

if variables.SUPERVISED in os.environ:
    # Slurm and others send it to every process of a run; the supervisor asks by a file. A handler, since
    # programs that this process starts do not inherit it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

import atexit
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn

from launcher.spec.verdict import EXIT_STOPPED
from launcher.train.budget import open_budget
from launcher.train.drill import read_drills
from launcher.train.failure import CLOSING_SECONDS, UPLOAD_SECONDS, fail, leave, within
from launcher.train.feed import open_feed
from launcher.train.loop import Trainer
from launcher.train.metrics.snapshot import watch_out_of_memory
from launcher.train.metrics.trackers import check_trackers
from launcher.train.rank import Place, Rank, join_ranks, this_place, this_rank
from launcher.train.recovery.restart import Restart
from launcher.train.recovery.save import save_handover
from launcher.train.where import Where

gc.freeze()
gc.enable()


def main() -> None:
    failing = Failing(this_place(), Where(), ExitStack())
    try:
        _train(failing)
    except BaseException as error:  # SystemExit of user code, too: training did not finish
        fail(failing.place, error, failing.where, failing.closing.close, failing.restart)


@dataclass
class Failing:
    """What a failure needs, as far as it is known."""

    place: Place
    where: Where
    closing: ExitStack
    "What is to be done then."
    restart: Restart | None = None


def _train(failing: Failing) -> None:
    place, where, closing = failing.place, failing.where, failing.closing
    rank = this_rank(place)
    if os.environ.get(variables.ONLY_SAVE):
        _save(rank, where)
    check_trackers(rank.job.train.trackers)
    feed = open_feed(rank, where)
    join_ranks(rank)
    if variables.SUPERVISED in os.environ:  # started by hand there is no next attempt
        failing.restart = Restart(rank, BEGAN)
    drills = read_drills(rank, where)
    with open_budget(rank.device, where, drills) as budget:
        watch_out_of_memory(rank, budget, where)
        trainer = Trainer(rank, where, budget, feed, failing.restart)
        closing.callback(trainer.recorder.close, failed=True)
        finished = trainer.train()
        if peak := budget.report():
            rank.say(peak)
        for drill in drills.missed(rank.attempt.number) if drills and finished else ():
            print(f"this fire drill never came about: {drill}", flush=True)
        if within(UPLOAD_SECONDS if finished else CLOSING_SECONDS, trainer.recorder.close):
            atexit._run_exitfuncs()  # what user code registered, such as its own tracker's last upload
        # Every rank has passed the barrier behind the last checkpoint. After a request to stop they leave
        # all at once: torchrun ends those that are still there when the first one has left.
        leave(0 if finished else EXIT_STOPPED)


def _save(rank: Rank, where: Where) -> NoReturn:
    """Write what the attempt left in shared memory as a checkpoint, instead of training."""
    join_ranks(rank)
    with open_budget(rank.device, where) as budget:
        save_handover(rank, where, budget)
    leave(0)


if __name__ == "__main__":
    main()
