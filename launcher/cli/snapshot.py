"""`launcher snapshot`: what fills the memory of a running job."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from launcher.cli.options import AsJson, RunName


def snapshot(
    run: RunName = None,
    rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--rank", min=0, help="only this rank; all of them if left out"),
    ] = None,
    json: AsJson = False,
) -> None:
    """Ask a running job for a memory snapshot of its next step."""
    from launcher.cli.output import EXIT_REFUSED, fail, print_json
    from launcher.rundir.files import read_json_lines, replace_json
    from launcher.rundir.find import find_run
    from launcher.rundir.time import now
    from launcher.schedulers.of_run import scheduler_of

    found = find_run(run)
    if not found.read_about().job.task:
        fail(f"{found.id} runs a `command:`; only the built-in entrypoint (`task:`) writes snapshots")
    scheduler = scheduler_of(found)
    state, attempts = scheduler.status(found).state, found.attempts()
    if state != "running" or not attempts:
        fail(f"{found.id} has no running ranks to ask: it is {state}", EXIT_REFUSED)
    attempt = attempts[-1]
    measured = read_json_lines(attempt.memory(rank or 0))
    if measured and "allocated" not in measured[-1]:
        fail(
            f"{found.id} trains on the CPU without a memory budget, so nothing counts what tensors hold: set "
            "one in the job's `env:`, e.g. {TRAIN_MEMORY_BUDGET: 16GiB}, and start it again",
            EXIT_REFUSED,
        )
    replace_json(attempt.snapshot_request, {"time": now(), "rank": rank})
    scheduler.fetch(found)
    folder = f"{scheduler.where(found)}/{attempt.memory(0).parent.relative_to(found.path)}"
    if json:
        print_json({"run_id": found.id, "attempt": attempt.number, "rank": rank, "folder": folder})
    else:
        who = "every rank" if rank is None else f"rank {rank}"
        print(f"{found.id}: asked; {who} records its next step and writes it into {folder}")
