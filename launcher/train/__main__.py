"""`python -m launcher.train`: one rank of one attempt. The environment and the run directory say which."""

from __future__ import annotations

import atexit

from launcher.spec.verdict import EXIT_STOPPED
from launcher.train.budget import open_budget
from launcher.train.failure import fail, leave
from launcher.train.feed import open_feed
from launcher.train.loop import Trainer
from launcher.train.rank import Place, join_ranks, this_place, this_rank
from launcher.train.where import Where


def main() -> None:
    place, where = this_place(), Where()
    try:
        _train(place, where)
    except BaseException as error:  # SystemExit of user code, too: training did not finish
        fail(place, error, where)


def _train(place: Place, where: Where) -> None:
    rank = this_rank(place)
    feed = open_feed(rank, where)
    join_ranks(rank)
    with open_budget(rank.device) as budget:
        trainer = Trainer(rank, where, budget, feed)
        finished = trainer.train()
        if peak := budget.report():
            rank.say(peak)
        atexit._run_exitfuncs()  # what user code registered, such as a tracker's last upload
        # Every rank has passed the barrier behind the last checkpoint. After a request to stop they leave
        # all at once: torchrun ends those that are still there when the first one has left.
        leave(0 if finished else EXIT_STOPPED)


if __name__ == "__main__":
    main()
