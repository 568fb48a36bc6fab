"""`launcher status | cancel SWEEP`: all runs of a sweep together."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from launcher.cli.output import console, print_json
from launcher.runs.find import SweepRuns


def status_of_all(sweep: SweepRuns, json: bool) -> NoReturn:
    """A line for each run, and how many are in each state. The exit code is 0 until all have ended, then that
    of the first that did not succeed."""
    from launcher.schedulers.of_run import statuses

    found = statuses(sweep.runs)
    states = Counter(status.state for status in found)
    if json:
        runs = [status.as_json() for status in found]
        print_json({"sweep_id": sweep.id, "states": dict(states), "runs": runs})
    else:
        from launcher.report.terminal import show_list

        show_list(console(), found)
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        print(f"\n{sweep.id}: {counts}")
    over = all(status.ended for status in found)
    raise SystemExit(next((status.exit_code for status in found if status.exit_code), 0) if over else 0)


def cancel_all(sweep: SweepRuns, json: bool) -> None:
    from dataclasses import asdict

    from launcher.schedulers import of_run

    done = of_run.cancel_all(sweep.runs, sweep.id)
    if json:
        print_json({"sweep_id": sweep.id, **asdict(done)})
        return
    foreign = not sweep.runs[0].read_about().get("job", {}).get("task")
    being = f"ranks being ended of {done.ended + (done.asked if foreign else 0)}"
    said = [
        f"{done.waiting} taken out of the queue" if done.waiting else "",
        f"{done.asked} asked to write a checkpoint and stop" if done.asked and not foreign else "",
        being if done.ended or (done.asked and foreign) else "",
    ]
    print(
        f"{sweep.id}: {', '.join(filter(None, said))}; `launcher status {sweep.id}` shows when all have ended"
    )
