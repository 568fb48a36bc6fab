"""`python -m launcher.train`: one rank of one attempt, given by the environment and the run directory."""

# ruff: noqa: E402
from __future__ import annotations

import gc

# The imports create 400,000 objects that stay alive. Collecting garbage among them takes a fifth of the
# import time, slows down every later collection, and copies memory that DataLoader workers share.
gc.disable()

import faulthandler
import os
import signal
import time

from launcher.spec import variables
from launcher.spec.signals import LEFT_TO_SUPERVISOR

BEGAN = time.monotonic()

# After a crash, such as a segmentation fault in a library, print where the Python code of this thread was.
faulthandler.enable(2, all_threads=False)

if variables.SUPERVISED in os.environ:
    # Slurm and others send these signals to every process of a run. Only the supervisor answers them; it
    # asks for a stop through a file.
    # This is a handler and not SIG_IGN, because programs that this process starts would inherit SIG_IGN.
    for number in LEFT_TO_SUPERVISOR:
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_SUPERVISOR)

import atexit
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn

from launcher.spec.verdict import EXIT_STOPPED, EXIT_TRAINED
from launcher.train.cpu_memory_budget import open_budget
from launcher.train.data.feed import open_feed
from launcher.train.drill import read_drills
from launcher.train.error_report import CLOSING_SECONDS, UPLOAD_SECONDS, fail, leave, within
from launcher.train.handover.restart import Restart
from launcher.train.handover.to_checkpoint import save_handover
from launcher.train.loop import Trainer
from launcher.train.metrics.snapshot import watch_out_of_memory
from launcher.train.metrics.trackers import check_trackers
from launcher.train.phase import Where
from launcher.train.rank import Place, Rank, join_ranks, this_place, this_rank

gc.freeze()
gc.enable()


def main() -> None:
    failing = Failing(this_place(), Where(), ExitStack())
    try:
        _train(failing)
    except BaseException as error:  # includes SystemExit in user code: training did not finish
        fail(failing.place, error, failing.where, failing.closing.close, failing.restart)


@dataclass
class Failing:
    """Arguments for `fail`; they are filled in as training starts."""

    place: Place
    where: Where
    closing: ExitStack
    "Callbacks to run on failure."
    restart: Restart | None = None


def _train(failing: Failing) -> None:
    place, where, closing = failing.place, failing.where, failing.closing
    rank = this_rank(place)
    if os.environ.get(variables.ONLY_SAVE):
        _save(rank, where)
    check_trackers(rank.job.train.trackers)
    feed = open_feed(rank, where)
    join_ranks(rank)
    if variables.SUPERVISED in os.environ:  # a rank started by hand has no next attempt
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
            print(f"this fire drill never took place: {drill}", flush=True)
        if within(UPLOAD_SECONDS if finished else CLOSING_SECONDS, trainer.recorder.close):
            atexit._run_exitfuncs()  # functions that user code registered, e.g. the last upload of a tracker
        # Every rank has passed the barrier after the last checkpoint. After a stop request all ranks leave
        # together, because the others are ended when the first one has left.
        if failing.restart is not None:
            failing.restart.end()
        leave(_done() if finished else EXIT_STOPPED)


def _save(rank: Rank, where: Where) -> NoReturn:
    """Write the handover that the attempt left in shared memory as a checkpoint, without training."""
    join_ranks(rank)
    with open_budget(rank.device, where) as budget:
        save_handover(rank, where, budget)
    leave(_done())


def _done() -> int:
    """Return the exit code of success. A worker expects one that no other code can end this process with."""
    return EXIT_TRAINED if variables.WORKER in os.environ else 0


if __name__ == "__main__":
    main()
