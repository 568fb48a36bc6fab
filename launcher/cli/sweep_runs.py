"""`launcher status | cancel SWEEP`: all runs of a sweep together."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from launcher.cli.output import console, print_json
from launcher.rundir.find import SweepRuns


def status_of_all(sweep: SweepRuns, json: bool) -> NoReturn:
    """Show a line for each run, and the number of runs in each state.

    The exit code is 0 until all have ended, and then that of the first that did not succeed.
    """
    from launcher.report.listing import as_json, row_of, show_list
    from launcher.schedulers.lookup import states_of

    states_by_run = states_of(sweep.runs)
    statuses = list(states_by_run.values())
    states = Counter(status.state for status in statuses)
    if json:
        runs = [as_json(status, run) for run, status in states_by_run.items()]
        print_json({"sweep_id": sweep.id, "states": dict(states), "runs": runs})
    else:
        show_list(console(), [row_of(status, run) for run, status in states_by_run.items()])
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        print(f"\n{sweep.id}: {counts}")
        if missing := _missing(sweep):
            print(missing)
    all_ended = all(status.ended for status in statuses)
    raise SystemExit(
        next((status.exit_code for status in statuses if status.exit_code), 0) if all_ended else 0
    )


def _missing(sweep: SweepRuns) -> str:
    from launcher.api.cancel import submitted_one_by_one

    count = submitted_one_by_one(sweep) or 0
    missing = count - len(sweep.runs)
    return f"missing: {missing} of {count} runs, not submitted or deleted since" if missing > 0 else ""


def cancel_all(sweep: SweepRuns, json: bool) -> None:
    from dataclasses import asdict

    from launcher.api.cancel import cancel_sweep

    if not json and (missing := _missing(sweep)):
        print(f"{missing}; a `submit` that still runs stops")
    done = cancel_sweep(sweep)
    if json:
        print_json({"sweep_id": sweep.id, **asdict(done)})
        return
    task = sweep.runs[0].read_about().job.task
    request = "asked to write a checkpoint and stop" if task else "whose script is asked to stop by SIGTERM"
    counts = [
        f"{done.waiting} taken out of the queue" if done.waiting else "",
        f"{done.asked} {request}" if done.asked else "",
        f"{done.ended} whose ranks are being ended" if done.ended else "",
    ]
    print(
        f"{sweep.id}: {', '.join(filter(None, counts))}; "
        f"`launcher status {sweep.id}` shows when all have ended"
    )
