"""`python -m launcher.train`: one rank of one attempt. The environment and the run directory say which."""

from __future__ import annotations

from launcher.spec.verdict import EXIT_STOPPED
from launcher.train.budget import open_budget
from launcher.train.failure import fail, leave
from launcher.train.loop import Trainer
from launcher.train.rank import Place, process_group, this_place, this_rank
from launcher.train.where import Where


def main() -> None:
    place, where = this_place(), Where()
    try:
        _train(place, where)
    except BaseException as error:  # SystemExit of user code, too: training did not finish
        fail(place, error, where)


def _train(place: Place, where: Where) -> None:
    rank = this_rank(place)
    with process_group(rank), open_budget(rank.device) as budget:
        trainer = Trainer(rank, where, budget)
        finished = trainer.train()
        if peak := budget.report():
            rank.say(peak)
        if not finished:
            # All ranks at once: torchrun ends those that are still there when the first one leaves.
            leave(EXIT_STOPPED)


if __name__ == "__main__":
    main()
